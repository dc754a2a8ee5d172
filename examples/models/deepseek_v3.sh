#!/usr/bin/env bash
# DeepSeek-V3 on 1,024 H100, with the degrees, the layout, the recomputation, the batch and the rates of the Megatron MoE
# model zoo, in bf16:
# https://github.com/yanring/Megatron-MoE-ModelZoo/blob/e8650517d60d71ab73fc6b3b0388cac4ba435181/best_practice/deepseek-v3/run_deepseek_v3_h100.sh
program=pretrain_gpt.py gpu=H100 num_gpus=1024
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TP="${TP:-2}" PP="${PP:-8}" EP="${EP:-64}" LAYOUT="${LAYOUT-Et|(tt|)*30mL}" # of 32 stages: give another with PP
MICRO_BATCH="${MICRO_BATCH:-1}" GLOBAL_BATCH="${GLOBAL_BATCH:-8192}"
modules="${RECOMPUTE:+none}" # RECOMPUTE takes the place of the published modules
RECOMPUTE="${RECOMPUTE:-none}" RANK_MAPPING="${RANK_MAPPING:-standard}"
[ -z "$LAYOUT" ] && SCHEDULE="${SCHEDULE:-flush}" || SCHEDULE="${SCHEDULE:-interleaved}"
model_args=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129280 --make-vocab-size-divisible-by 3232
    --position-embedding-type rope --rotary-base 10000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --qk-layernorm
    --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)' --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
)
training_args=(
    --train-iters "${ITERATIONS:-71525}" --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine --lr-warmup-iters 187
    --lr-warmup-init 3.9e-7 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep "${small_args[@]}"
)
if [ -n "$SMALL" ]; then
    training_args+=(
        --moe-layer-freq '[0]*1+[1]*3' --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
        --num-experts 8 --moe-router-topk 2 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-ffn-hidden-size 32
        --moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type alltoall
    )
else
    tokenizer_args=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3)
fi
[ -n "$modules" ] || training_args+=(--recompute-granularity selective --recompute-modules mla_up_proj mlp)
[ -z "$LAYOUT" ] || training_args+=(--pipeline-model-parallel-layout "$LAYOUT")
