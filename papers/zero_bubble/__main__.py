"""The cost of splitting a backward on real chunks of a GPT, and the speed of ZB-H1 with split backwards on two cores.

    python -m papers.zero_bubble halves     # about 3 minutes: B against I and W, one process of one thread
    python -m papers.zero_bubble modules    # a minute: modules of plain torch, beside torch's own split
    python -m papers.zero_bubble pipeline   # about 4 minutes: zb-h1 and flush on two processes, and simulated

`halves` runs a stage of megatron.core as in training (DDP, FP32 gradients). In each repeat one microbatch has a whole
backward (B), another has its halves (I and W), and the stage's weight products (P) are computed alone, on random
matrices of the same shapes; the order changes from repeat to repeat.

    (I+W)/B       the cost of splitting: at most 1.05
    (B-I)/P       the part of the weight products P that is no longer in I: at least 0.8
    kept          MiB that a microbatch keeps between I and W, and MiB that its graph saves in full

The figures are medians over the repeats of the ratios within a repeat. On a CPU, times are the thread's CPU time, which
other programs disturb least.

`modules` measures layers of plain torch in the same way. "torch" is torch.distributed.pipelining's split of a backward
on the same module (stage_backward_input and stage_backward_weight). Between its halves it keeps the graph, whose bytes
are counted, and gradients, which are not counted.

`pipeline` trains a GPT on two stages with m = 2, under zb-h1 and flush in turn. Before each round both stages measure
their own f, i, w and steps at the same time, without communication; the program is simulated with these times.

    reached       the simulated time of a batch over the measured time, median over the rounds: at least 95% for zb-h1
"""

import argparse
import statistics
from collections.abc import Sequence

from benchmarks.common.processes import run_group
from benchmarks.common.results import parser_of, save, set_environment
from benchmarks.common.tables import show_table, spread

PLACES = ("first", "middle", "last")
SCOPES = ("none", "attention", "layer")
SCHEDULES = ("zb-h1", "flush")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("what", choices=("halves", "modules", "pipeline"))
    parser.add_argument("--repeats", type=int, default=15, help="of halves and modules")
    parser.add_argument("--rounds", type=int, default=9, help="of the pipeline")
    parser.add_argument("--batches", type=int, default=6, help="of the pipeline, timed in each round")
    parser.add_argument("--microbatches", type=int, default=2, help="of the pipeline: m")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--recompute", nargs="+", choices=SCOPES, default=list(SCOPES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--layers", type=int, default=2, help="of each stage")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=2047)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    set_environment()
    num_ranks, measure, show = {
        "halves": (1, "ranks:measure_halves", show_halves),
        "modules": (1, "modules:measure", show_modules),
        "pipeline": (2, "ranks:measure_pipeline", show_pipeline),
    }[args.what]
    rows = run_group(num_ranks, f"papers.zero_bubble.{measure}", vars(args))
    show(rows, args)
    save(args, rows, unsaved=("what",), what=args.what)


def show_halves(rows: Sequence[dict], args: argparse.Namespace) -> None:
    def within(row: dict, ratio) -> str:
        times = zip(row["backward"], row["input"], row["weight"], row["products"], strict=True)
        return spread([ratio(*each) for each in times], 3)

    def milliseconds(name: str):
        return lambda row: f"{1e3 * statistics.median(row[name]):.1f}"

    columns = {
        "stage": lambda row: row["place"],
        "dtype": lambda row: row["dtype"],
        "recompute": lambda row: row["recompute"],
        "B": milliseconds("backward"),
        "I": milliseconds("input"),
        "W": milliseconds("weight"),
        "P": milliseconds("products"),
        "(I+W)/B": lambda row: within(row, lambda b, i, w, p: (i + w) / b),
        "(B-I)/P": lambda row: within(row, lambda b, i, w, p: (b - i) / p),
        "kept": lambda row: f"{row['kept_bytes'] / 2**20:.1f} of {row['saved_bytes'] / 2**20:.1f}",
    }
    title = f"milliseconds of a microbatch, {args.layers} layers a stage; medians of {args.repeats} repeats"
    show_table(title, columns, rows, left=("stage", "dtype", "recompute"))


def show_modules(rows: Sequence[dict], args: argparse.Namespace) -> None:
    def over_whole(row: dict, *names: str) -> str:
        times = zip(*(row[name] for name in names), row["whole"], strict=True)
        return spread([sum(parts) / whole for *parts, whole in times], 3)

    def milliseconds(name: str):
        return lambda row: f"{1e3 * statistics.median(row[name]):.1f}"

    columns = {
        "module": lambda row: row["module"],
        "B": milliseconds("whole"),
        "I": milliseconds("input"),
        "W": milliseconds("weight"),
        "(I+W)/B": lambda row: over_whole(row, "input", "weight"),
        "kept": lambda row: f"{row['kept_bytes'] / 2**20:.1f}",
        "torch I": milliseconds("torch_input"),
        "torch W": milliseconds("torch_weight"),
        "torch (I+W)/B": lambda row: over_whole(row, "torch_input", "torch_weight"),
        "torch kept": lambda row: f"{row['torch_kept_bytes'] / 2**20:.1f}",
    }
    title = f"milliseconds of a microbatch, MiB; medians of {args.repeats} repeats"
    show_table(title, columns, rows, left=("module",))


def show_pipeline(rows: Sequence[dict], args: argparse.Namespace) -> None:
    columns = {
        "": lambda row: row["schedule"],
        "ms a batch": lambda row: spread([1e3 * each for each in row["measured"]], 1),
        "simulated": lambda row: spread([1e3 * each for each in row["simulated"]], 1),
        "reached": lambda row: spread([100 * s / m for s, m in zip(row["simulated"], row["measured"], strict=True)], 1),
        "f": lambda row: _of_stages(row, "forward"),
        "i": lambda row: _of_stages(row, "input"),
        "w": lambda row: _of_stages(row, "weight"),
        "b": lambda row: _of_stages(row, "backward"),
        "step": lambda row: _of_stages(row, "step"),
    }
    title = f"p = 2, m = {args.microbatches}; medians of {args.rounds} rounds, times of both stages in milliseconds"
    show_table(title, columns, rows)


def _of_stages(row: dict, name: str) -> str:
    rounds = [both[name] for both in row["own"]]
    return " ".join(f"{1e3 * statistics.median(each):.1f}" for each in zip(*rounds, strict=True))


if __name__ == "__main__":
    main()
