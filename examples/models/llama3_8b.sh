#!/usr/bin/env bash
# Llama-3 8B on 8 H100, with the model, the batch and the rates of Megatron-LM's example, in bf16:
# https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/examples/llama/train_llama3_8b_h100_fp8.sh
# Two stages and four replicas, in place of eight replicas.
program=pretrain_gpt.py gpu=H100 num_gpus=8
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TP="${TP:-1}" PP="${PP:-2}" CP="${CP:-1}" MICRO_BATCH="${MICRO_BATCH:-1}" GLOBAL_BATCH="${GLOBAL_BATCH:-128}"
RECOMPUTE="${RECOMPUTE:-none}" SCHEDULE="${SCHEDULE:-flush}" RANK_MAPPING="${RANK_MAPPING:-standard}"
model_args=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.0134 --bf16
)
training_args=(
    --train-iters "${ITERATIONS:-15258789}" --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine
    --lr-warmup-iters 30518 --decoupled-lr 5e-4 --decoupled-min-lr 4.5e-5
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --calculate-per-token-loss --cross-entropy-loss-fusion --context-parallel-size "$CP"
    "${small_args[@]}" ${SMALL:+--num-query-groups 2}
)
if [ -z "$SMALL" ]; then
    model_args+=(--apply-layernorm-1p)
    tokenizer_args=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B)
fi
