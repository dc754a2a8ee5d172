#!/usr/bin/env bash
# Does training without flushes converge alike? Trains the quickstart's GPT, or a BERT, under flush and under 2bw, on the
# same data in the same order, and draws both curves in one picture.
#
#   bash examples/convergence.sh                # results in outputs/convergence, or in $OUTPUT; 2 processes
#   MODEL=bert bash examples/convergence.sh     # results in outputs/convergence_bert
#
# Fails if the final validation losses differ by more than 1%. Run again, it trains only what is missing. ITERATIONS,
# LEARNING_RATE and WARMUP_FRACTION change the setting: docs/convergence.md says why the learning rate decides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

model="${MODEL:-gpt}"
case "$model" in
    gpt) output=outputs/convergence iterations=800 learning_rate=1e-4 prepare=prepare_data.sh settings=model.sh ;;
    bert)
        output=outputs/convergence_bert iterations=1000 learning_rate=1e-4
        prepare=prepare_bert_data.sh settings=bert_model.sh
        ;;
    *)
        echo "MODEL is $model, which is neither gpt nor bert" >&2
        exit 1
        ;;
esac
output="${OUTPUT:-$output}"
data="$output/data"
iterations="${ITERATIONS:-$iterations}"
learning_rate="${LEARNING_RATE:-$learning_rate}"
warmup_fraction="${WARMUP_FRACTION:-0.2}"

prepare_environment core
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
bash "examples/quickstart/$prepare" "$data"
# shellcheck disable=SC1090
. "examples/quickstart/$settings"

for schedule in flush 2bw; do
    if [ ! -f "$output/$schedule.jsonl" ]; then
        echo "== Training with --pipeline-schedule $schedule, $iterations iterations, learning rate $learning_rate"
        rm -f "$output/$schedule.partial"
        python -m torch.distributed.run --standalone --nproc-per-node 2 "pretrain_$model.py" \
            --pipeline-model-parallel-size 2 --pipeline-schedule "$schedule" \
            "${model_args[@]}" "${training_args[@]}" "${data_args[@]}" \
            --lr "$learning_rate" --min-lr 0 --lr-warmup-fraction "$warmup_fraction" \
            --train-iters "$iterations" --eval-interval 25 --eval-iters 5 --log-interval 25 \
            --metrics-file "$output/$schedule.partial" </dev/null
        mv "$output/$schedule.partial" "$output/$schedule.jsonl"
    fi
done

python tools/plot_metrics.py "$output/flush.jsonl" "$output/2bw.jsonl" --labels flush 2bw --output "$output/convergence.png" \
    --title "${model^^} on CPython's reference topics" --tolerance 0.01
