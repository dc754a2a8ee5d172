"""Squeezed words: the same computations within the same limits, none of them later."""

import random
from collections import Counter

import pytest

from megatron.pipeline.program.edges import v
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis.bound import lower_bound
from megatron.pipeline.synthesis.improve import shaken
from megatron.pipeline.synthesis.problem import Problem, Words
from megatron.pipeline.synthesis.seeds import listed, named_words, one_after_another
from megatron.pipeline.synthesis.squeeze import Squeeze
from megatron.pipeline.synthesis.timing import Clock
from tests.pipeline.synthesis.made_up import small


def _ends(problem: Problem, words: Words) -> list[list[float]]:
    return Clock(problem).times(words).ends


def _assert_a_program(problem: Problem, words: Words, like: Words) -> None:
    assert [Counter(word) for word in words] == [Counter(word) for word in like]
    assert all(problem.is_in_order(word, rank) for rank, word in enumerate(words))


@pytest.mark.parametrize("seed", range(60))
def test_a_sweep_delays_nothing_and_keeps_the_limits(seed):
    """Onwards each computation ends no later; backwards too, as time runs there; limits hold."""
    problem = small(seed)
    squeeze, words = Squeeze(problem, Clock(problem)), one_after_another(problem)
    onwards = squeeze._onwards.sweep(words)
    _assert_a_program(problem, onwards, words)
    for before, after in zip(_ends(problem, words), _ends(problem, onwards), strict=True):
        assert all(new <= old * (1 + 1e-9) for old, new in zip(before, after, strict=True))
    clock = squeeze._backwards.clock
    mirrored = [word[::-1] for word in onwards]
    assert clock.times(mirrored).seconds == pytest.approx(Clock(problem).times(onwards).seconds, rel=1e-12)
    backwards = squeeze._backwards.sweep(mirrored)
    _assert_a_program(problem, [word[::-1] for word in backwards], words)
    for before, after in zip(clock.times(mirrored).ends, clock.times(backwards).ends, strict=True):
        assert all(new <= old * (1 + 1e-9) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_loosened_and_shaken_is_still_a_program(seed):
    problem, chance = small(seed), random.Random(seed)
    clock, words = Clock(problem), one_after_another(problem)
    squeeze = Squeeze(problem, clock)
    for _ in range(10):
        _assert_a_program(problem, squeeze.loosened(words, chance), words)
    seconds, made = shaken(squeeze, words, chance, 5)
    _assert_a_program(problem, made, words)
    assert seconds == clock.times(made).seconds <= clock.times(words).seconds * (1 + 1e-9)


def test_squeezing_an_order_within_a_limit_takes_most_of_its_waits():
    """A V of 8 ranks: `zbv` scheduled within 5 of 8 microbatches is 13% above the bound, and squeezed about 1%."""
    problem = Problem(rank_of_stage=v(8, 2), num_microbatches=24, costs=Costs(), saved=0.5, limits=5.0)
    clock, (bound, _) = Clock(problem), lower_bound(problem)
    within = listed(problem, dict(named_words(problem))["zbv"])
    assert clock.times(within).seconds > 1.1 * bound
    assert Squeeze(problem, clock).words(within, 10)[0] < 1.02 * bound
