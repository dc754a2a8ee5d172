#!/usr/bin/env bash
# Does training without flushes converge alike? Trains the quickstart's GPT under flush and under 2bw, on the same data
# in the same order, and draws both curves in one picture.
#
#   bash examples/convergence.sh           # results in outputs/convergence, or in $OUTPUT; 2 processes
#
# Fails if the final validation losses differ by more than 1%. Run again, it trains only what is missing. ITERATIONS,
# LEARNING_RATE and WARMUP_FRACTION change the setting: docs/convergence.md says why the learning rate decides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/convergence}"
data="$output/data"
iterations="${ITERATIONS:-800}"
learning_rate="${LEARNING_RATE:-1e-4}"
warmup_fraction="${WARMUP_FRACTION:-0.2}"

prepare_environment
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
bash examples/quickstart/prepare_data.sh "$data"
. examples/quickstart/model.sh

for schedule in flush 2bw; do
    if [ ! -f "$output/$schedule.jsonl" ]; then
        echo "== Training with --pipeline-schedule $schedule, $iterations iterations, learning rate $learning_rate"
        rm -f "$output/$schedule.partial"
        python -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
            --pipeline-model-parallel-size 2 --pipeline-schedule "$schedule" \
            "${model_args[@]}" "${training_args[@]}" "${data_args[@]}" \
            --lr "$learning_rate" --min-lr 0 --lr-warmup-fraction "$warmup_fraction" \
            --train-iters "$iterations" --eval-interval 25 --eval-iters 5 --log-interval 25 \
            --metrics-file "$output/$schedule.partial" </dev/null
        mv "$output/$schedule.partial" "$output/$schedule.jsonl"
    fi
done

python tools/plot_metrics.py "$output/flush.jsonl" "$output/2bw.jsonl" --labels flush 2bw --output "$output/convergence.png" \
    --title "GPT on CPython's reference topics" --tolerance 0.01
