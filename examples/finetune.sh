#!/usr/bin/env bash
# Fine-tune a small BERT on four processes with several stages each, without waiting (docs/finetuning.md).
#
#   bash examples/finetune.sh         # results in outputs/finetune, or in $OUTPUT; about 4 minutes on 2 cores
#
# The data is in the source of the package vaderSentiment, which pip downloads: single sentences of film reviews, and
# whether they are positive. The BERT has learned to tell that of other texts (examples/sentiment.py). Then
# tools/partition.py cuts it for four devices, and finetune.py trains it under ftpipe, and under flush to compare with.
# SAMPLES and EPOCHS change how long that takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/finetune}"
data="$output/data"
archive="vaderSentiment-3.3.2.tar.gz"

prepare_environment core tokenizers
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""
mkdir -p "$output"

echo "== Data and a model"
if [ ! -f "$data/bert/config.json" ]; then
    [ -f "$output/$archive" ] ||
        python -m pip download --quiet --no-deps --no-binary :all: --dest "$output" vaderSentiment==3.3.2
    python examples/sentiment.py "$output/$archive" --folder "$data"
fi

task=(--task sequence-classification --train_file "$data/train.jsonl" --max_seq_length 32
    --per_device_train_batch_size 16 --max_train_samples "${SAMPLES:-3000}")

echo "== Stages for four devices"
python tools/partition.py "$data/bert" "${task[@]}" --devices 4 --memory 1GiB --max-stages-per-device 2 \
    --output "$output/partition.json" --picture "$output/partition.png"

for schedule in ftpipe flush; do
    echo "== $schedule"
    rm -rf "${output:?}/$schedule"
    python -m torch.distributed.run --standalone --nproc-per-node 4 finetune.py --model_name_or_path "$data/bert" \
        "${task[@]}" --validation_file "$data/test.jsonl" --partition "$output/partition.json" \
        --pipeline_schedule "$schedule" --max_grad_norm 0 --learning_rate 1e-3 --num_train_epochs "${EPOCHS:-1}" \
        --logging_steps 50 --output_dir "$output/$schedule" --metrics_file "$output/$schedule.jsonl" \
        --pipeline_timeline "$output/$schedule-timeline"
done
echo "Pictures: $output/partition.png, $output/ftpipe-timeline/timeline.png, $output/flush-timeline/timeline.png"
