# Sourced: the GPT of 2.2 billion parameters of the PipeDream-2BW paper (https://arxiv.org/abs/2006.09503) on a server of 8
# V100 with 16 GB: 8 stages, recomputation, sequences of 512 (section 5.2); Adam, learning rate 1e-4 with warm-up and
# linear decay, batches of 512 (section 5.1). 64 GPUs make it 8 replicas. Transformer Engine does not run on V100.
program=pretrain_gpt.py
gpu=V100-16
num_gpus=8
TP="${TP:-1}" PP="${PP:-8}" MICRO_BATCH="${MICRO_BATCH:-8}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}" RECOMPUTE="${RECOMPUTE:-stage}"
SCHEDULE="${SCHEDULE:-2bw}"
RANK_MAPPING="${RANK_MAPPING:-standard}"
model_args=(
    --num-layers 32 --hidden-size 2304 --num-attention-heads 32 --seq-length 512 --max-position-embeddings 512 --fp16
    --transformer-impl local
)
training_args=(
    --train-iters 300000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-fraction 0.01
    --adam-beta1 0.9 --adam-beta2 0.999 --weight-decay 0.01 --clip-grad 1.0
)
