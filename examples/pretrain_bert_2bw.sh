#!/usr/bin/env bash
# Pretrains a BERT without pipeline flushes (PipeDream-2BW): as it stands a small one on 2 CPU ranks and on text that
# every machine has, in a few minutes; with arguments a BERT-large on one node of GPUs.
#
#   bash examples/pretrain_bert_2bw.sh                                   # results in outputs/bert, or in $OUTPUT
#   GPUS_PER_NODE=8 TP=2 PP=4 bash examples/pretrain_bert_2bw.sh CHECKPOINTS VOCAB_FILE DATA_PREFIX [LOGS]
#
# DATA_PREFIX is what tools/preprocess_data.py --split-sentences wrote, without .bin. Data parallel size =
# GPUS_PER_NODE / (TP x PP). SCHEDULE is 2bw, flush, zb-h1 or the like; LAYERS, HIDDEN, HEADS, SEQUENCE, MICRO_BATCH,
# GLOBAL_BATCH, ITERATIONS, LEARNING_RATE and PRECISION (--bf16, --fp16, or empty for FP32) change the run.
set -euo pipefail
if [ "$#" -eq 1 ] || [ "$#" -eq 2 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 1
fi
for path in "$@"; do set -- "${@:2}" "$(realpath -m "$path")"; done # as they are called here, before cd
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$#" -eq 0 ]; then
    . tools/environment.sh
    prepare_environment core
    install_project
    output="${OUTPUT:-outputs/bert}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    bash examples/quickstart/prepare_bert_data.sh "$output/data"
    CHECKPOINT_PATH="$output/checkpoints"
    VOCAB_FILE="$output/data/vocab.txt"
    DATA_PATH="$output/data/corpus_text_sentence"
    LOG_PATH="$output/logs"
    size=(4 128 4 64 8 32 300 1e-3 .3)
    GPUS_PER_NODE=${GPUS_PER_NODE:-2}
    PP=${PP:-2}
    PRECISION=${PRECISION-}
    SMALL_ARGS=(--num-workers 0 --split 90,10,0 --log-interval 25 --eval-interval 50 --save-interval 100)
else
    CHECKPOINT_PATH=$1
    VOCAB_FILE=$2
    DATA_PATH=$3
    LOG_PATH=${4:-$CHECKPOINT_PATH/logs}
    size=(24 1024 16 512 4 256 1000000 1e-4 .01)
    GPUS_PER_NODE=${GPUS_PER_NODE:-8}
    PP=${PP:-4}
    PRECISION=${PRECISION---bf16}
    SMALL_ARGS=(--use-distributed-optimizer --split 949,50,1 --log-interval 100 --eval-interval 1000 --save-interval 10000)
fi
TP=${TP:-1}
SCHEDULE=${SCHEDULE:-2bw}
SEQUENCE=${SEQUENCE:-${size[3]}}

export CUDA_DEVICE_MAX_CONNECTIONS=32 # a hardware queue for each stream: docs/gpu.md

DISTRIBUTED_ARGS=(--standalone --nnodes 1 --nproc-per-node "$GPUS_PER_NODE")

BERT_MODEL_ARGS=(
    --num-layers "${LAYERS:-${size[0]}}"
    --hidden-size "${HIDDEN:-${size[1]}}"
    --num-attention-heads "${HEADS:-${size[2]}}"
    --seq-length "$SEQUENCE"
    --max-position-embeddings "$SEQUENCE"
    --attention-backend auto
)

TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH:-${size[4]}}"
    --global-batch-size "${GLOBAL_BATCH:-${size[5]}}" # under 2bw at least PP microbatches for each replica
    --train-iters "${ITERATIONS:-${size[6]}}"
    --optimizer adam
    --weight-decay 1e-2
    --clip-grad 1.0
    --lr "${LEARNING_RATE:-${size[7]}}"
    --min-lr 0
    --lr-decay-style linear
    --lr-warmup-fraction "${size[8]}"
)
if [ -n "$PRECISION" ]; then
    TRAINING_ARGS+=("$PRECISION")
fi

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --pipeline-schedule "$SCHEDULE"
)
if [ "$TP" -gt 1 ]; then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --tokenizer-type BertWordPieceLowerCase
    --mask-prob 0.15
    --short-seq-prob 0.1
)

EVAL_AND_LOGGING_ARGS=(
    --log-throughput
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --metrics-file "$LOG_PATH/metrics.jsonl"
)

exec python -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" pretrain_bert.py \
    "${BERT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${SMALL_ARGS[@]}"
