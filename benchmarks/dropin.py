"""A Megatron-LM checkout's own training loop, compared under its own 1F1B and under schedules of this project.

    python benchmarks/dropin.py speed --checkout ~/Megatron-LM     # about 8 minutes, 2 cores
    python benchmarks/dropin.py memory --checkout ~/Megatron-LM    # about 2 minutes, 4 processes

`speed` starts `pretrain_gpt.py` of the checkout on two processes of one thread each: natively, under flush and under
2bw, in an order that rotates with each round. Tokens a second are taken from the lines of its log, one for each
`--batches` iterations, without the first line. "of native" is the median over the rounds of the ratio within a round.

`memory` trains a few iterations on four processes under flush and under bpipe, and shows the most microbatches and
bytes of activations that each rank of the pipeline has saved at a time (`--pipeline-log-saved-activations`).
Megatron-LM's own 1F1B saves the same number of microbatches as flush and counts no bytes.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.results import parser_of, save, set_environment
from benchmarks.common.tables import show_table, spread

ROOT = Path(__file__).resolve().parent.parent
NATIVE = "native 1F1B"
CONTENDERS = (NATIVE, "flush", "2bw")
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_SAVED = re.compile(r"pipeline rank (\d+) saved at most ([0-9.]+) MiB of activations, (\d+) microbatches")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--checkout", type=Path, required=True, help="of Megatron-LM")
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument("--batches", type=int, default=5, help="iterations between two lines of the log")
    parser.add_argument("--lines", type=int, default=4, help="lines of the log in each run; the first does not count")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=1024)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    set_environment()
    rows = {"speed": measure_speed, "memory": measure_memory}[args.what](args)
    {"speed": show_speed, "memory": show_memory}[args.what](rows, args)
    save(args, rows, unsaved=("what", "checkout"), what=args.what)


def measure_speed(args: argparse.Namespace) -> list[dict]:
    """Measure the tokens a second of each contender in each round."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    tokens = args.micro_batch_size * args.microbatches * args.seq_length
    for number in range(args.rounds):
        turn = number % len(CONTENDERS)
        for name in CONTENDERS[turn:] + CONTENDERS[:turn]:
            output = train(args, name, ranks=2, iterations=args.batches * args.lines)
            milliseconds = [float(each) for each in _ELAPSED.findall(output)][1:]
            found[name].append(tokens / (statistics.median(milliseconds) / 1000))
    return [{"contender": name, "tokens_per_second": found[name]} for name in CONTENDERS]


def show_speed(rows: Sequence[dict], args: argparse.Namespace) -> None:
    native = rows[0]["tokens_per_second"]

    def ratios(row: dict) -> list[float]:
        return [own / theirs for own, theirs in zip(row["tokens_per_second"], native, strict=True)]

    show_table(
        f"p=2, m={args.microbatches}: {args.rounds} rounds",
        {
            "": lambda row: row["contender"],
            "tokens/s": lambda row: spread(row["tokens_per_second"], 0, ","),
            "of native": lambda row: spread(ratios(row), 3),
        },
        rows,
    )


def measure_memory(args: argparse.Namespace) -> list[dict]:
    """Measure the most microbatches and bytes that each rank saves at a time, under flush and under bpipe."""
    rows = []
    for name in ("flush", "bpipe"):
        output = train(args, name, ranks=4, iterations=3, further=["--pipeline-log-saved-activations"])
        for rank, mebibytes, count in _SAVED.findall(output):
            rows.append(
                {"schedule": name, "rank": int(rank), "mebibytes": float(mebibytes), "microbatches": int(count)}
            )
    return rows


def show_memory(rows: Sequence[dict], args: argparse.Namespace) -> None:
    show_table(
        f"p=4, m={args.microbatches}: saved at most",
        {
            "": lambda row: row["schedule"],
            "rank": lambda row: str(row["rank"]),
            "microbatches": lambda row: str(row["microbatches"]),
            "MiB": lambda row: f"{row['mebibytes']:.2f}",
        },
        rows,
    )


def train(args: argparse.Namespace, schedule: str, *, ranks: int, iterations: int, further: Sequence[str] = ()) -> str:
    """Run the checkout's `pretrain_gpt.py` to its end. Returns its output."""
    flags = {
        "--num-layers": args.layers, "--hidden-size": args.hidden_size, "--num-attention-heads": args.heads,
        "--seq-length": args.seq_length, "--max-position-embeddings": args.seq_length,
        "--micro-batch-size": args.micro_batch_size, "--global-batch-size": args.micro_batch_size * args.microbatches,
        "--vocab-size": args.vocab_size, "--tokenizer-type": "NullTokenizer", "--transformer-impl": "local",
        "--pipeline-model-parallel-size": ranks, "--train-iters": iterations, "--log-interval": args.batches,
        "--eval-iters": 0, "--eval-interval": 1000, "--lr": 1e-3, "--lr-decay-style": "constant",
        "--rerun-mode": "disabled",
    }  # fmt: skip
    switches = ["--mock-data", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion", *further]
    if schedule != NATIVE:
        flags["--pipeline-schedule"] = schedule
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "megatron.pipeline.dropin", "pretrain_gpt.py",
        *(str(word) for pair in flags.items() for word in pair), *switches,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # for Megatron-LM's cache of samples
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(
            [*command, f"--data-cache-path={folder}"], cwd=args.checkout, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"{schedule} ended with status {ended.returncode}:\n{ended.stdout[-4000:]}")
    return ended.stdout


if __name__ == "__main__":
    main()
