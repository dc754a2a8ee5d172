#!/usr/bin/env bash
# Trains a model of examples/cluster/models on the GPUs of this node.
#
#   bash examples/cluster/one_node.sh gpt3_13b --dry-run      # check everything, run nothing; needs torch, and no GPU
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINTS=... bash examples/cluster/one_node.sh gpt3_13b
#
# job.sh says what the environment may set. Further words are flags of the program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NNODES=1
. examples/cluster/job.sh
exec python -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node "$GPUS_PER_NODE" \
    "$program" "${arguments[@]}"
