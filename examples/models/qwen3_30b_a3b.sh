#!/usr/bin/env bash
# Qwen3-30B-A3B on 32 H100, with the degrees, the batch and the rates of Megatron-Bridge's recipe:
# https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/3594df948093cdb3c5ef4846e5d95f8c4a8584eb/src/megatron/bridge/recipes/qwen/qwen3_30b_a3b.py
program=pretrain_gpt.py gpu=H100 num_gpus=32
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TP="${TP:-4}" PP="${PP:-2}" EP="${EP:-4}" CP="${CP:-1}" MICRO_BATCH="${MICRO_BATCH:-2}" GLOBAL_BATCH="${GLOBAL_BATCH:-32}"
RECOMPUTE="${RECOMPUTE:-layer}" SCHEDULE="${SCHEDULE:-flush}" RANK_MAPPING="${RANK_MAPPING:-standard}"
model_args=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --seq-length 4096 --max-position-embeddings 40960
    --vocab-size 151936 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
)
training_args=(
    --train-iters "${ITERATIONS:-300000}" --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    "${small_args[@]}" ${SMALL:+--num-query-groups 2 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32}
)
[ -n "$SMALL" ] || tokenizer_args=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B)
