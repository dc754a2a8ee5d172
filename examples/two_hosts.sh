#!/usr/bin/env bash
# Two hosts on one machine, with a slow network between them: where the stages of a pair sit decides what crosses it.
#
#   bash examples/two_hosts.sh            # results in outputs/two_hosts, or in $OUTPUT; 4 processes
#   RATE=50 bash examples/two_hosts.sh    # Mbit/s of the network (default 100)
#
# Trains the same GPT with --pipeline-schedule bpipe on four ranks, two on each host, under two values of --rank-mapping:
# losses are equal to the last bit, bytes and times are not. The hosts are network namespaces (tools/hosts.py says what
# they need); where this machine cannot make them, the script says why and fails. Delete the output to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/two_hosts}"
prepare_environment core
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
mkdir -p "$output"

for mapping in standard pair-adjacent; do
    echo "== Training with --rank-mapping $mapping"
    rm -f "$output/$mapping.jsonl"
    # The same command on every host: host0 is where they meet.
    python tools/hosts.py --hosts 2 --rate "${RATE:-100}" -- \
        python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint host0:29400 --rdzv-id two-hosts \
        pretrain_gpt.py --pipeline-model-parallel-size 4 --pipeline-schedule bpipe --rank-mapping "$mapping" \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
        --micro-batch-size 1 --global-batch-size 8 --train-iters "${ITERATIONS:-10}" --lr 1e-3 --lr-decay-style constant \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 --num-workers 0 --log-interval 1 \
        --metrics-file "$output/$mapping.jsonl" </dev/null
done

python - "$output" <<'END'
import json
import statistics
import sys

runs = {}
for mapping in ("standard", "pair-adjacent"):
    with open(f"{sys.argv[1]}/{mapping}.jsonl") as lines:
        runs[mapping] = [json.loads(line) for line in lines]
losses = {mapping: [record["lm_loss"] for record in records] for mapping, records in runs.items()}
seconds = {
    mapping: statistics.median(record["iteration_time_ms"] for record in records[1:]) / 1e3
    for mapping, records in runs.items()
}
if losses["standard"] != losses["pair-adjacent"]:
    sys.exit(f"the losses differ: {losses}")
print(f"\nLosses are equal, to the last bit. An iteration takes {seconds['standard']:.2f} s under standard and "
      f"{seconds['pair-adjacent']:.2f} s under pair-adjacent: {seconds['standard'] / seconds['pair-adjacent']:.2f} times as long.")
END
