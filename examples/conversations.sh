#!/usr/bin/env bash
# Train a small GPT on the answers of conversations, on two pipeline ranks of CPUs (docs/conversations.md).
#
#   bash examples/conversations.sh    # results in outputs/conversations, or in $OUTPUT; under 2 minutes on 2 free cores
#
# The conversations are made here: a user names a weekday, and the assistant the one behind it. Run again, it goes on where
# it was interrupted. ITERATIONS changes how long it trains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/conversations}"

prepare_environment core
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""

echo "== Data"
mkdir -p "$output"
python - "$output/chats.jsonl" <<'END'
import itertools, json, sys

days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
with open(sys.argv[1], "w", encoding="utf-8") as file:
    for first, second in itertools.product(range(7), repeat=2):
        messages = [{"role": "system", "content": "Name the next day."}]
        for day in (first, second):
            messages.append({"role": "user", "content": days[day]})
            messages.append({"role": "assistant", "content": days[(day + 1) % 7]})
        file.write(json.dumps({"messages": messages}) + "\n")
END

echo "== Training"
python -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
    --sft --sft-tokenizer-prompt-format chatml --tokenizer-type ByteLevelTokenizer \
    --data-path "$output/chats.jsonl" --split 9,1,0 \
    --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --num-layers 4 --hidden-size 64 --num-attention-heads 4 \
    --seq-length 512 --max-position-embeddings 512 --position-embedding-type rope --attention-dropout 0 \
    --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 --lr 2e-3 --lr-decay-style constant \
    --train-iters "${ITERATIONS:-200}" --calculate-per-token-loss --num-workers 0 --log-interval 20 \
    --eval-interval 100 --eval-iters 1 --save "$output/checkpoints" --load "$output/checkpoints" \
    --metrics-file "$output/metrics.jsonl" </dev/null
