# Sourced by the models of 2.2 billion parameters: what the PipeDream-2BW paper (https://arxiv.org/abs/2006.09503) says of
# both. A server of 8 V100 with 16 GB, 8 stages, recomputation, sequences of 512 (section 5.2), Adam, learning rate 1e-4
# with warm-up and linear decay (section 5.1); layers and widths are those of the authors' sweep. 64 GPUs make 8 replicas.
# Transformer Engine does not run on V100.
gpu=V100-16
num_gpus=8
TP="${TP:-1}" PP="${PP:-8}" MICRO_BATCH="${MICRO_BATCH:-8}" RECOMPUTE="${RECOMPUTE:-stage}"
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
