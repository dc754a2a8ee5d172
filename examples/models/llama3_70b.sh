#!/usr/bin/env bash
# Llama-3 70B on 64 H100, with the degrees, the batch and the rates of Megatron-Bridge's recipe:
# https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/203599bf3f798a01f2e5e7dcf01cffc2c22e7bc6/src/megatron/bridge/recipes/llama/llama3_70b.py
program=pretrain_gpt.py gpu=H100 num_gpus=64
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TP="${TP:-4}" PP="${PP:-4}" VP="${VP:-5}" CP="${CP:-2}" MICRO_BATCH="${MICRO_BATCH:-1}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
RECOMPUTE="${RECOMPUTE:-none}" RANK_MAPPING="${RANK_MAPPING:-standard}"
[ "$VP" = 1 ] && SCHEDULE="${SCHEDULE:-flush}" || SCHEDULE="${SCHEDULE:-interleaved}"
model_args=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --kv-channels 128
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.008944 --bf16
)
training_args=(
    --train-iters "${ITERATIONS:-1168251}" --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --context-parallel-size "$CP"
    "${small_args[@]}" ${SMALL:+--num-query-groups 2}
)
[ -n "$SMALL" ] || tokenizer_args=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-70B)
