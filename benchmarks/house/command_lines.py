"""The commands whose output is frozen, and the command lines that the example scripts start.

A script runs with a stand-in for `python`, which records its command line and makes empty files for the script's later
steps. So all trainings that the script would start are known, and can be run dry.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_vision_classify.py", "finetune_bert.py")
WITHOUT_DRY_RUN = ("finetune.py",)  # its dry run needs the model's files

_SCHEDULES = (  # (schedule with choices, costs of the words that only this schedule has)
    ("gpipe --microbatches 4", ""),
    ("flush --microbatches 8 --data-parallel --tied-embeddings", "--reduce-grad 0.5 --reduce-embed 0.2"),
    ("2bw --microbatches 4", ""),
    ("pipedream --microbatches 1", ""),
    ("interleaved --microbatches 4", ""),
    ("bpipe --microbatches 8", "--evict 0.2"),
    ("zb-h1 --microbatches 8", "--backward-input 1.1"),
    ("zbv --microbatches 8", ""),
    ("l2l --microbatches 2", "--fetch 0.4 --store 0.3 --update 0.6"),
)
_MAP = "tools/rank_map.py --rank-topology examples/topology.yaml --tensor-model-parallel-size 2"
LOOKS = [
    *(f"tools/schedule.py {command} --stages 4 --schedule {schedule}{more}".split()
      for schedule, costs in _SCHEDULES for command, more in (
        ("show", ""), ("show --csv -", ""), ("check", ""),
        ("show --timeline --versions", f" --latency 0.1 --step 0.3 {costs}"),
        ("simulate --critical-path", f" --latency 0.1 --step 0.3 {costs}"),
    )),
    *(f"tools/schedule.py {line}".split() for line in (
        "show --timeline --schedule 2bw --stages 4 --microbatches 4 --provisional --predict 0.3",
        "show --torch-csv - --schedule zb-h1 --stages 4 --microbatches 4",
        "check --schedule 2bw --stages 4 --microbatches 4,8 --provisional-microbatches 1 --data-parallel",
        "check --schedule 2bw --stages 4 --hardware-queues 8 --tensor 2 --data 2",
        "check --schedule bpipe --stages 8 --hardware-queues 2 --tensor 2 --data 2",
        "check --schedule 2bw --stages 8 --microbatches 4",
        "check tests/pipeline/golden/figure2_2bw.csv",
        "check tests/pipeline/golden/zbv_p4_m8.csv",
    )),
    *(f"{_MAP} --pipeline-model-parallel-size 4 --rank-mapping {mapping} --num-layers 40 --hidden-size 5120 "
      f"--num-attention-heads 40 --seq-length 2048 --micro-batch-size 1 --global-batch-size 64 {form}".split()
      for mapping in ("standard", "pair-adjacent", "optimized") for form in ("", "--json")),
]  # fmt: skip
"""Commands that show, check and simulate schedules, and maps of ranks."""

SEARCHES = (
    "search --cluster A100-80 --nodes 2 --model gpt3-13b --seq-length 2048 --global-batch-size 64 --json",
    "search --cluster H100 --nodes 8 --model llama-3.1-70b --seq-length 8192 --global-batch-size 256 --json",
    "search --cluster A100-80 --nodes 4 --model gpt3-96b --seq-length 2048 --global-batch-size 128 --fp16 "
    "--transformer-impl local --schedules flush,bpipe --json",
    "search --cluster A100-80 --nodes 2 --model gpt3-13b --seq-length 2048 --global-batch-size 64 --schedules "
    "flush,2bw,2bw+balance,pipedream --max-safe-batch 256 --json",
    "search --cluster HOSTS --nodes 1 --model llama-3.1-70b --seq-length 4096 --global-batch-size 64 --schedules "
    "flush,l2l --json",
    "search --cluster V100-16 --nodes 4 --model bert-large --seq-length 512 --global-batch-size 512 --objective memory "
    "--json",
    "search --cluster H100 --nodes 4 --model mixtral-8x7b --seq-length 4096 --global-batch-size 128 --json",
    "sweep --cluster A100-80 --gpus 16,32 --tokens 300B --price-per-gpu-hour 2 --model gpt3-13b --seq-length 2048 "
    "--global-batch-size 128 --schedules flush,2bw --simulate 1 --json",
)
"""Command lines of `tools/grid_search.py`. HOSTS stands for a cluster file with the hosts' memory."""

_SMALL = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 16 --train-iters 10 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --pipeline-model-parallel-size 4 --pipeline-schedule"
)
COMBINATIONS = (
    f"{_SMALL} 2bw --2bw-provisional stage --clip-grad 1.0 --bf16 --dry-run 8 --dry-run-gpu A100-80",
    f"{_SMALL} 2bw --2bw-provisional uniform --2bw-provisional-microbatches 2 --dry-run 4",
    f"{_SMALL} interleaved --num-virtual-stages-per-pipeline-rank 2 --fp16 --dry-run 8",
    f"{_SMALL} bpipe --rank-mapping pair-adjacent --rank-topology examples/topology.yaml --dry-run 16",
    f"{_SMALL} zb-h1 --dry-run 4 --dry-run-gpu V100-16",
    f"{_SMALL} zbv --num-virtual-stages-per-pipeline-rank 2 --dry-run 4",
    f"{_SMALL} l2l --l2l-stash host --untie-embeddings-and-output-weights --dry-run 4 --dry-run-host-memory 64",
    f"{_SMALL} flush --use-distributed-optimizer --overlap-grad-reduce --recompute-activations --dry-run 16",
    f"{_SMALL} gpipe --rampup-batch-size 8 8 100 --pipeline-recompute --dry-run 4",
    f"{_SMALL} pipedream --dry-run 4",
    f"{_SMALL} pipedream --micro-batch-size 16 --clip-grad 0 --untie-embeddings-and-output-weights --dry-run 4",
    f"{_SMALL} flush --freeze-training --freeze-interval 2 --freeze-schedule 1,3 --elastic-pipeline --elastic-schedule "
    "4,2 --untie-embeddings-and-output-weights --dry-run 4",
)
"""Command lines whose dry runs are frozen beside those of the examples; some are refused, with a reason."""

HELP = [
    *([f"tools/{name}.py"] for name in (
        "compare_runs", "convert_checkpoint", "grid_search", "partition", "plot_changes", "plot_memory", "plot_metrics",
        "preprocess_data", "profile_model", "rank_map", "schedule", "text_generation",
    )),
    *(["tools/schedule.py", name] for name in ("show", "check", "simulate", "draw")),
    *(["tools/grid_search.py", name] for name in ("search", "sweep", "estimate", "validate", "calibrate", "measure")),
    *([name] for name in (*PROGRAMS, *WITHOUT_DRY_RUN)),
    ["-m", "megatron.commands"],
    ["-m", "megatron.pipeline.dropin"],
]  # fmt: skip
"""Commands whose --help is frozen."""


@dataclass(frozen=True)
class Script:
    """The start of an example script.

    Attributes:
        words: the script's path, and its arguments.
        environment: additional environment variables.
        fails: a text; a recorded command with it fails as if for want of memory, as the script expects.
    """

    words: str
    environment: Mapping[str, str] = field(default_factory=dict)
    fails: str = ""


_DATA = {"DATA_PATH": "/data/text", "VOCAB_FILE": "/data/vocab", "MERGE_FILE": "/data/merges", "CHECKPOINTS": "/saved"}
SCRIPTS = {
    "quickstart": Script("quickstart.sh"),
    "gpt": Script("pretrain_gpt_2bw.sh ckpt vocab.json merges.txt text"),
    "gpt, interleaved": Script(
        "pretrain_gpt_2bw.sh ckpt vocab.json merges.txt text", {"SCHEDULE": "interleaved", "VP": "3"}
    ),
    "bert, small": Script("pretrain_bert_2bw.sh"),
    "bert": Script("pretrain_bert_2bw.sh ckpt vocab.txt text", {"TP": "2", "PP": "2", "SCHEDULE": "flush"}),
    "convergence": Script("convergence.sh"),
    "convergence, bert": Script("convergence.sh", {"MODEL": "bert"}),
    "sweep": Script(
        "convergence_sweep.sh",
        {"SEEDS": "1234", "RATES": "1e-3", "SCHEDULES": "flush 2bw provisional uniform1"},
    ),
    "sweep, replicas": Script(
        "convergence_sweep.sh", {"SEEDS": "1234", "RATES": "1e-3", "SCHEDULES": "reduced", "REPLICAS": "2"}
    ),
    "balance": Script("balance_memory.sh"),
    "l2l": Script("l2l.sh", fails="/limited-"),
    "two hosts": Script("two_hosts.sh"),
    "vision": Script("vision.sh"),
    "elastic": Script("elastic.sh"),
    "finetune": Script("finetune.sh"),
    "lora": Script("lora.sh"),
    **{
        f"cluster, {model}": Script(f"cluster/torchrun.sh {model} --dry-run", _DATA)
        for model in ("gpt3_13b", "gpt3_96b", "gpt3_134b", "gpt_2.2b", "bert_2.2b")
    },
}
_STUB = """#!/usr/bin/env bash
if [ "${{1:-}}" = -c ] || [ "${{1:-}}" = - ]; then exec {python} "$@"; fi
printf '%s\\037' "$@" >> "$RECORD"
printf '\\036' >> "$RECORD"
while [ $# -gt 0 ]; do
    if [[ "$1" == "$OUTPUT"/*.partial || "$1" == "$OUTPUT"/*.jsonl ]]; then mkdir -p "${{1%/*}}" && touch "$1"; fi
    if [ -n "$FAILS" ] && [[ "$1" == *"$FAILS"* ]]; then echo "Cannot allocate memory" && exit 1; fi
    shift
done
"""


def recorded(script: Script, root: Path, scratch: Path, environment: Mapping[str, str]) -> list[list[str]]:
    """The command lines of all trainings that an example script would start, each from the launcher on.

    Raises:
        ValueError: the script starts no training.
    """
    stub, record, output = scratch / "bin" / "python", scratch / "record", scratch / "output"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(_STUB.format(python=sys.executable))
    stub.chmod(0o755)
    record.unlink(missing_ok=True)
    path, *arguments = script.words.split()
    subprocess.run(
        ["bash", str(root / "examples" / path), *arguments], cwd=root, stdin=subprocess.DEVNULL, check=False,
        capture_output=True, timeout=120,
        env={
            **environment, "PATH": f"{stub.parent}:{os.environ['PATH']}", "RECORD": str(record), "FAILS": script.fails,
            "OUTPUT": str(output), **script.environment,
        },
    )  # fmt: skip
    shutil.rmtree(output, ignore_errors=True)  # removes the empty files, which a dry run would read
    calls = record.read_text().split("\x1e")[:-1] if record.exists() else []
    lines = [call.split("\x1f")[:-1] for call in calls]
    found = [line for line in lines if any(word in PROGRAMS + WITHOUT_DRY_RUN for word in line)]
    if not found:
        raise ValueError(f"examples/{script.words} started no training; see what it says by itself")
    return found


def dry_run_of(line: list[str]) -> list[str] | None:
    """The program of a command line with its flags, as a dry run for the same number of ranks; None if it has no dry
    run."""
    at = next((index for index, word in enumerate(line) if word in PROGRAMS), None)
    if at is None:
        return None
    argv = line[at:]
    if "--dry-run" in argv:
        return argv
    sizes = [int(line[index + 1]) for index, word in enumerate(line) if word in ("--nnodes", "--nproc-per-node")]
    return [*argv, "--dry-run", str(math.prod(sizes))]
