#!/usr/bin/env bash
# From nothing to a trained GPT: environment, text, tokenizer, training on 2 pipeline ranks, pictures.
#
#   bash examples/quickstart.sh            # results in outputs/quickstart, or in $OUTPUT
#
# Trains without pipeline flushes (--pipeline-schedule 2bw, at predictions of the weights: docs/provisional.md) on text that
# every machine has, on GPUs if there are any, else on the CPU: under 4 minutes on 2 cores once everything is installed.
# Run again, it goes on where it was interrupted, or says that it is done; delete the output directory to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/quickstart}"
data="$output/data"
iterations="${ITERATIONS:-600}"
checkpoints="$output/checkpoints"

prepare_environment core
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== Data"
bash examples/quickstart/prepare_data.sh "$data"
. examples/quickstart/model.sh

tracker="$checkpoints/latest_checkpointed_iteration.txt"
if [ "$(cat "$tracker" 2>/dev/null)" = "$iterations" ]; then
    echo "== Trained already for $iterations iterations (delete $output to start over)"
else
    echo "== Training: 2 pipeline ranks, --pipeline-schedule 2bw --2bw-provisional stage, $iterations iterations"
    python -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
        --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --2bw-provisional stage \
        "${model_args[@]}" "${training_args[@]}" "${data_args[@]}" \
        --train-iters "$iterations" --eval-interval 50 --eval-iters 5 --log-interval 25 \
        --save "$checkpoints" --load "$checkpoints" --save-interval 200 \
        --metrics-file "$output/metrics.jsonl" --pipeline-timeline "$output/timeline" </dev/null
fi

echo "== What the model makes of a prompt"
python tools/text_generation.py --load "$checkpoints" --prompt "The function" --num-tokens 60 --ignore-eod --temperature 0.7

echo "== Pictures"
fall="${EXPECTED_FALL-0.4}" # of the validation loss, from its first value to its last; empty: any
python tools/plot_metrics.py "$output/metrics.jsonl" --output "$output/loss.png" \
    --title "GPT on CPython's reference topics, 2bw with provisional weights on 2 ranks" ${fall:+--fall "$fall"}

cat <<END

Results in $output:
  checkpoints/               weights, optimizer and both weight versions (torch_dist)
  metrics.jsonl              loss, gradient norm, tokens/s ... of every iteration
  loss.png                   loss curve
  timeline/timeline.png      the last iterations of the pipeline, planned above measured
  timeline/trace.json        the same for https://ui.perfetto.dev
END
