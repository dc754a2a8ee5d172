"""Variants of the `stale` policy that may compensate for stale weights, replayed in one process on real data.

    python -m papers.ftpipe.stale_variants DATA --json found.json    # DATA: folder made by examples/sentiment.py
    python -m papers.ftpipe.stale_variants --show found.json

Two models are cut into eight stages, so the first stage is seven microbatches ahead of its backwards: a small BERT that
learns to tell positive reviews, and a transformer that learns the reviews' next characters from scratch. Each variant
trains with batches of 1 and of 4 microbatches at several peak learning rates from several seeds, with AdamW, without
clipping, with linear warm-up over a tenth of the steps and decay to 0. The result is the final loss on the validation
data over flush's loss at the same seed.

The rule by which a variant wins was fixed before the runs. It applies at a number of microbatches and a learning rate
at which flush trains well (within 2% of its best median loss). There the variant must recover at least half of the loss
of `stale` over flush, and must be better than `predicted` by more than the spread of the seeds (greatest less least, of
the variant or of `predicted`, whichever is larger). With one microbatch in a batch there are no gradients that are not
stepped yet, so the provisional variants equal `stale` and `predicted` and are not run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from megatron.pipeline.runtime.update.optimizer_wrappers import GapAware, copied
from megatron.pipeline.runtime.update.weight_prediction import WeightPredictor, learning_rates_to_come
from papers.ftpipe.stale_models import task_of

RULES = ("stale", "predicted", "gap-aware", "provisional", "provisional, predicted")

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class ReplayedStage:
    """A stage with its own optimizer.

    Args:
        module: (data of a microbatch, tensors of the previous stage) -> tuple of tensors; on the last stage the first
            tensor is the loss. Two calls for a microbatch must compute the same, so dropout has to seed itself.
        depth: number of later stages, in an asynchronous pipeline; 0: forwards do not run ahead of backwards.
        make_optimizer: makes a torch optimizer for a list of parameters.
        make_scheduler: makes a torch learning-rate scheduler for an optimizer, with which it steps, or returns None.
        rule: the rule for forwards at stale weights, of `RULES`.
    """

    def __init__(
        self, module: nn.Module, depth: int, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler, rule: str
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"{rule!r} is no rule for forwards at stale weights; there are {', '.join(RULES)}")
        self.module, self.depth, self.rule = module, depth, rule
        self.parameters = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(self.parameters)
        self.scheduler = make_scheduler(self.optimizer)
        self.gap_aware = GapAware(self.optimizer) if rule == "gap-aware" and depth else None
        self.num_steps = self.num_unstepped = 0  # steps; microbatches with a gradient that no step has used
        self.num_provisional = 0  # number of forwards at provisional weights
        self._make_optimizer = make_optimizer
        self._remembered = -1

    def step(self) -> None:
        if self.gap_aware is None:
            self.optimizer.step()
        else:
            self.gap_aware.step_of(self.num_steps)
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.num_steps, self.num_unstepped = self.num_steps + 1, 0

    @contextmanager
    def weights_of_forward(self, batch: int, size: int) -> Iterator[None]:
        """A block in which the parameters have the values for a forward of `batch`. `size`: microbatches in a batch."""
        horizon = batch - self.num_steps
        if horizon and self.gap_aware is not None and self._remembered < batch:
            self.gap_aware.remember(batch)
            self._remembered = batch
        is_provisional = self.rule.startswith("provisional") and self.num_unstepped > 0
        if not horizon or not (is_provisional or self.rule.endswith("predicted")):
            yield
            return
        true = [each.data for each in self.parameters]
        shown = self._provisional(horizon, size) if is_provisional else self._predicted(horizon)
        for parameter, weights in zip(self.parameters, shown, strict=True):
            parameter.data = weights
        yield
        for parameter, weights in zip(self.parameters, true, strict=True):
            parameter.data = weights

    def _predicted(self, horizon: int) -> list[Tensor]:
        targets = [torch.empty_like(each) for each in self.parameters]
        tensors = [(each, each.detach(), target) for each, target in zip(self.parameters, targets, strict=True)]
        WeightPredictor(self.optimizer, scheduler=self.scheduler).predict(horizon, tensors)
        return targets

    @torch.no_grad()
    def _provisional(self, horizon: int, size: int) -> list[Tensor]:
        """The weights after a step of the optimizer on copies, with the mean of the gradients so far."""
        self.num_provisional += 1
        copies = [each.detach().clone() for each in self.parameters]
        optimizer = self._make_optimizer(copies)
        for parameter, copy in zip(self.parameters, copies, strict=True):
            if parameter.grad is not None:
                copy.grad = parameter.grad * (size / self.num_unstepped)
            if parameter in self.optimizer.state:
                optimizer.state[copy] = {key: copied(value) for key, value in self.optimizer.state[parameter].items()}
        rates = learning_rates_to_come(self.optimizer, self.scheduler, horizon)
        _set_rates(optimizer, [of_group[0] for of_group in rates])
        optimizer.step()
        if self.rule.endswith("predicted"):
            predictor = WeightPredictor(optimizer)
            for further in range(1, horizon):
                _set_rates(optimizer, [of_group[further] for of_group in rates])
                targets = [torch.empty_like(each) for each in copies]
                predictor.predict(1, [(each, each, target) for each, target in zip(copies, targets, strict=True)])
                for copy, target in zip(copies, targets, strict=True):
                    copy.copy_(target)
        return copies


def replay(
    stages: Sequence[ReplayedStage], data_of: Callable[[int], Any], *, num_batches: int, size: int
) -> list[float]:
    """Train, from a drained pipeline to a drained pipeline. `size`: number of microbatches in a batch.

    Returns the loss of each microbatch, at the weights of its forwards.
    """
    num_microbatches = num_batches * size
    inputs: list[dict[int, tuple[Tensor, ...]]] = [{} for _ in stages]  # by microbatch; leaves of the autograd graph
    recorded: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # outputs of forwards that need no recompute
    gradients: dict[tuple[int, int], list[Tensor]] = {}  # of a stage's outputs
    losses = []
    last = len(stages) - 1
    for now in range(num_microbatches + max(each.depth for each in stages)):
        handed: tuple[Tensor, ...] = ()
        for place, stage in enumerate(stages) if now < num_microbatches else ():
            inputs[place][now] = tuple(each.detach().requires_grad_() for each in handed)
            if stage.depth:
                with torch.no_grad(), stage.weights_of_forward(now // size, size):
                    handed = stage.module(data_of(now), inputs[place][now])
            else:
                handed = recorded[place, now] = stage.module(data_of(now), inputs[place][now])
            if place == last:
                losses.append(handed[0].item())
        for place in reversed(range(len(stages))):
            stage = stages[place]
            mine = now - stage.depth
            if not 0 <= mine < num_microbatches:
                continue
            leaves = inputs[place].pop(mine)
            outputs = recorded.pop((place, mine), None) or stage.module(data_of(mine), leaves)
            if place == last:
                (outputs[0] / size).backward()
            else:
                torch.autograd.backward(outputs, gradients.pop((place, mine)))
            gradients[place - 1, mine] = [each.grad for each in leaves]
            stage.num_unstepped += 1
            if stage.num_unstepped == size:
                stage.step()
        gradients.pop((-1, now - stages[0].depth), None)
    return losses


def _set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


FLUSH = "flush"
TASKS = ("reviews", "characters")
SIZES = (1, 4)
RATES = {("reviews", 1): (3e-3,), ("reviews", 4): (3e-3, 6e-3),
         ("characters", 1): (1e-2,), ("characters", 4): (1e-2,)}  # fmt: skip


@dataclass(frozen=True)
class Run:
    task: str
    variant: str
    size: int  # number of microbatches in a batch
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
    """Do a run. Returns its fields, its loss and accuracy on the validation data, and its CPU seconds."""
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
    """The relative losses: (task, microbatches, learning rate) -> variant -> by seed, the loss over flush's, less one.

    The entries of `flush` are its losses.
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
    """Judge a variant by the rule above.

    Returns the part of the loss of `stale` that the variant recovers; its lead over `predicted`, divided by the spread
    of the seeds; and whether it wins. `best`: the least median of flush's losses over all learning rates.
    """
    lost = {name: median(found) for name, found in case.items()}
    spread = max(max(case[name]) - min(case[name]) for name in (variant, "predicted"))
    got_back = 1.0 - lost[variant] / lost["stale"] if lost["stale"] > 0 else 0.0
    ahead = (lost["predicted"] - lost[variant]) / spread if spread > 0 else 0.0
    return got_back, ahead, lost[FLUSH] <= 1.02 * best and got_back >= 0.5 and ahead > 1.0


def show(results: list[dict]) -> None:
    """Print the tables of the docs, and the verdict on each variant."""
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
