#!/usr/bin/env bash
#SBATCH --job-name=pipeline
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#
# Trains a model of examples/cluster/models under Slurm, one task for each GPU. From the project's directory:
#
#   bash examples/cluster/slurm.sh gpt3_96b --dry-run         # check everything, run nothing; needs torch, and no GPU
#   export DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINTS=...
#   sbatch --nodes 4 examples/cluster/slurm.sh gpt3_96b
#
# Give sbatch the account, the partition and the time limit that your cluster asks for, and --signal=TERM@120 to save
# before the limit. job.sh says what the environment may set. Further words are flags of the program.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
if [ -n "${SLURM_JOB_ID:-}" ]; then
    NNODES="$SLURM_NNODES"
    GPUS_PER_NODE="${SLURM_NTASKS_PER_NODE:?is not set: give sbatch --ntasks-per-node, the GPUs of a node}"
fi
. examples/cluster/job.sh
: "${SLURM_JOB_ID:?is not set: start this script with sbatch --nodes $NNODES, or add --dry-run}"
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
export MASTER_ADDR MASTER_PORT
export LOCAL_WORLD_SIZE="$GPUS_PER_NODE"
# shellcheck disable=SC2016  # each task expands its own Slurm variables
exec srun --kill-on-bad-exit=1 bash -c \
    'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec python "$@"' \
    rank "$program" "${arguments[@]}"
