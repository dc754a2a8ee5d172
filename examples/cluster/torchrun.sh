#!/usr/bin/env bash
# Trains a model of examples/cluster/models on several nodes. Start it on every node, with the same environment:
#
#   bash examples/cluster/torchrun.sh gpt3_96b --dry-run      # check everything, run nothing; needs torch, and no GPU
#   MASTER_ADDR=node0 DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINTS=... \
#       bash examples/cluster/torchrun.sh gpt3_96b
#
# MASTER_ADDR is one of the nodes, on which MASTER_PORT (default 29500) is free. job.sh says what else the environment
# may set. Further words are flags of the program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. examples/cluster/job.sh
: "${MASTER_ADDR:?is not set: the name of one of the nodes, the same on all of them}"
exec python -m torch.distributed.run --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" \
    --rdzv-backend c10d --rdzv-id "${JOB_ID:-$model}" --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
    "$program" "${arguments[@]}"
