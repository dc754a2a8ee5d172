#!/usr/bin/env bash
# Train a small Llama on the answers of conversations, and then an adapter of it, on two processes of CPUs (docs/chats.md).
#
#   bash examples/chat.sh             # results in outputs/chat, or in $OUTPUT; under 5 minutes on 2 free cores
#
# examples/chats.py makes 500 conversations and a model that has learned nothing. finetune.py cuts the model in two and
# trains it with several conversations a row; then the model is asked. Four epochs from random weights teach it what kind
# of answer a question wants, such as a day, and not yet which one. Then 500 conversations with answers in another form
# train an adapter, which is merged, and the merged model is asked. EPOCHS, LAYERS and HIDDEN (a multiple of 10) change how
# long that takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/chat}"

prepare_environment core tokenizers peft
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""
mkdir -p "$output"

echo "== Data and a model"
python examples/chats.py --folder "$output/data" --layers "${LAYERS:-8}" --hidden "${HIDDEN:-320}"

echo "== Training"
python -m torch.distributed.run --standalone --nproc-per-node 2 finetune.py --task chat --packing \
    --model_name_or_path "$output/data/model" --train_file "$output/data/train.jsonl" \
    --validation_file "$output/data/validation.jsonl" --max_seq_length 256 --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 --pipeline_schedule flush --learning_rate 1e-3 --warmup_steps 20 \
    --num_train_epochs "${EPOCHS:-4}" --memory 1GiB --output_dir "$output/model" --overwrite_output_dir \
    --metrics_file "$output/metrics.jsonl" </dev/null

question="What is the day after Monday?"
echo "== $question"
python examples/chats.py --model "$output/model" --ask "$question"

echo "== An adapter for answers in another form, and the model with it"
python examples/chats.py --chats "$output/own.jsonl" --answer "The answer is {}."
python -m torch.distributed.run --standalone --nproc-per-node 2 finetune.py --task chat --packing \
    --model_name_or_path "$output/model" --train_file "$output/own.jsonl" --max_seq_length 256 --lora_r 16 \
    --target_modules all-linear --merge_adapter --pipeline_schedule flush --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 --learning_rate 5e-3 --num_train_epochs 2 --memory 1GiB \
    --output_dir "$output/adapter" --overwrite_output_dir </dev/null
python examples/chats.py --model "$output/adapter/merged" --ask "$question"
