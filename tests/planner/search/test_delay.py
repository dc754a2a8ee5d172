"""What a search says of delayed weights."""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.planner import Configuration
from megatron.planner.search import Training
from megatron.planner.search.notes import delay_clause, delay_sentence, known_share, sentences_on_weights
from tests.planner import made_up
from tests.planner.search.test_search import SMALL, cluster, run

SPACE = {"global_batch_size": 32, "tensor": (1,), "pipeline": (4,), "num_simulated": 1}
MACHINES = cluster(16.0, nodes=1, gpus=8)


def configuration(**choices) -> Configuration:
    return Configuration(schedule="2bw", **{"pipeline": 4, "micro_batch_size": 1, "global_batch_size": 8, **choices})


@pytest.mark.parametrize(
    ("choices", "share"),
    [
        ({}, Fraction(5, 8)),  # the first stage has three backwards to do
        ({"global_batch_size": 4}, Fraction(1, 4)),
        ({"pipeline": 1}, Fraction(1)),
        ({"data": 2}, Fraction(1, 8)),
        ({"data": 2, "provisional_reduce": True}, Fraction(1, 4)),
        ({"provisional": "uniform", "provisional_microbatches": 2}, Fraction(2, 8)),
    ],
    ids=str,
)
def test_the_share_is_what_the_first_stage_knows(choices, share):
    predicted = configuration(**{"provisional": "stage", **choices})
    assert known_share(predicted) == share
    assert delay_clause(predicted) == f"predicts from {share} of a batch"


def test_plain_2bw_predicts_from_nothing():
    assert delay_clause(configuration()) is None


def test_sentences_are_of_what_was_kept():
    """One of what the delay costs where there is one; for predictions another, and in each row the share."""
    assert sentences_on_weights(run(SMALL, MACHINES, schedules=("flush", "gpipe", "interleaved"), **SPACE).kept) == ()
    found = run(SMALL, MACHINES, schedules=("flush", "2bw"), **SPACE)
    (delayed,) = sentences_on_weights(found.kept)
    assert delayed == delay_sentence(found.kept) and delayed.startswith(
        "with 2bw, gradients are computed at weights from before"
    )
    assert "18% higher validation loss (docs/convergence.md)" in delayed and "--2bw-provisional stage" in delayed
    assert delay_sentence([each for each in found.kept if each.choice.schedule == "flush"]) is None
    predicted = run(SMALL, MACHINES, schedules=("flush", "2bw"), predictions={"provisional": "stage"}, **SPACE)
    (noted,) = sentences_on_weights(predicted.kept)
    assert "from a part of the batch before" in noted and delay_sentence(predicted.kept) is None
    shares = {(each.choice.schedule, any("predicts from" in note for note in each.notes)) for each in predicted.kept}
    assert shares == {("flush", False), ("2bw", True)}


def test_any_schedule_with_delayed_weights_is_named():
    """PipeDream's and one of two batches, by their policies; predictions are for 2bw's alone."""
    untied, training = replace(SMALL, tied_embeddings=False), Training(clips_gradients=False)
    space = SPACE | {"global_batch_size": 8, "training": training}
    (alone,) = sentences_on_weights(run(untied, MACHINES, schedules=("flush", "pipedream"), **space).kept)
    assert alone.startswith("with pipedream, gradients are computed") and "docs/convergence.md" in alone
    assert "2bw-provisional" not in alone
    with made_up.registered():
        found = run(SMALL, MACHINES, schedules=("flush", "2bw", "triple"), **SPACE).kept
        (several,) = sentences_on_weights(found)
        assert several.startswith(("with 2bw and triple, gradients", "with triple and 2bw, gradients"))
        assert "2bw-provisional" in several
        assert "2bw-provisional" not in delay_sentence([each for each in found if each.choice.schedule == "triple"])


def test_the_number_is_that_of_the_page():
    """docs/convergence.md has it, for a learning rate that flush bears."""
    found = run(SMALL, MACHINES, schedules=("2bw",), **SPACE)
    (number,) = re.findall(r"\d+% higher", delay_sentence(found.kept))
    page = (Path(__file__).parents[3] / "docs" / "convergence.md").read_text()
    assert f"| +{number.removesuffix(' higher')} |" in page
