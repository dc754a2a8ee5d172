"""The bound for little memory: true on small problems, whatever orders it leaves out, and near where it counts."""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron.pipeline.program.edges import v
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis.bound import Turns, bound_of_any_recompute, lower_bound
from megatron.pipeline.synthesis.keep import synthesize_keeping
from megatron.pipeline.synthesis.orders_bound import Orders, bound_of_orders
from megatron.pipeline.synthesis.problem import Problem
from megatron.pipeline.synthesis.search import synthesize
from megatron.pipeline.synthesis.several_problems import synthesize_fastest
from tests.pipeline.synthesis.made_up import least_of_any_recompute, least_seconds, little_memory, small

EVERY = 10**9  # states


class _AllWeights(Orders):
    """Tries every choice of the W before a computation."""

    def _weights_before(self, counts, pending, place, free, least) -> Iterator[tuple[tuple[int, ...], int]]:
        kept, room = [], self._problem.limit_of(self._busy) + 1e-9 - self._takes[place]
        for at, stage in enumerate(self._stages):
            if self._is_busy[at]:
                room -= self._held(stage) * counts[at] * (1 if self._is_forward[at] else -1)
        for chosen in itertools.product(*(range(each + 1) for each in pending)):
            remain = [one - other for one, other in zip(pending, chosen, strict=True)]
            if sum(one * other for one, other in zip(remain, self._deferred, strict=True)) <= room:
                kept.append((tuple(remain), free + sum(map(int.__mul__, chosen, self._weights))))
        yield from kept


def _pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    yield from itertools.permutations(range(problem.num_ranks), 2)


def _hold(seeds: range, most: int) -> None:
    gaps, before = [], []
    for seed in seeds:
        problem = little_memory(seed, most)
        least, (known, _) = least_seconds(problem), lower_bound(problem)
        free = replace(problem, costs=replace(problem.costs, recompute=0.0))
        turns = Turns(free)
        for pair in _pairs(problem):
            bound = Orders(free, *pair, turns.ends, turns.rests).least(EVERY)
            assert bound <= least * (1 + 1e-9), (seed, pair, bound, least)
        bound, bound_from = bound_of_orders(problem)
        assert bound <= least * (1 + 1e-9), (seed, bound_from, bound, least)
        before.append(least / known - 1)
        gaps.append(least / max(known, bound) - 1)
    assert statistics.mean(gaps) <= 0.7 * statistics.mean(before)


def test_no_order_of_all_ranks_beats_the_orders_of_two():
    """Exhaustive search finds nothing below the bound, which is a good part nearer than the others."""
    _hold(range(30), 300)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_same_on_larger_problems():
    _hold(range(1000, 1150), 3_000)


@pytest.mark.full
def test_it_holds_on_the_small_problems_of_the_other_bounds():
    """Integer costs, limits that bind less."""
    for seed in range(2000, 2040):
        problem = small(seed)
        assert bound_of_orders(problem)[0] <= least_seconds(problem) * (1 + 1e-9), seed


def test_it_holds_for_every_choice_of_recomputes():
    """Kept and recomputed microbatches in any number."""
    for seed in range(60):
        problem = small(seed)
        if problem.recomputed and problem.num_ranks * problem.num_microbatches <= 6:
            bound, bound_from = bound_of_orders(problem)
            assert bound <= least_of_any_recompute(problem) * (1 + 1e-9), (seed, bound_from)


def test_orders_that_are_left_out_are_not_faster():
    """Every choice of W in every order gives the same least time."""
    for seed in range(30):
        problem = little_memory(seed, 300)
        turns = Turns(problem)
        for pair in _pairs(problem):
            found = (made(problem, *pair, turns.ends, turns.rests) for made in (Orders, _AllWeights))
            least, every = (each.least(EVERY) for each in found)
            assert least == pytest.approx(every, rel=1e-9), (seed, pair)


def _even(num_ranks: int, num_microbatches: int, limit: float) -> Problem:
    costs = Costs(forward=0.5, backward_input=0.5, backward_weight=0.5, backward=1.0, latency=0.02)
    return Problem(
        rank_of_stage=v(num_ranks, 2), num_microbatches=num_microbatches, costs=costs, saved=0.5, limits=limit
    )


def test_fewer_states_give_a_lower_bound():
    """A search that stops early says less, and the same each time."""
    problem = _even(5, 8, 2.0)
    found = [bound_of_orders(problem, states)[0] for states in (1, 100, 500, EVERY)]
    assert found == sorted(found) and found[0] < found[-1]
    assert bound_of_orders(problem, 500)[0] == found[2]


@pytest.mark.full
def test_programs_of_little_memory_are_near_the_bound():
    """Where the other bounds leave 17%, no program is faster; the certificate says why."""
    problem = _even(4, 8, 1.5)
    found, (known, known_from) = synthesize(problem, rounds=1), lower_bound(problem)
    assert found.seconds > 1.17 * known
    assert found.bound == pytest.approx(found.seconds)
    assert found.certificate()["bound_from"] == found.bound_from != known_from
    several = synthesize_fastest([problem, replace(problem, limits=1.6)], rounds=1)
    assert several.bound == pytest.approx(several.seconds)  # both bounds are tight


def test_any_recomputes_with_little_memory():
    """Where any microbatches are recomputed, the bound of a search is the better of both."""
    problem = replace(_even(3, 4, 1.2), recomputed=frozenset(range(6)), stage_input=0.4)
    found, known = synthesize_keeping(problem, rounds=1), bound_of_any_recompute(problem)[0]
    assert known < found.bound == bound_of_orders(problem)[0] <= found.seconds
