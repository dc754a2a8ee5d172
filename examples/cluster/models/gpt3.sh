# Sourced by the GPT-3 models: what those of the BPipe paper (https://proceedings.mlr.press/v202/kim23l.html) share:
# section 4.1, and for the training the GPT-3 paper (Brown et al. 2020, appendix B and table 2.1).
program=pretrain_gpt.py
gpu=A100-80
SCHEDULE="${SCHEDULE:-bpipe}"
# The paper recomputes attention for the two larger models. Flash attention does so within its kernel, and saves as much;
# with --transformer-impl local, which has none, set RECOMPUTE=attention.
RECOMPUTE="${RECOMPUTE:-none}"
RANK_MAPPING="${RANK_MAPPING:-pair-adjacent}"
model_args+=(
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 51200 --fp16 --init-method-std 0.006
)
training_args+=(
    --train-samples 146484375 --lr-decay-style cosine --lr-decay-samples 126953125 --lr-warmup-samples 183105
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
)
