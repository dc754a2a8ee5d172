"""The errors of a profile's predictions against real runs on this machine's CPU: p and t of 1 and 2, small models.

    python benchmarks/profile_accuracy.py                      # about 45 minutes on 2 cores; a table
    python benchmarks/profile_accuracy.py --json accuracy.json # also every number

For each pair of degrees, profiles and training alternate: the model's blocks are profiled with tools/profile_model.py's
session, each configuration of these degrees is trained for real, through torchrun, as `grid_search.py measure` does,
the blocks are profiled again, and so on. A run is predicted by simulating its program with the times of the profile
before it. "error" is the median over the rounds of the errors within a round, since a shared machine may be a tenth
slower a minute later; "of medians" compares the medians over all rounds. "between" is the median error of the mean
prediction of the profiles before and after a run, which a planner cannot have.

"others" is the share of the cores that other programs used during the run. If it is more than a few percent, the table
measures those programs. The load of other virtual machines shows only in the errors of the rounds.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.results import parser_of
from megatron.commands.grid_search.trial_results import Status, TrialEntry, predicted_seconds
from megatron.commands.grid_search.trial_runs import Runs
from megatron.pipeline.program.weight_policies import FLUSH, TWO_BW
from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.recompute import RecomputeScope
from megatron.trainer.plan.command import model_argv
from megatron.trainer.profile.session import ProfilingSession

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.05
MICRO_BATCH, NUM_MICROBATCHES = 2, 8


@dataclass
class Case:
    """A configuration with its predicted and measured seconds, and the load of other programs, for each round."""

    configuration: Configuration
    predicted: list[float] = field(default_factory=list)
    predicted_after: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """The error of the prediction in each round; positive if the predicted time is too long."""
        return [predicted / measured - 1 for predicted, measured in zip(self.predicted, self.measured, strict=True)]

    @property
    def error(self) -> float:
        return statistics.median(self.errors)

    @property
    def error_between(self) -> float:
        """The median error of the mean of the predictions before and after a run."""
        rounds = zip(self.predicted, self.predicted_after, self.measured, strict=True)
        return statistics.median((before + after) / 2 / measured - 1 for before, after, measured in rounds)

    @property
    def error_of_medians(self) -> float:
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1


class Others:
    """The share of the machine's processor time that other programs have used since this object was made."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        return time.monotonic(), times.idle + times.iowait, _own_seconds()

    def share(self) -> float:
        (start, idle, own), (end, idle_end, own_end) = self._start, self._read()
        total = (end - start) * psutil.cpu_count()
        return max(0.0, (total - (idle_end - idle) - (own_end - own)) / total)


def _own_seconds() -> float:
    """The processor seconds of this process, of its children that have ended, and of all running descendants."""
    times = psutil.Process().cpu_times()
    seconds = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        seconds += times.user + times.system
    return seconds


def configurations() -> list[Configuration]:
    common = {"micro_batch_size": MICRO_BATCH, "global_batch_size": MICRO_BATCH * NUM_MICROBATCHES}
    return [
        Configuration(**common, **degrees, schedule=schedule)
        for degrees in ({}, {"tensor": 2}, {"pipeline": 2})
        for schedule in ("flush", "2bw")
        if schedule == "flush" or "pipeline" in degrees
    ]


def model_flags(args: argparse.Namespace) -> tuple[str, ...]:
    return model_argv(
        f"--num-layers {args.num_layers} --hidden-size {args.hidden_size} --num-attention-heads 4 "
        f"--seq-length {args.seq_length} --max-position-embeddings {args.seq_length} --mock-data --lr 1e-4 "
        f"--tokenizer-type NullTokenizer --vocab-size {args.vocab_size} --num-workers 0".split(),
        architecture="gpt",
    )


def run_group(cases: list[Case], args: argparse.Namespace, output: Path) -> None:
    """Run all rounds of the configurations of one pair of degrees."""
    argv = model_flags(args)
    runs = Runs(
        program=ROOT / "pretrain_gpt.py", argv=argv, output=output, iterations=args.iterations, warmup=args.warmup
    )
    tensor, pipeline = cases[0].configuration.tensor, cases[0].configuration.pipeline
    before = predictions(cases, argv, args)
    for number in range(args.rounds):
        say(f"t={tensor}, p={pipeline}, round {number + 1} of {args.rounds}")
        measured = [measure(case, runs) for case in cases]
        after = predictions(cases, argv, args)
        for case, *seconds in zip(cases, before, measured, after, strict=True):
            for numbers, each in zip((case.predicted, case.measured, case.predicted_after), seconds, strict=True):
                numbers.append(each)
            first, trained, second = (f"{1e3 * each:.1f}" for each in seconds)
            say(
                f"  {case.configuration.schedule}: predicted {first} ms, measured {trained} ({case.errors[-1]:+.1%}), "
                f"predicted after it {second}, others used {case.others[-1]:.0%}"
            )
        before = after


def predictions(cases: list[Case], argv: tuple[str, ...], args: argparse.Namespace) -> list[float]:
    """Predict the seconds of an iteration of each case, from a new profile of the blocks that these degrees need."""
    tensor, pipeline = cases[0].configuration.tensor, cases[0].configuration.pipeline
    weights = (FLUSH, TWO_BW) if pipeline > 1 else (FLUSH,)
    profile = ProfilingSession(
        architecture="gpt", argv=argv, sequence_parallel=False, processes=tensor * pipeline, threads=1,
        tensors=(tensor,), micro_batch_sizes=(MICRO_BATCH,), scopes=(RecomputeScope.NONE,), weights=weights,
        layers=tuple(args.layers), iterations=args.profile_iterations, rounds=args.profile_rounds,
    ).run()  # fmt: skip
    return [predicted_seconds(profile, case.configuration, num_layers=args.num_layers) for case in cases]


def measure(case: Case, runs: Runs) -> float:
    """Train a case. Returns the measured seconds of an iteration."""
    others = Others()
    result = runs.run(TrialEntry(configuration=case.configuration))
    if result.status is not Status.DONE:
        raise SystemExit(f"{result.name}: {result.status.value}: {result.sentence}")
    case.others.append(others.share())
    return result.seconds


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(cases: list[Case]) -> None:
    table = Table(title=f"milliseconds per iteration; medians of {len(cases[0].measured)} rounds")
    for column in (
        "configuration",
        "predicted",
        "measured",
        "error",
        "of the rounds",
        "of medians",
        "between",
        "others",
    ):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for case in cases:
        errors = sorted(case.errors)
        table.add_row(
            f"t={case.configuration.tensor}, p={case.configuration.pipeline}, {case.configuration.schedule}",
            f"{1e3 * statistics.median(case.predicted):.1f}",
            f"{1e3 * statistics.median(case.measured):.1f}",
            f"{case.error:+.1%}{'' if abs(case.error) <= BAR else ' (beyond 5%)'}",
            f"{errors[0]:+.1%} to {errors[-1]:+.1%}",
            f"{case.error_of_medians:+.1%}",
            f"{case.error_between:+.1%}",
            f"{statistics.median(case.others):.0%}",
        )
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every number")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile-iterations", type=int, default=32, help="of each block in each profile")
    parser.add_argument("--profile-rounds", type=int, default=2, help="over which a profile spreads them")
    parser.add_argument("--iterations", type=int, default=20, help="of each run")
    parser.add_argument("--warmup", type=int, default=4, help="of them, not measured")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), help="of the stages that are profiled")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=1000)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    cases = [Case(configuration) for configuration in configurations()]
    with tempfile.TemporaryDirectory(prefix="profile_accuracy_") as folder:
        for _, group in itertools.groupby(cases, lambda case: (case.configuration.tensor, case.configuration.pipeline)):
            run_group(list(group), args, Path(folder))
    report(cases)
    if args.json:
        names = ("errors", "error", "error_of_medians", "error_between")
        numbers = [{**asdict(case), **{name: getattr(case, name) for name in names}} for case in cases]
        args.json.write_text(json.dumps(numbers, indent=1, default=str) + "\n")
    return int(any(abs(case.error) > BAR for case in cases))


if __name__ == "__main__":
    raise SystemExit(main())
