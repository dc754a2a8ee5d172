#!/usr/bin/env bash
# A deep GPT in memory that it does not fit into: under one memory limit, flush dies and l2l trains (docs/l2l.md).
#
#   bash examples/l2l.sh              # results in outputs/l2l, or in $OUTPUT; about 90 seconds on 2 cores, needs 4 GiB
#
# Trains on the quickstart's text, on the CPU. LIMIT (MiB of private memory, as `ulimit -d` counts it) stands for the
# device's memory: the l2l store is a shared mapping, which the limit does not count. DEPTHS and ITERATIONS change
# the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/l2l}"
data="$output/data"
runs="$output/runs"
read -ra depths <<<"${DEPTHS:-24 96}"
iterations="${ITERATIONS:-3}"
limit=$((${LIMIT:-1600} * 1024 * 1024))
deepest="${depths[${#depths[@]} - 1]}"

prepare_environment core
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""

echo "== Data"
bash examples/quickstart/prepare_data.sh "$data"
rm -rf "$runs"
mkdir -p "$runs"

train() { # LABEL DEPTH LIMIT (bytes, or nothing) FLAGS ...
    local label="$1" depth="$2" bytes="$3" name="$1-$2"
    shift 3
    python examples/l2l/private_memory.py "$runs/$name.json" ${bytes:+--limit "$bytes"} \
        --label "$label" --depth "$depth" -- \
        python -m torch.distributed.run --standalone --nproc-per-node 1 pretrain_gpt.py "$@" \
        --num-layers "$depth" --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --seed 1234 \
        --train-iters "$iterations" --eval-iters 0 --log-interval 1 --optimizer-kernel fused \
        --data-path "$data/corpus_text_document" --data-cache-path "$data/cache" --split 100,0,0 --num-workers 0 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model" \
        --metrics-file "$runs/$name.jsonl" >"$runs/$name.log" 2>&1 </dev/null
}

echo "== flush, $deepest layers, at most $((limit / 1024 / 1024)) MiB of private memory"
if train limited "$deepest" "$limit" --pipeline-recompute; then
    echo "flush trained within the limit, which shows nothing: set a smaller LIMIT" >&2
    exit 1
fi
died="can't allocate memory|MemoryError|bad_alloc|Cannot allocate memory"
if ! grep -m 1 -iE "$died" "$runs/limited-$deepest.log"; then
    echo "flush ended for another reason than memory: see $runs/limited-$deepest.log" >&2
    exit 1
fi

for depth in "${depths[@]}"; do
    echo "== l2l, $depth layers, within the limit"
    train l2l "$depth" "$limit" --pipeline-schedule l2l --l2l-stash host || {
        tail -n 20 "$runs/l2l-$depth.log" >&2
        exit 1
    }
    echo "== flush, $depth layers, without a limit, to compare with"
    train flush "$depth" "" --pipeline-recompute || {
        tail -n 20 "$runs/flush-$depth.log" >&2
        exit 1
    }
done

echo "== Memory over depth"
python examples/l2l/picture.py "$runs" --limit "$limit" --output "$output/memory.png"
echo "Picture: $output/memory.png"
