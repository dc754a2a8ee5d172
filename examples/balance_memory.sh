#!/usr/bin/env bash
# What does BPipe do to the memory of the stages? Trains a small GPT for some iterations under flush and under bpipe,
# counts what every stage saves, and draws both in one picture, as Figure 8 of the BPipe paper.
#
#   bash examples/balance_memory.sh           # results in outputs/balance_memory, or in $OUTPUT; 8 processes
#
# The counts are bytes of tensors, so they depend neither on the machine nor on its load. STAGES, MICROBATCHES and
# EXTRA_FLAGS (for example "--recompute-granularity selective") change the setting.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/balance_memory}"
stages="${STAGES:-8}"
microbatches="${MICROBATCHES:-32}"
read -ra extra_flags <<<"${EXTRA_FLAGS:-}"

prepare_environment core
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
mkdir -p "$output"

for schedule in flush bpipe; do
    echo "== Training with --pipeline-schedule $schedule"
    rm -f "$output/$schedule.jsonl"
    python -m torch.distributed.run --standalone --nproc-per-node "$stages" pretrain_gpt.py \
        --pipeline-model-parallel-size "$stages" --pipeline-schedule "$schedule" --log-saved-activations \
        --num-layers "$((2 * stages))" --hidden-size 128 --num-attention-heads 4 \
        --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size "$microbatches" \
        --lr 1e-3 --train-iters 3 --log-interval 1 --eval-iters 0 --num-workers 0 \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 ${extra_flags[@]+"${extra_flags[@]}"} \
        --metrics-file "$output/$schedule.jsonl" </dev/null
done

python tools/plot_memory.py "$output/flush.jsonl" "$output/bpipe.jsonl" --labels flush bpipe \
    --output "$output/memory.png" --title "GPT on $stages stages, $microbatches microbatches a batch"
