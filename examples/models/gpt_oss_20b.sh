#!/usr/bin/env bash
# GPT-OSS 20B on 8 H100, with the degrees, the batch and the rates of Megatron-Bridge's recipe, and with recomputation, without
# which the first stage misses 0.4 GiB:
# https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/07b4a5837b4a9d24e91520ce3930529bbeede6f9/src/megatron/bridge/recipes/gpt_oss/gpt_oss.py
program=pretrain_gpt.py gpu=H100 num_gpus=8
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TP="${TP:-1}" PP="${PP:-4}" EP="${EP:-2}" CP="${CP:-1}" MICRO_BATCH="${MICRO_BATCH:-1}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
RECOMPUTE="${RECOMPUTE:-layer}" SCHEDULE="${SCHEDULE:-flush}" RANK_MAPPING="${RANK_MAPPING:-standard}"
model_args=(
    --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --kv-channels 64
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 131072 --vocab-size 201088
    --position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32 --yarn-beta-fast 32 --yarn-beta-slow 1
    --yarn-original-max-position-embeddings 4096 --no-yarn-correction-range-round-to-int --normalization RMSNorm
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --no-bias-dropout-fusion
    --softmax-type learnable --window-size 128,0 --window-attn-skip-freq 2
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --moe-router-load-balancing-type none
    --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
)
training_args=(
    --train-iters "${ITERATIONS:-1000000}" --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    "${small_args[@]}" ${SMALL:+--num-query-groups 2 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --window-size 16,0}
)
[ -n "$SMALL" ] || tokenizer_args=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model openai/gpt-oss-20b)
