"""What could make up for stale weights: variants of the `stale` policy, replayed in one process on real data.

    python benchmarks/stale_variants.py DATA --json found.json    # DATA: examples/sentiment.py made it
    python benchmarks/stale_variants.py --show found.json

Two models in eight stages, so the first is seven microbatches ahead of its backwards: the small BERT that learns which
reviews are positive, and a transformer that learns the reviews' next characters from scratch. Each variant trains with
batches of 1 and of 4 microbatches at several peak learning rates from several seeds; AdamW, unclipped, linear warm-up
over a tenth and decay to 0. What counts is the loss on the validation data at the end, over flush's at the same seed.

The rule by which a variant wins was fixed before the runs: at a number of microbatches and a learning rate where flush
trains well (within 2% of its best median loss), it gets back half of what `stale` loses to flush, and more than
`predicted` by more than the spread of the seeds (greatest less least, of that variant or of `predicted`, whichever is
larger). With one microbatch a batch there are no gradients that are not stepped yet, so the provisional variants are
`stale` and `predicted` there and are not run.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.table import Table

from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from benchmarks.stale_models import task_of
from benchmarks.stale_replay import RULES, ReplayedStage, replay

FLUSH = "flush"
TASKS = ("reviews", "characters")
SIZES = (1, 4)
RATES = {("reviews", 1): (3e-3,), ("reviews", 4): (3e-3, 6e-3),
         ("characters", 1): (1e-2,), ("characters", 4): (1e-2,)}  # fmt: skip


@dataclass(frozen=True)
class Run:
    task: str
    variant: str
    size: int  # microbatches a batch
    rate: float
    seed: int
    microbatches: int


def main() -> int:
    parser = parser_of(__doc__, json="every single run goes here")
    parser.add_argument("data", type=Path, nargs="?", help="the folder that examples/sentiment.py made")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=(FLUSH, *RULES), default=[FLUSH, *RULES])
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(SIZES), help="of a batch")
    parser.add_argument("--learning-rates", type=float, nargs="+", help="instead of those of the docs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=400, help="microbatches of a run (default: 400)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on a core (default: 2)")
    parser.add_argument("--show", type=Path, nargs="+", help="results of earlier calls, shown together")
    options = parser.parse_args()
    if options.show:
        results = [each for path in options.show for each in json.loads(path.read_text())]
    else:
        if options.data is None:
            parser.error("DATA is missing: the folder that examples/sentiment.py made")
        results = measure(options)
    show(results)
    return 0


def measure(options: argparse.Namespace) -> list[dict]:
    runs = [
        Run(task, variant, size, rate, seed, options.length // size * size)
        for task in options.tasks
        for size in options.microbatches
        for rate in options.learning_rates or RATES[task, size]
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for variant in options.variants
        if size > 1 or not variant.startswith("provisional")
    ]
    results = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(trained, run, options.data) for run in runs]):
            results.append(done.result())
            print(f"{len(results)} of {len(runs)}: {results[-1]}", file=sys.stderr, flush=True)
            write(options.json, results)
    return results


def trained(run: Run, data: Path) -> dict:
    """The run, its loss and accuracy on the validation data, and CPU seconds."""
    torch.set_num_threads(1)
    began = time.process_time()
    task = task_of(run.task, data, run.seed)
    num_steps = run.microbatches // run.size

    def part(step: int) -> float:
        return min((step + 1) / max(1, num_steps // 10), (num_steps - step) / max(1, num_steps - num_steps // 10))

    last = len(task.stages) - 1
    stages = [
        ReplayedStage(
            module,
            0 if run.variant == FLUSH else last - place,
            lambda parameters: torch.optim.AdamW(parameters, lr=run.rate, weight_decay=0.01, fused=True),
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, part),
            "stale" if run.variant == FLUSH else run.variant,
        )
        for place, module in enumerate(task.stages)
    ]
    losses = replay(stages, task.microbatch, num_batches=num_steps, size=run.size)
    loss, accuracy = task.evaluate()
    end = losses[-len(losses) // 10 :]
    seconds = time.process_time() - began
    return asdict(run) | {"loss": loss, "accuracy": accuracy, "training": sum(end) / len(end), "seconds": seconds}


def over_flush(results: list[dict]) -> dict[tuple[str, int, float], dict[str, list[float]]]:
    """(task, microbatches, learning rate) -> variant -> the loss over flush's, less one, of each seed; `flush`: its
    losses.
    """
    loss = {(each["task"], each["size"], each["rate"], each["variant"], each["seed"]): each["loss"] for each in results}
    found: dict[tuple[str, int, float], dict[str, list[float]]] = {}
    for (*case, variant, seed), value in sorted(loss.items()):
        flush = loss.get((*case, FLUSH, seed))
        if flush is not None:
            own = found.setdefault(tuple(case), {}).setdefault(variant, [])
            own.append(value if variant == FLUSH else value / flush - 1.0)
    return found


def verdict(case: dict[str, list[float]], best: float, variant: str) -> tuple[float, float, bool]:
    """(of what `stale` loses, the part that `variant` gets back; how much less it loses than `predicted`, over the
    spread of the seeds; whether it wins here). `best`: the least median of flush's losses at any learning rate.
    """
    lost = {name: median(found) for name, found in case.items()}
    spread = max(max(case[name]) - min(case[name]) for name in (variant, "predicted"))
    got_back = 1.0 - lost[variant] / lost["stale"] if lost["stale"] > 0 else 0.0
    ahead = (lost["predicted"] - lost[variant]) / spread if spread > 0 else 0.0
    return got_back, ahead, lost[FLUSH] <= 1.02 * best and got_back >= 0.5 and ahead > 1.0


def show(results: list[dict]) -> None:
    """The tables of the docs, and who wins."""
    console = terminal(150)
    cases = over_flush(results)
    accuracy: dict[tuple, list[float]] = {}
    for each in results:
        accuracy.setdefault((each["task"], each["size"], each["rate"], each["variant"]), []).append(each["accuracy"])
    for task, size in sorted({case[:2] for case in cases}):
        rates = sorted(rate for *of, rate in cases if tuple(of) == (task, size))
        best = min(median(cases[task, size, rate][FLUSH]) for rate in rates)
        table = Table(f"{task}, m = {size}", *(f"{rate:g}" for rate in rates))
        for variant in (FLUSH, *RULES):
            row = []
            for rate in rates:
                found = cases[task, size, rate].get(variant)
                if found is None:
                    row.append("")
                    continue
                right = f"{median(accuracy[task, size, rate, variant]):.3f}"
                if variant == FLUSH:
                    row.append(f"{median(found):.3f}; {right}")
                else:
                    middle, least, most = (f"{100 * each:+.1f}" for each in (median(found), min(found), max(found)))
                    row.append(f"{middle}% ({least} to {most}); {right}")
            table.add_row(variant, *row)
        console.print(table)
        for variant in (each for each in RULES if each.startswith("provisional")):
            for rate in rates:
                case = cases[task, size, rate]
                if {"stale", "predicted", variant} <= case.keys():
                    got_back, ahead, wins = verdict(case, best, variant)
                    console.print(
                        f"{variant}, {rate:g}: gets back {100 * got_back:.0f}% of stale's loss, {ahead:+.2f} spreads "
                        f"ahead of predicted: {'wins' if wins else 'does not win'}",
                        highlight=False,
                    )
    spent = sum(each["seconds"] for each in results)
    console.print(f"{len(results)} runs, {spent / 60:.1f} CPU minutes", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
