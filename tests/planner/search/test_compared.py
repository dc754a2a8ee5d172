"""The comparison in words and for programs: who trains so, that this project does not, and how much it means."""

import json
from dataclasses import replace

import pytest

from megatron.planner.search.notes import (
    MARGIN_OF_SPLIT,
    MARGIN_OF_WHOLE,
    TRAINED_BY,
    described,
    without_pipeline_record,
    without_pipeline_sentence,
)
from megatron.planner.search.outcome import Kept, Outcome, WithoutPipeline
from tests.planner.search.helper import a100, gpt3, run


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(gpt3(24, 2048, 16), a100(2), global_batch_size=64, num_simulated=1)


def times(found: WithoutPipeline, factor: float) -> WithoutPipeline:
    """The same, where it takes this many times as long as the other."""
    return replace(found, estimate=replace(found.estimate, seconds=factor * found.estimate.seconds))


def said(found: WithoutPipeline, *kept: Kept, has_script: bool = True, objective: str = "time") -> str:
    """Of a search that kept these, from the best on."""
    return without_pipeline_sentence(
        Outcome(kept=kept, rejected=(), objective=objective, without_pipeline=found), has_script=has_script
    )


@pytest.mark.full
def test_it_names_who_trains_so(outcome):
    found = outcome.without_pipeline
    text = without_pipeline_sentence(outcome, has_script=True)
    assert text.startswith(f"without a pipeline: {described(found.estimate.configuration)} would take ~")
    assert "and DeepSpeed can train it, this project cannot, so best.sh starts the best that it can train" in text
    for name in TRAINED_BY[found.estimate.configuration.sharding.stage]:
        assert name in text
    assert "best.sh" not in said(found)  # where nothing fits that this project trains
    untrained = without_pipeline_sentence(outcome, has_script=False)
    assert text == f"{untrained}, so best.sh starts the best that it can train" and "than the best here" in untrained


def test_a_difference_counts_beyond_the_error(outcome):
    """Less than such predictions may be off decides nothing; most are off in favour of split weights."""
    best = replace(outcome.best, choice=replace(outcome.best.choice, pipeline=2))
    alone = replace(best, choice=replace(best.choice, pipeline=1))
    as_fast = times(outcome.without_pipeline, outcome.without_pipeline.sequences_per_second
                    / outcome.best.sequences_per_second)  # fmt: skip
    near, far = (times(as_fast, 1 / (1 + MARGIN_OF_SPLIT + more)) for more in (-0.02, 0.02))
    behind, slow = (times(as_fast, 1 / (1 - MARGIN_OF_WHOLE - more)) for more in (-0.02, 0.02))
    assert "35.0% faster than the best here, which is less than the error of such predictions" in said(near, best)
    assert "39.0% faster than the best here, so no pipeline is the better answer" in said(far, best)
    assert "18.0% slower than the best here, which is less than the error of such predictions" in said(behind, best)
    assert "22.0% slower than the best here, so a pipeline is the better answer" in said(slow, best)
    assert "so split weights are the better answer" in said(far, alone)
    assert "so whole weights are the better answer" in said(slow, alone)


def test_speeds_are_compared_with_the_fastest(outcome):
    """A best that was chosen for its memory is slower, and says nothing of what a pipeline reaches."""
    fast = replace(outcome.best, choice=replace(outcome.best.choice, pipeline=2))
    small = replace(fast, estimate=replace(fast.estimate, seconds=9 * fast.estimate.seconds))
    as_fast = times(outcome.without_pipeline, outcome.without_pipeline.sequences_per_second
                    / outcome.best.sequences_per_second)  # fmt: skip
    found = times(as_fast, 2.0)
    text = said(found, small, fast, objective="memory")
    assert "50.0% slower than the fastest here, so a pipeline is the better answer" in text
    assert "50.0% slower than the best here" in said(found, fast, small)


def test_where_nothing_fits_or_nothing_was_compared():
    assert said(None) is None and without_pipeline_record(None) is None
    text = said(WithoutPipeline(missing_gib=12.34))
    assert text.startswith("without a pipeline nothing fits") and text.endswith("the nearest misses 12.3 GiB")
    assert without_pipeline_record(WithoutPipeline(missing_gib=12.34)) == {"fits": False, "missing_gib": 12.34}


def test_where_all_that_fits_is_slowed():
    """No memory is missed."""
    slowed = WithoutPipeline(is_slowed=True)
    text = said(slowed)
    assert "--avoid-pressure leaves out every configuration without a pipeline" in text and "GiB" not in text
    assert without_pipeline_record(slowed) == {"fits": False, "missing_gib": None, "verdict": "slowed"}


def test_for_programs(outcome):
    """Plain JSON, which says that it is not trained here."""
    found, estimate = without_pipeline_record(outcome.without_pipeline), outcome.without_pipeline.estimate
    assert json.loads(json.dumps(found)) == found
    assert (found["strategy"], found["trained_here"], found["fits"]) == ("fsdp", False, True)
    assert found["iteration_seconds"] == estimate.seconds and found["global_batch_size"] == 64
    assert found["trained_by"] == list(TRAINED_BY[found["zero_stage"]])
