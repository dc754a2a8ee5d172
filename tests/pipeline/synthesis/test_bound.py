"""The lower bound: true on small problems that are searched in full, near on most, and exact where it is known."""

import statistics

import pytest

from megatron.pipeline.program.edges import v
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis.bound import _room, lower_bound
from megatron.pipeline.synthesis.problem import Problem
from megatron.pipeline.synthesis.search import bubble, synthesize
from tests.pipeline.synthesis.made_up import least_seconds, small


def _hold(seeds: range) -> None:
    gaps, missed = [], 0
    for seed in seeds:
        problem = small(seed)
        least, (bound, bound_from) = least_seconds(problem), lower_bound(problem)
        assert bound <= least * (1 + 1e-9), (seed, bound, bound_from, least)
        found = synthesize(problem, rounds=4).seconds
        assert found >= least * (1 - 1e-9), (seed, found, least)
        missed += found > least * (1 + 1e-9)
        gaps.append(least / bound - 1)
    assert statistics.median(gaps) <= 0.05
    assert missed <= len(seeds) / 20


def test_nothing_beats_the_bound_and_the_search_finds_the_optimum():
    """Exhaustive search finds nothing below the bound; the median distance is at most 5%; the search misses few."""
    _hold(range(20))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_same_on_200_problems():
    _hold(range(1000, 1200))


@pytest.mark.parametrize(
    ("limit", "least"),
    [(8, 0.0703), (6, 0.1371), (5, 0.1671)],  # by hand: (m work + first backward + rest behind the last forward - room)
)
def test_memory_bounds_a_v(limit, least):
    """Zero bubble's first published row on 8 ranks: what a limit costs in fill and drain, whatever the order."""
    half = {
        "forward": 18522 / 2,
        "backward": (18086 + 9337) / 2,
        "backward_input": 18086 / 2,
        "backward_weight": 9337 / 2,
    }
    problem = Problem(
        rank_of_stage=v(8, 2), num_microbatches=24, costs=Costs(latency=601, **half), saved=0.5, limits=float(limit)
    )
    bound, bound_from = lower_bound(problem)
    assert bubble(problem, bound) == pytest.approx(least, abs=5e-5)
    assert bound_from == "fill and drain of rank 7 under its limit"


@pytest.mark.parametrize("limit", [3.0, 3.5])
def test_a_microbatch_at_a_stage_is_also_held_at_the_stages_before_it_on_its_rank(limit):
    """Two stages on each of four ranks in a V, and room for three: one microbatch at a time is at the second stage of
    rank 3, for eight computations; before it are four, behind it four and a W. Half a microbatch more is no room.
    """
    costs = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, backward=2.0)
    problem = Problem(rank_of_stage=v(4, 2), num_microbatches=10, costs=costs, limits=limit)
    assert lower_bound(problem)[0] == 4 + 10 * 8 + 4 + 1


def test_the_last_gradient_has_its_way_behind_a_full_rank():
    """One stage on each of two ranks, and room for two: rank 1 is full, but for its last second, in which stage 0 has
    the last gradient and rank 1 computes a W and holds nothing else. A second of a half-empty rank counts.
    """
    costs = Costs(forward=1.0, backward_input=1.0, backward_weight=3.0, backward=4.0)
    problem = Problem(rank_of_stage=(0, 1), num_microbatches=10, costs=costs, limits=(9.0, 2.0))
    assert _room(problem, 1) == 1 + 1 + (10 * 5 - 1) / 2


def test_work_and_path_bound_a_pipeline_without_limits():
    """One microbatch takes its path; many take the busiest rank's work between its head and its tail."""
    costs = Costs(forward=[1.0, 2.0, 1.0], backward=[2.0, 4.0, 2.0], latency=0.5)
    one = Problem(rank_of_stage=(0, 1, 2), num_microbatches=1, costs=costs, splits=False)
    assert lower_bound(one)[0] == 12.0 + 4 * 0.5
    many = Problem(rank_of_stage=(0, 1, 2), num_microbatches=20, costs=costs, splits=False)
    assert lower_bound(many)[0] == (1 + 0.5) + 20 * 6 + (0.5 + 2)


def test_waits_that_overlap_bound_nothing():
    """One microbatch fills and drains at once: the two waits of a rank share the way behind it, and do not add up."""
    costs = Costs(forward=[0.0, 5.0, 0.0], backward=[3.0, 8.877907092122575, 0.0], latency=[0.0, 1.0])
    problem = Problem(rank_of_stage=(0, 0, 1), num_microbatches=1, costs=costs, splits=False, limits=[2.0, 1.0])
    assert lower_bound(problem)[0] == pytest.approx(least_seconds(problem)) == pytest.approx(18.877907092122575)
