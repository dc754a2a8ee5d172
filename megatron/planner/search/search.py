"""The search: ranks the configurations that fit by their estimates, and simulates the programs of the best.

A configuration may differ from the best in more than its choices: its layers (`--transformer-impl`) may have another
attention, and its batch may be larger if batches may grow. The notes of such a configuration tell the difference, so
that a gain is not credited to the schedule.
"""

from __future__ import annotations

import gc
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.configuration import Configuration
from megatron.planner.planner import Planner
from megatron.planner.search import rules
from megatron.planner.search.comparisons import fastest_without_pipeline
from megatron.planner.search.explore import Explorer, Refusal
from megatron.planner.search.outcome import Choice, Kept, Outcome, Rejected
from megatron.planner.search.rules import Training, is_shared
from megatron.planner.search.space import Space
from megatron.processes import map_forked

_BESIDES: dict[str, Callable[[Kept], str]] = {
    "layers": lambda each: each.layers,
    "batches": lambda each: f"of {each.choice.global_batch_size}",
}


def differences_from_best(each: Kept, best: Kept) -> tuple[str, ...]:
    """The differences of a configuration from the best, a clause each."""
    values = ((what, value(each), value(best)) for what, value in _BESIDES.items())
    return tuple(f"other {what} than the best ({mine}, not {its})" for what, mine, its in values if mine != its)


def mark_differences(kept: Sequence[Kept]) -> tuple[Kept, ...]:
    """The configurations, best first, with their differences from the best in their notes."""
    found = ((each, differences_from_best(each, kept[0])) for each in kept)
    return tuple(replace(each, notes=(*each.notes, *new)) if new else each for each, new in found)


NUM_SIMULATED = 5
_MOST_COMPUTATIONS = 400_000  # simulated unless the user gives a number of simulations: about 20 seconds

_MOST_TURNS = 4  # the most simulations for each requested one
_MANY_GPUS = 64  # a larger search is worth several processes, which take a hundredth of a second to start
_WORTH_A_FILE = 0.002  # an optimized mapping needs a file with the cluster's nodes, so it must gain this much

Progress = Callable[[str, int, int], None]
"""Called with the name of an activity, the amount done, and the total."""


@contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector: programs have millions of objects without cycles, and the collector takes a
    quarter of a large search."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_cycle_collection()
def search(
    space: Space,
    planner_of: Callable[[int], Planner],
    training: Training,
    *,
    num_simulated: int | None = None,
    refuse: Refusal | None = None,
    progress: Progress | None = None,
    objective: str = "time",
    num_processes: int = 1,
) -> Outcome:
    """Search a space and rank its configurations, best first. Those of `Space.unasked` follow, without a rank.

    Unless programs are large, one configuration without a rank is simulated, too, so that its time can be compared with
    that of the best.

    Args:
        space: the values to try.
        planner_of: returns the planner for a tensor parallel size.
        training: settings that exclude schedules or scopes.
        num_simulated: number of the best whose programs are proved and simulated; None: 5, or fewer if programs are
            large.
        refuse: returns why the training program would refuse a configuration, or None.
        progress: called with the progress of the search.
        objective: one of `OBJECTIVES`. For memory, a space without early stopping includes more recomputation.
        num_processes: number of processes that share a search of many GPUs. The outcome does not depend on it.
    """
    report = progress or (lambda *_: None)
    if space.num_gpus < _MANY_GPUS:
        num_processes = 1
    kept: list[Kept] = []
    rejected: dict[Rejected, None] = {}  # t alone may exclude several pairs of degrees
    for each in _explored(space, Explorer(space, planner_of, training, refuse), report, num_processes):
        if isinstance(each, Kept):
            kept.append(each)
        else:
            rejected[each] = None
    rank = _rank_by_memory if objective == "memory" else _rank
    simulation = _Simulation(space, planner_of, report, rank, num_processes)
    kept.sort(key=rank)
    asked = [each for each in kept if each.choice.schedule not in space.unasked]
    beside = [each for each in kept if each.choice.schedule in space.unasked]
    count, most = (NUM_SIMULATED, _MOST_COMPUTATIONS) if num_simulated is None else (num_simulated, math.inf)
    ranked, dropped = simulation.best(asked, count, most)
    beside, others = simulation.best(beside, min(count, 1), most - simulation.computations, at_least=0)
    return Outcome(
        kept=mark_differences([*ranked, *beside]),
        rejected=(*rejected, *dropped, *others),
        objective=objective,
        unasked=frozenset(space.unasked),
        without_pipeline=fastest_without_pipeline(space, planner_of, training),
    )


def _explored(space: Space, explorer: Explorer, report: Progress, num_processes: int) -> Iterator[Kept | Rejected]:
    """All choices, in the order of their degrees.

    One process explores all degrees with the same p, since their programs are alike. The deepest pipelines start first,
    since they take longest.
    """
    degrees = list(space.degrees())
    depths = sorted({p for _, p in degrees}, reverse=True)

    def explore(depth: int) -> dict[tuple[int, int], list[Kept | Rejected]]:
        return {(t, p): list(explorer.explore(t, p)) for t, p in degrees if p == depth}

    def say(index: int) -> None:
        report("configurations", sum(p > depths[index] for _, p in degrees), len(degrees))

    parts = map_forked(explore, depths, num_processes, taken=say)
    report("configurations", len(degrees), len(degrees))
    found = {pair: choices for part in parts for pair, choices in part.items()}
    return (each for pair in degrees for each in found[pair])


def _rank(each: Kept) -> tuple:
    """A sort key by speed, fastest first; ties within rounding errors are broken by memory."""
    return -float(f"{each.sequences_per_second:.9g}"), each.memory_gib, each.choice.key


def _rank_by_memory(each: Kept) -> tuple:
    """A sort key by memory, smallest first; ties are broken by speed."""
    speed, memory, key = _rank(each)
    return float(f"{memory:.9g}"), speed, key


class _Simulation:
    """Proves and simulates the best configurations, each also with its best mapping."""

    def __init__(
        self,
        space: Space,
        planner_of: Callable[[int], Planner],
        report: Progress,
        rank: Callable[[Kept], tuple],
        num_processes: int,
    ) -> None:
        self.space, self.planner_of, self.report, self.rank = space, planner_of, report, rank
        self.num_processes = num_processes
        self._ahead: dict[Choice, list[Kept] | ValueError] = {}  # results that were simulated before their turn
        self.tries_optimized = "optimized" in space.rank_mappings and len(space.rank_mappings) > 1
        self._tried: set[Choice] = set()
        self.computations = 0  # of all simulations so far

    def best(
        self, kept: list[Kept], total: int, most: float, *, at_least: int = 1
    ) -> tuple[list[Kept], list[Rejected]]:
        """Rank all configurations with the first `total` of them simulated, and return them with the rejected ones.

        Fewer configurations are simulated, but at least `at_least`, if they would take more than `most` computations. A
        simulated time may exceed the estimate; then the next configuration is simulated, too. If not all of `total` can
        be simulated, the fastest simulated configuration is ranked first.
        """
        self._simulate_ahead(kept, total, most)
        waiting = [
            (self.rank(each), index, each) for index, each in enumerate(kept)
        ]  # the index breaks ties, since configurations have no order
        heapq.heapify(waiting)
        found: list[Kept] = []
        dropped: list[Rejected] = []
        num_done, before = 0, self.computations
        while waiting and len(found) < total:
            each = heapq.heappop(waiting)[-1]
            if each.is_simulated:
                found.append(each)
                continue
            computations = self.computations - before + _computations(each.estimate.configuration)
            if num_done >= _MOST_TURNS * total or (num_done >= at_least and computations > most):
                heapq.heappush(waiting, (self.rank(each), len(kept) + num_done, each))
                break
            self.computations = before + computations
            self.report("simulations", len(found), total)
            simulated = self._ahead.pop(each.choice, None) or self._turn(each)
            if isinstance(simulated, ValueError):
                dropped.append(Rejected(choice=each.choice, reason=rules.clause(simulated)))
                continue
            for one in simulated:
                if one.choice in self._tried:  # already simulated from another mapping
                    continue
                self._tried.add(one.choice)
                num_done += 1
                heapq.heappush(waiting, (self.rank(one), len(kept) + num_done, one))
        rest = [each for *_, each in sorted(waiting, key=lambda item: item[:2])]
        if not found and num_done:
            first = next(each for each in rest if each.is_simulated)
            found = [first]
            rest.remove(first)
        return [*sorted(found, key=self.rank), *rest], dropped  # a late optimized mapping may be faster

    def _simulate_ahead(self, kept: list[Kept], total: int, most: float) -> None:
        """Simulate in several processes the configurations that will be simulated unless optimized mappings win."""
        ends = accumulate(_computations(each.estimate.configuration) for each in kept[:total])
        chosen = kept[: min(total, max(1, bisect_right(list(ends), most)))]
        if self.num_processes > 1 and len(chosen) > 1:
            found = map_forked(self._turn, chosen, self.num_processes)
            self._ahead = {each.choice: result for each, result in zip(chosen, found, strict=True)}

    def _turn(self, each: Kept) -> list[Kept] | ValueError:
        """Simulate a configuration, also with the optimized mapping if a gain is expected; or return the error."""
        try:
            return [self._simulated(each), *map(self._simulated, self._optimized(each))]
        except ValueError as error:
            return error

    def _simulated(self, each: Kept) -> Kept:
        planner = self.planner_of(each.choice.tensor)
        estimate = planner.estimate(each.estimate.configuration, simulate=True)
        return replace(each, estimate=estimate, is_simulated=True)

    def _optimized(self, each: Kept) -> list[Kept]:
        """The configuration with the mapping of least transfer time, if the estimate expects a gain."""
        choice = replace(each.choice, rank_mapping="optimized")
        if choice in self._tried or not (self.tries_optimized and self.space.mapping_matters(choice.tensor)):
            return []
        if is_shared(choice):  # the optimized mapping does not model its transfers
            return []
        configuration = replace(each.estimate.configuration, rank_mapping="optimized")
        estimate = self.planner_of(choice.tensor).estimate(configuration)
        if estimate.seconds > each.estimate.seconds * (1 - _WORTH_A_FILE):
            return []
        return [replace(each, choice=choice, estimate=estimate)]


def _computations(configuration: Configuration) -> int:
    """The number of forwards and backwards of a simulation: of one batch, or of five if batches do not drain."""
    batches = PRESETS[configuration.schedule].policy.full_batches(configuration.num_microbatches, 5)
    return 2 * sum(batches) * configuration.num_stages
