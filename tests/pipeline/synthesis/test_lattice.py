"""Patterns of several microbatches in a period."""

import random
from collections import Counter

import pytest
from hypothesis import given

from megatron.pipeline.program.edges import v
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem
from megatron.pipeline.synthesis.lattice import words_of_lattices
from megatron.pipeline.synthesis.seeds import Patterns, listed, named_words
from megatron.pipeline.synthesis.timing import Clock
from tests.draws import draws
from tests.pipeline.synthesis.made_up import problems


def of_lattices(problem: Problem, slowest: float) -> list:
    clock = Clock(problem)
    return list(words_of_lattices(Patterns(problem, clock), random.Random(0), slowest))


def equal_stages(ranks: int, limit: float) -> Problem:
    """Two stages on a rank in a V, F = I = 3 and W = 2; `limit` in stages."""
    kinds = {"forward": 3.0, "backward_input": 3.0, "backward_weight": 2.0, "backward": 5.0}
    costs = Costs(**{name: [seconds] * 2 * ranks for name, seconds in kinds.items()})
    return Problem(rank_of_stage=v(ranks, 2), num_microbatches=3 * ranks, costs=costs, limits=limit)


@pytest.mark.parametrize(("ranks", "limit"), [(8, 6.0), (12, 8.0)])
def test_they_use_memory_that_a_pattern_of_one_microbatch_leaves(ranks, limit):
    """With three eighths or a third of 1F1B's memory, no pattern of one microbatch is found, and a registered order
    that is changed to keep the limit is slower."""
    problem = equal_stages(ranks, limit)
    clock, chance = Clock(problem), random.Random(0)
    patterns = Patterns(problem, clock)
    assert not any(patterns.words(chance) for _ in range(100))
    orders = [within for _, words in named_words(problem) if (within := listed(problem, words)) is not None]
    fastest = min(clock.times(words).seconds for words in orders)
    found = of_lattices(problem, fastest)
    assert found and min(seconds for seconds, _ in found) < 0.97 * fastest
    for seconds, words in found:
        assert clock.times(words).seconds == seconds and max(problem.held(words)) <= limit
        assert all(Counter(word) == dict.fromkeys(own, 3 * ranks)
                   for own, word in zip(problem.queues_of_rank, words, strict=True))  # fmt: skip


def test_a_pattern_that_is_too_slow_is_not_tried():
    """Its periods alone take longer than a batch does already."""
    problem = equal_stages(8, 6.0)
    assert not of_lattices(problem, (problem.num_microbatches - 1) * problem.unit)


@pytest.mark.parametrize("forward", [1e-7, 2.3e-311])
def test_transfers_that_take_far_longer_than_computations(forward):
    """There is no period then that is worth a pattern, and no error."""
    costs = Costs(forward=[0.0, forward], backward=0.0, backward_input=0.0, backward_weight=0.0, latency=[1.0])
    problem = Problem(rank_of_stage=(0, 1), num_microbatches=2, costs=costs, limits=1.0, splits=False)
    assert of_lattices(problem, float("inf")) == []


@draws(60)
@given(problems())
def test_made_up_costs(problem):
    """Whatever the costs, placement and limits are, words are complete, in order, and within the limits."""
    for seconds, words in of_lattices(problem, float("inf")):
        assert problem.accepts(words) and Clock(problem).times(words).seconds == seconds
        assert [len(word) for word in words] == [len(own) * problem.num_microbatches for own in problem.queues_of_rank]
