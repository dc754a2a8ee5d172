#!/usr/bin/env bash
# Mixtral 8x7B on 32 H100, with the degrees, the batch and the rates of Megatron-LM's example:
# https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/examples/mixtral/train_mixtral_8x7b_distributed.sh
program=pretrain_gpt.py gpu=H100 num_gpus=32
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TP="${TP:-1}" PP="${PP:-4}" EP="${EP:-8}" CP="${CP:-1}" MICRO_BATCH="${MICRO_BATCH:-1}" GLOBAL_BATCH="${GLOBAL_BATCH:-256}"
RECOMPUTE="${RECOMPUTE:-none}" SCHEDULE="${SCHEDULE:-flush}" RANK_MAPPING="${RANK_MAPPING:-standard}"
model_args=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 --vocab-size 32000
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.01 --bf16
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
training_args=(
    --train-iters "${ITERATIONS:-500000}" --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --clip-grad 1.0 --context-parallel-size "$CP" --expert-model-parallel-size "$EP"
    "${small_args[@]}" ${SMALL:+--num-query-groups 2}
)
[ -n "$SMALL" ] || tokenizer_args=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model mistralai/Mixtral-8x7B-v0.1)
