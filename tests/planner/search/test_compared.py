"""The comparison in words and for programs: who trains so, that this project does not, and how much it means."""

import json
from dataclasses import replace

import pytest

from megatron.planner.search.compared import ERROR, TRAINED_BY, WithoutPipeline, describe, record, sentence
from megatron.planner.search.outcome import Outcome
from tests.planner.search.helper import a100, gpt3, run


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(gpt3(24, 2048, 16), a100(2), global_batch_size=64, num_simulated=1)


def times(found: WithoutPipeline, factor: float) -> WithoutPipeline:
    """The same, where it takes this many times as long as the other."""
    return replace(found, estimate=replace(found.estimate, seconds=factor * found.estimate.seconds))


def test_it_names_who_trains_so(outcome):
    found = outcome.without_pipeline
    text = sentence(found, outcome.best)
    assert text.startswith(f"without a pipeline: {describe(found.estimate.configuration)} would take ~")
    assert "and DeepSpeed train so, this project does not, and best.sh starts the best that it trains" in text
    for name in TRAINED_BY[found.estimate.configuration.sharding.stage]:
        assert name in text
    assert "best.sh" not in sentence(found, None)  # where nothing fits that this project trains


def test_a_difference_counts_beyond_the_error(outcome):
    """Less than such predictions may be off decides nothing."""
    best = replace(outcome.best, choice=replace(outcome.best.choice, pipeline=2))
    alone = replace(best, choice=replace(best.choice, pipeline=1))
    as_fast = times(outcome.without_pipeline, outcome.without_pipeline.sequences_per_second
                    / outcome.best.sequences_per_second)  # fmt: skip
    near, far, slow = (times(as_fast, factor) for factor in (1 / (1 + ERROR / 2), 1 / (1 + 2 * ERROR), 2.0))
    assert "10.0% faster than the best here, which is less than such predictions may be off" in sentence(near, best)
    assert "40.0% faster than the best here, so no pipeline is the better answer" in sentence(far, best)
    assert "50.0% slower than the best here, so a pipeline is the better answer" in sentence(slow, best)
    assert "so split weights are the better answer" in sentence(far, alone)
    assert "so whole weights are the better answer" in sentence(slow, alone)


def test_where_nothing_fits_or_nothing_was_compared():
    assert sentence(None, None) is None and record(None) is None
    text = sentence(WithoutPipeline(missing_gib=12.34), None)
    assert text.startswith("without a pipeline nothing fits") and text.endswith("the nearest misses 12.3 GiB")
    assert record(WithoutPipeline(missing_gib=12.34)) == {"fits": False, "missing_gib": 12.34}


def test_for_programs(outcome):
    """Plain JSON, which says that it is not trained here."""
    found, estimate = record(outcome.without_pipeline), outcome.without_pipeline.estimate
    assert json.loads(json.dumps(found)) == found
    assert (found["strategy"], found["trained_here"], found["fits"]) == ("fsdp", False, True)
    assert found["iteration_seconds"] == estimate.seconds and found["global_batch_size"] == 64
    assert found["trained_by"] == list(TRAINED_BY[found["zero_stage"]])
