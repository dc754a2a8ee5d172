#!/usr/bin/env bash
# Train a LoRA adapter of a small BERT on two processes, and merge it into the model (docs/lora.md).
#
#   bash examples/lora.sh         # results in outputs/lora, or in $OUTPUT; under two minutes on 2 cores
#
# Data and model are those of examples/finetune.sh. The adapter is PEFT's: `PeftModel.from_pretrained` loads it, and
# transformers alone loads the merged model. SAMPLES and EPOCHS change how long that takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/lora}"
data="$output/data"
archive="vaderSentiment-3.3.2.tar.gz"

prepare_environment core tokenizers peft
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""
mkdir -p "$output"

echo "== Data and a model"
if [ ! -f "$data/bert/config.json" ]; then
    [ -f "$output/$archive" ] ||
        python -m pip download --quiet --no-deps --no-binary :all: --dest "$output" vaderSentiment==3.3.2
    python examples/sentiment.py "$output/$archive" --folder "$data"
fi

task=(--task sequence-classification --validation_file "$data/test.jsonl" --max_seq_length 32
    --per_device_train_batch_size 16)
train=(python -m torch.distributed.run --standalone --nproc-per-node 2 finetune.py)

echo "== An adapter"
rm -rf "${output:?}/adapter"
"${train[@]}" --model_name_or_path "$data/bert" "${task[@]}" --train_file "$data/train.jsonl" \
    --lora_r 8 --target_modules all-linear --learning_rate 2e-3 --num_train_epochs "${EPOCHS:-1}" \
    --max_train_samples "${SAMPLES:-3000}" --pipeline_schedule 2bw --gradient_accumulation_steps 2 \
    --max_stages_per_device 1 --dataloader_drop_last --logging_steps 20 --output_dir "$output/adapter"

echo "== The same model without PEFT"
rm -rf "${output:?}/merged"
python tools/merge_adapter.py "$data/bert" "$output/adapter" --output "$output/merged"
"${train[@]}" --model_name_or_path "$output/merged" "${task[@]}" --do_eval --pipeline_schedule flush
echo "Adapter: $output/adapter, model: $output/merged"
