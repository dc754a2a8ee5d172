"""Real computation on two stages: tokens/s of this project's engine and of its peers, beside the limit.

    python benchmarks/real_compute.py                     # 10 to 24 minutes; a table
    python benchmarks/real_compute.py --json result.json  # also every measured time

Problem: schedules can be compared only under equal conditions, and on a shared machine conditions drift. Solution: two
processes of one thread each hold all contenders at once, with the same model and data, and run them in alternation: in
each round every contender runs some batches, in an order that changes from round to round. A contender's ratio to the
limit is the median of its ratios *within* the rounds.

**The noise floor.** Rounds differ on a shared machine, also where nothing but the machine changes. So the limit runs a
second time in each round, as `limit again`. No schedule is faster than the limit, so in such rounds the lower quartile
of a schedule's shares is at most about that of `limit again`, the floor. A bar above the floor cannot be reached and
cannot be missed: the rounds do not show it. Below it, a quartile over the floor's is the part that is the schedule's.

The limit is the computation of each stage (forwards, backwards, optimizer step) in the same two processes at the same
time, without communication: no schedule can be faster. Every batch includes its optimizer step. Before a contender's
timed batches, one batch (three under 2bw, until its segments repeat) runs untimed.

A flush costs p-1 of m+p-1 slots, so the ideal of `flush` and its peers would be m/(m+1) of the limit. The real ideal is
higher: the step is not a slot, and while one core waits, the other core has the caches and the memory to itself. Both
effects are measured, and the table gives the ideal from the stages' own times (`Own.flush_ideal`), and the greatest
possible lead of 2bw.

On two cores every other thread takes time from the two computing threads. So the CPU seconds of each thread are
measured, too. A second table shows for a batch of each contender the CPU time of the computing thread, of all other
threads of its process, and the time for which the computing thread was ready without a core.

Stages have to be balanced for the limit to be meaningful: the vocabulary, and with it the output layer of the last
stage, is adjusted until the stages' times differ by less than 3%; the output shows these times.
"""

import argparse
import copy
import gc
import random
import statistics
import sys
import time
import warnings
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.processes import gathered, run_group
from benchmarks.common.results import parser_of, write
from benchmarks.common.thread_times import MAIN, ThreadTimes, thread_times

CONTENDERS = (
    "limit", "2bw", "2bw provisional", "flush", "library 2bw", "library flush", "megatron.core 1F1B", "torch 1F1B",
    "torch GPipe",
)  # fmt: skip

AGAIN = "limit again"
BAR = 0.94
"""Share of the limit that the lower quartile of 2bw's rounds should reach."""

BALANCE = 0.03
"""Largest relative difference of the stages' own times."""


@dataclass(frozen=True)
class Own:
    """A stage's own times in milliseconds.

    Attributes:
        microbatch: time of a microbatch (forward and backward) while the other stage computes.
        microbatch_undisturbed: time of a microbatch while the other core waits.
        step: time of the optimizer step while the other stage steps.
    """

    microbatch: float
    microbatch_undisturbed: float
    step: float

    def limit(self, num_microbatches: int) -> float:
        """The milliseconds of a batch without any waiting."""
        return num_microbatches * self.microbatch + self.step

    def flush_ideal(self, num_microbatches: int) -> float:
        """The least milliseconds of a batch with a flush, at p=2.

        Before and after the last stage's m slots the first stage computes alone, for one slot in total, and during one
        of the m slots the first stage waits.
        """
        return (num_microbatches - 1) * self.microbatch + 2 * self.microbatch_undisturbed + self.step


@dataclass
class Result:
    """The results of all contenders.

    Attributes:
        own: the own times of both stages.
        seconds: number of microbatches -> contender -> seconds per batch of each round, on the slower rank.
        threads: the same keys -> for each round, the thread times per batch of both ranks.
        first_losses, last_losses: contender -> the loss of its first and of its last batch.
    """

    own: tuple[Own, Own]
    seconds: dict[int, dict[str, list[float]]]
    threads: dict[int, dict[str, list[list[ThreadTimes]]]]
    first_losses: dict[str, float]
    last_losses: dict[str, float]


def progress(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def measure(contender, num_microbatches: int, num_batches: int) -> tuple[float, list[ThreadTimes]]:
    """Measure the seconds per batch in the steady state on the slower rank, and the thread times of both ranks."""
    dist.barrier()
    for _ in range(3 if "2bw" in contender.name else 1):
        contender.run(num_microbatches)
    before, start = thread_times(), time.perf_counter()
    for _ in range(num_batches):
        contender.run(num_microbatches)
    seconds = torch.tensor([(time.perf_counter() - start) / num_batches], dtype=torch.float64)
    threads = thread_times().since(before, per=num_batches)
    contender.finish()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), gathered(threads)


def own_times(contender, num_microbatches: int, num_batches: int) -> list[Own]:
    """Measure the own times of both stages, as medians of some batches."""
    together, step = _own_milliseconds(contender, num_microbatches, num_batches)
    undisturbed = 0.0
    for rank in (0, 1):
        dist.barrier()  # waits without computing
        if rank == dist.get_rank():
            undisturbed, _ = _own_milliseconds(contender, num_microbatches, num_batches)
    return gathered(Own(together, undisturbed, step))


def _own_milliseconds(contender, num_microbatches: int, num_batches: int) -> tuple[float, float]:
    """Measure the milliseconds of a microbatch without the step, and of the step. The first batch is not timed."""
    contender.run(num_microbatches)
    times, steps = [], []
    for _ in range(num_batches):
        start = time.perf_counter()
        contender.run(num_microbatches)
        steps.append(contender.step_seconds[-1])
        times.append((time.perf_counter() - start - steps[-1]) / num_microbatches)
    return 1e3 * statistics.median(times), 1e3 * statistics.median(steps)


def balance(model, args):
    """Return `model` with the vocabulary that makes both stages take the same time, found by the secant method."""
    from benchmarks.real_compute_contenders import StageAlone

    def difference(vocab_size: int) -> float:
        stage = StageAlone(replace(model, vocab_size=vocab_size))
        dist.barrier()
        microbatch, step = _own_milliseconds(stage, 8, args.balance_batches)
        first, last = gathered(microbatch + step / 8)
        progress(f"balancing: vocabulary {vocab_size}, stages of {first:.1f} and {last:.1f} ms a microbatch")
        return (last - first) / first

    candidates = [model.vocab_size, model.vocab_size // 2]
    measured = [difference(size) for size in candidates]
    for _ in range(6):
        best = min(range(len(candidates)), key=lambda i: abs(measured[i]))
        if abs(measured[best]) < BALANCE / 3:
            break
        (x0, y0), (x1, y1) = ((candidates[i], measured[i]) for i in (-2, -1))
        slope = (y1 - y0) / (x1 - x0) if x1 != x0 and y1 != y0 else 1.0 / model.vocab_size
        target = x1 - y1 / slope
        candidates.append(max(64, min(4 * model.vocab_size, round(target / 8) * 8)))
        measured.append(difference(candidates[-1]))
    best = min(range(len(candidates)), key=lambda i: abs(measured[i]))
    return replace(model, vocab_size=candidates[best])


def compare(args) -> tuple[object, Result]:
    """Build all contenders and run the rounds. Both ranks must call it, and return equal results."""
    from benchmarks.common.gpt import Model
    from benchmarks.real_compute_contenders import contenders

    model = Model(
        hidden_size=args.hidden_size,
        heads=args.heads,
        layers=args.layers,
        extra_layers=1,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        vocab_size=args.vocab_size or 8 * args.hidden_size,
        clip_grad=args.clip_grad,
        optimizer_kernel=args.optimizer_kernel,
    )
    if args.vocab_size is None:
        model = balance(model, args)
    entrants = contenders(model, args.contenders or CONTENDERS)
    again = copy.copy(entrants[0])  # the same model and optimizer
    again.name = AGAIN
    gc.collect()
    gc.freeze()  # as in training: a full garbage collection takes longer than a microbatch
    seconds: dict[int, dict[str, list[float]]] = {}
    threads: dict[int, dict[str, list[list[ThreadTimes]]]] = {}
    own: list[list[Own]] = []
    order = random.Random(0)
    for num_microbatches in args.microbatches:
        num_batches = max(2, args.microbatches_per_round // num_microbatches)
        table = seconds[num_microbatches] = {entrant.name: [] for entrant in (*entrants, again)}
        took = threads[num_microbatches] = {entrant.name: [] for entrant in (*entrants, again)}
        for round_number in range(args.rounds):
            progress(f"m = {num_microbatches}, round {round_number + 1} of {args.rounds}")
            dist.barrier()
            own.append(own_times(entrants[0], num_microbatches, 2))
            for entrant in order.sample([*entrants, again], len(entrants) + 1):
                found = measure(entrant, num_microbatches, num_batches)
                table[entrant.name].append(found[0])
                took[entrant.name].append(found[1])
    losses = gathered({entrant.name: entrant.losses for entrant in entrants[1:]})
    known = {name: max(rank[name] for rank in losses) for name in losses[0]}  # the list of the last stage is not empty
    medians = tuple(_median([times[rank] for times in own]) for rank in (0, 1))
    first, last = ({name: found[position] for name, found in known.items()} for position in (0, -1))
    return model, Result(medians, seconds, threads, first, last)


def _median(times: list[Own]) -> Own:
    return Own(*(statistics.median(values) for values in zip(*map(astuple, times), strict=True)))


def run(args) -> None:
    """Run the comparison in one of the two processes; rank 0 reports."""
    from megatron import backend

    backend.keep_freed_memory()  # as in training; for all contenders
    warnings.filterwarnings("ignore", message=".*cuda_graph_scope.*")  # about a default of megatron.core's own
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model, result = compare(args)
    if dist.get_rank() == 0:
        report(model, result, args)


def report(model, result: Result, args) -> None:
    console = Console()
    console.print(f"{model}")
    times = [own.limit(8) / 8 for own in result.own]
    console.print(f"stages alone: {abs(times[1] - times[0]) / min(times):.1%} apart (m = 8), and in milliseconds")
    for name, own in zip(("first", "last"), result.own, strict=True):
        undisturbed = f"{own.microbatch_undisturbed:.1f} while the other core waits"
        console.print(f"  {name}: {own.microbatch:.1f} a microbatch, {undisturbed}, {own.step:.1f} the step")
    table = Table(title=f"tokens/s, and share of the limit; medians of {args.rounds} alternated rounds")
    table.add_column("")
    for num_microbatches in result.seconds:
        table.add_column(f"m = {num_microbatches}", justify="right")
    for name in next(iter(result.seconds.values())):
        table.add_row(name, *(cell(model, m, seconds, name) for m, seconds in result.seconds.items()))
    table.add_section()
    own = _median(list(result.own))
    ideals = {m: own.flush_ideal(m) / own.limit(m) for m in result.seconds}
    table.add_row("m / (m+1)", *(f"{m / (m + 1):.1%}" for m in result.seconds))
    table.add_row("a flush's ideal", *(f"{1 / ideal:.1%}" for ideal in ideals.values()))
    table.add_row("2bw over flush, ideal", *(f"{ideal:.2f}" for ideal in ideals.values()))
    for name, other, digits in (("2bw", "flush", 2), ("2bw provisional", "2bw", 3)):
        if all({name, other} <= set(each) for each in result.seconds.values()):
            table.add_row(
                f"{name} over {other}",
                *(f"{ratio(each[other], each[name]):.{digits}f}" for each in result.seconds.values()),
            )
    console.print(table)
    for num_microbatches, seconds in result.seconds.items():
        console.print(f"m = {num_microbatches}: {judgement(seconds)}")
    console.print(table_of_threads(result))
    console.print("loss of the first batch: " + ", ".join(f"{k} {v:.6f}" for k, v in result.first_losses.items()))
    console.print("loss of the last batch:  " + ", ".join(f"{k} {v:.6f}" for k, v in result.last_losses.items()))
    write(args.json, {"model": asdict(model), "result": asdict(result)})


def table_of_threads(result: Result) -> Table:
    """The table of the thread times of a batch, on the rank that waited least for the other: medians of the rounds."""
    table = Table(title="milliseconds of a batch: all; of the computing thread, of others, without a core, waiting")
    table.add_column("")
    for num_microbatches in result.seconds:
        table.add_column(f"m = {num_microbatches}", justify="right")
    for name in next(iter(result.seconds.values())):
        table.add_row(name, *(parts_of_a_batch(result, m, name) for m in result.seconds))
    return table


def parts_of_a_batch(result: Result, num_microbatches: int, name: str) -> str:
    rounds, whole = result.threads[num_microbatches][name], statistics.median(result.seconds[num_microbatches][name])
    ranks = []
    for rank in (0, 1):
        times = [both[rank] for both in rounds]
        computed = statistics.median(each.ran.get(MAIN, 0.0) for each in times)
        others = statistics.median(sum(each.ran.values()) - each.ran.get(MAIN, 0.0) for each in times)
        without = statistics.median(each.waited.get(MAIN, 0.0) for each in times)
        ranks.append((whole - computed - without, computed, others, without))
    waiting, computed, others, without = min(ranks)
    return f"{1e3 * whole:.0f}; " + ", ".join(f"{1e3 * part:.0f}" for part in (computed, others, without, waiting))


def cell(model, num_microbatches: int, seconds: dict[str, list[float]], name: str) -> str:
    tokens_per_second = num_microbatches * model.tokens_per_microbatch / statistics.median(seconds[name])
    return f"{tokens_per_second:,.0f}  {ratio(seconds['limit'], seconds[name]):6.1%}"


def ratio(reference: list[float], times: list[float]) -> float:
    """The speed relative to the reference: the median of the ratios within the rounds."""
    return statistics.median(r / t for r, t in zip(reference, times, strict=True))


def lower_quartile(reference: list[float], times: list[float]) -> float:
    """The share of the reference's speed that three quarters of the rounds reach."""
    shares = [r / t for r, t in zip(reference, times, strict=True)]
    return statistics.quantiles(shares, n=4, method="inclusive")[0] if len(shares) > 1 else shares[0]


def judgement(seconds: dict[str, list[float]], bar: float = BAR) -> str:
    """Whether 2bw reaches the bar by the lower quartile of the rounds, if the rounds can show that.

    `seconds`: contender -> seconds per batch of each round, as in `Result`.
    """
    floor = lower_quartile(seconds["limit"], seconds[AGAIN])
    text = f"lower quartile of the limit itself {floor:.1%}"
    if "2bw" not in seconds:
        return text
    share = lower_quartile(seconds["limit"], seconds["2bw"])
    text += f", of 2bw {share:.1%}, which is {share / floor:.1%} of that"
    if share >= bar:
        return f"{text}; {bar:.0%} is reached"
    if floor < bar:
        return f"{text}; {bar:.0%} cannot be reached in such rounds, nor by the limit"
    return f"{text}; {bar:.0%} is missed"


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8], help="m, at least 2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches-per-round", type=int, default=24, help="timed, of each contender")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="of the last stage; the first has one more")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, help="default: adjusted until the stages are balanced")
    parser.add_argument(
        "--clip-grad", type=float, default=0.0, help="norm to which this project's engine and megatron.core clip"
    )
    parser.add_argument(
        "--optimizer-kernel", choices=("loop", "fused"), default="loop", help="what takes the steps of all contenders"
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help='only these and the limit, such as 2bw "2bw provisional"'
    )
    parser.add_argument("--balance-batches", type=int, default=5, help="batches for each trial of a vocabulary")
    args = parser.parse_args()
    unknown = [name for name in args.contenders or () if name not in CONTENDERS]
    if unknown:
        parser.error(f"there is no contender {', '.join(unknown)}; the contenders are {', '.join(CONTENDERS)}")
    if args.contenders and "limit" not in args.contenders:
        args.contenders.append("limit")  # the reference of all contenders
    return args


def main() -> None:
    run_group(2, "benchmarks.real_compute:run", parse_arguments())


if __name__ == "__main__":
    main()
