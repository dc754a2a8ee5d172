"""The CPU time to build, lower, prove and simulate a pipeline program, and its growth with the program's size.

    python benchmarks/program_scale.py
    python benchmarks/program_scale.py --schedule flush --stages 16 64 --microbatches 128 512 1024 --batches 3

The table has one line for each program: its instructions, the CPU seconds to build it (order, updates, versions,
communication), to prove it and to simulate it, and each time in microseconds for an instruction. CPU seconds are used
since one thread works without waiting, so the figures hold on a busy machine, too. The last line fits seconds = c *
instructions ** e over all programs; e = 1 is linear growth. If the output is not a terminal, it is one JSON object.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.pipeline.check import check
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs

SLOW_LINKS = Costs(forward_bytes=1.0, bandwidth=4.0, latency=0.1)


@dataclass(frozen=True)
class Measurement:
    """The measurement of one program: its sizes, and the least CPU seconds over the repetitions."""

    num_stages: int
    num_microbatches: int
    num_batches: int
    num_instructions: int
    build_seconds: float
    check_seconds: float
    simulate_seconds: float

    @property
    def seconds(self) -> float:
        return self.build_seconds + self.check_seconds + self.simulate_seconds


def measure(schedule: Schedule, num_microbatches: int, num_batches: int, repeat: int) -> Measurement:
    """Build, prove and simulate one program `repeat` times."""
    build_seconds, check_seconds, simulate_seconds = [], [], []
    for _ in range(repeat):
        program = timeline = None  # frees the earlier ones outside of the timed section
        gc.collect()
        start = time.process_time()
        program = schedule.build((num_microbatches,) * num_batches)
        built = time.process_time()
        report = check(program)
        checked = time.process_time()
        timeline = simulate(program, SLOW_LINKS)
        build_seconds.append(built - start)
        check_seconds.append(checked - built)
        simulate_seconds.append(time.process_time() - checked)
    assert sum(map(len, timeline.rows)) == report.num_instructions
    return Measurement(
        schedule.num_stages,
        num_microbatches,
        num_batches,
        report.num_instructions,
        min(build_seconds),
        min(check_seconds),
        min(simulate_seconds),
    )


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent e of seconds ~ size ** e: the slope of log(seconds) over log(size) by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--schedule", default="2bw", choices=["gpipe", "flush", "2bw", "bpipe"], help="preset")
    parser.add_argument("--stages", type=int, nargs="+", default=[8, 16, 32, 64], help="pipeline stages p")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[128, 256, 512], help="microbatches per batch m")
    parser.add_argument("--batches", type=int, default=3, help="batches that a program spans")
    parser.add_argument("--repeat", type=int, default=3, help="the least time of so many is taken")
    return parser.parse_args(arguments)


def show(args: argparse.Namespace, measurements: list[Measurement], summary: dict[str, float | None]) -> None:
    """Print the table, and the fit below it."""
    table = Table(title=f"{args.schedule}, {args.batches} batches: build, lower, prove and simulate")
    for column in (
        "stages",
        "microbatches",
        "instructions",
        "build s",
        "us each",
        "check s",
        "us each",
        "simulate s",
        "us each",
    ):
        table.add_column(column, justify="right")
    for each in measurements:
        table.add_row(
            str(each.num_stages),
            str(each.num_microbatches),
            f"{each.num_instructions:,}",
            f"{each.build_seconds:.3f}",
            f"{1e6 * each.build_seconds / each.num_instructions:.2f}",
            f"{each.check_seconds:.3f}",
            f"{1e6 * each.check_seconds / each.num_instructions:.2f}",
            f"{each.simulate_seconds:.3f}",
            f"{1e6 * each.simulate_seconds / each.num_instructions:.2f}",
        )
    console = Console()
    console.print(table)
    if summary["exponent"] is not None:
        parts = ", ".join(f"{part} {summary[f'{part}_exponent']:.2f}" for part in ("build", "check", "simulate"))
        console.print(f"seconds ~ instructions ** {summary['exponent']:.2f} ({parts})")


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    measurements = []
    for num_stages in args.stages:
        schedule = Schedule.preset(args.schedule, num_stages=num_stages)
        for num_microbatches in args.microbatches:
            measurements.append(measure(schedule, num_microbatches, args.batches, args.repeat))
    sizes = [each.num_instructions for each in measurements]
    fit = len(set(sizes)) > 1
    summary = {
        "exponent": exponent(sizes, [each.seconds for each in measurements]) if fit else None,
        "build_exponent": exponent(sizes, [each.build_seconds for each in measurements]) if fit else None,
        "check_exponent": exponent(sizes, [each.check_seconds for each in measurements]) if fit else None,
        "simulate_exponent": exponent(sizes, [each.simulate_seconds for each in measurements]) if fit else None,
    }
    if sys.stdout.isatty():
        show(args, measurements, summary)
    else:
        json.dump(
            {"schedule": args.schedule, **summary, "programs": [asdict(each) for each in measurements]},
            sys.stdout,
            indent=2,
        )
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
