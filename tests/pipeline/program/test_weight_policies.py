"""The rules of the weight policies are the papers'."""

import pytest

from megatron.pipeline.program.weight_policies import (
    FLUSH,
    POLICIES,
    STALE,
    STALE_PREDICTED,
    STALE_PROVISIONAL,
    STASH,
    TWO_BW,
    Ahead,
    WeightPolicy,
    predicting,
)


@pytest.mark.parametrize("delay", [1, 2, 3, 4])
def test_2bw_is_the_papers_formula(delay: int):
    """Input k (from 1) uses version max(floor((k-1)/m) - 1, 0): PipeDream-2BW, section 3.1. With a longer delay, one
    that is as much older."""
    policy = TWO_BW if delay == 1 else WeightPolicy("delayed", delay=delay)
    for m in (1, 4, 7):
        for k in range(1, 6 * m + 1):
            assert policy.version_of((k - 1) // m, newest=99) == max((k - 1) // m - delay, 0)


def test_flush_uses_the_newest_and_stash_the_stages_newest():
    """flush: batch j uses version j; stash: whatever is newest where the forward runs."""
    assert [FLUSH.version_of(batch, newest=99) for batch in range(3)] == [0, 1, 2]
    assert STASH.version_of(7, newest=4) == 4


def test_a_batch_finds_its_version_alive():
    """The first batch after a drained state uses a version that is alive there."""
    for policy in POLICIES.values():
        for first_batch in range(4):
            alive = policy.entry_versions(first_batch)
            assert policy.version_of(first_batch, newest=max(alive)) in alive


def test_how_many_versions_a_stage_holds():
    """flush keeps one version, 2bw two, stash p-s at stage s, as in the papers."""
    stages = range(4)
    assert [FLUSH.max_live_versions(stage, 4) for stage in stages] == [1, 1, 1, 1]
    assert [TWO_BW.max_live_versions(stage, 4) for stage in stages] == [2, 2, 2, 2]
    assert [STALE.max_live_versions(stage, 4) for stage in stages] == [1, 1, 1, 1]
    for policy in (STALE_PREDICTED, STALE_PROVISIONAL):
        assert [policy.max_live_versions(stage, 4) for stage in stages] == [2, 2, 2, 1]
    assert [STASH.max_live_versions(stage, 4) for stage in stages] == [4, 3, 2, 1]


def test_what_is_predicted():
    """2bw's and stale weights are; only where weights refresh is there anything ahead of a forward."""
    assert predicting(STALE) is STALE_PREDICTED and predicting(TWO_BW).predicts
    with pytest.raises(ValueError, match=r"weights stash are not predicted; use 2bw or stale"):
        predicting(STASH)
    for ahead in Ahead:
        assert WeightPolicy("mine", delay=None, refreshes=True, ahead=ahead).max_live_versions(0, 2) == 2
        with pytest.raises(ValueError, match=r"leave `ahead` out"):
            WeightPolicy("mine", delay=None, ahead=ahead)
