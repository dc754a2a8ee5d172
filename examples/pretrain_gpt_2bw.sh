#!/usr/bin/env bash
# Pretrains a GPT on one node without pipeline flushes (PipeDream-2BW), in the manner of Megatron-LM's scripts.
#
#   bash examples/pretrain_gpt_2bw.sh CHECKPOINTS VOCAB_FILE MERGE_FILE DATA_PREFIX [LOGS]
#   GPUS_PER_NODE=8 TP=2 PP=4 bash examples/pretrain_gpt_2bw.sh ...
#   SCHEDULE=interleaved VP=3 bash examples/pretrain_gpt_2bw.sh ...     # three stages on each rank
#
# DATA_PREFIX is what tools/preprocess_data.py wrote, without .bin. Data parallel size = GPUS_PER_NODE / (TP x PP).
set -euo pipefail
if [ "$#" -lt 4 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 1
fi
for path in "$@"; do set -- "${@:2}" "$(realpath -m "$path")"; done # as they are called here, before cd
CHECKPOINT_PATH=$1
VOCAB_FILE=$2
MERGE_FILE=$3
DATA_PATH=$4
LOG_PATH=${5:-$CHECKPOINT_PATH/logs}

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=${TP:-1}
PP=${PP:-4}
VP=${VP:-1}               # stages on each rank, for SCHEDULE=interleaved
SCHEDULE=${SCHEDULE:-2bw} # or gpipe, flush, interleaved
MICRO_BATCH=${MICRO_BATCH:-4}
GLOBAL_BATCH=${GLOBAL_BATCH:-256} # under 2bw at least PP microbatches for each data-parallel replica

export CUDA_DEVICE_MAX_CONNECTIONS=32 # a hardware queue for each stream: docs/gpu.md

DISTRIBUTED_ARGS=(--standalone --nnodes 1 --nproc-per-node "$GPUS_PER_NODE")

GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters 100000
    --optimizer adam
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 2.0e-4
    --min-lr 2.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .001
    --lr-decay-iters 90000
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --pipeline-schedule "$SCHEDULE"
    --use-distributed-optimizer
)
if [ "$VP" -gt 1 ]; then
    MODEL_PARALLEL_ARGS+=(--num-virtual-stages-per-pipeline-rank "$VP")
fi
if [ "$TP" -gt 1 ]; then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --tokenizer-type GPT2BPETokenizer
    --split 949,50,1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --log-throughput
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$LOG_PATH"
    --metrics-file "$LOG_PATH/metrics.jsonl"
)

cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}"
