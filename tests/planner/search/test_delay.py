"""What a search says of 2bw's weights."""

from fractions import Fraction

import pytest

from megatron.planner import Configuration
from megatron.planner.search.delay import clause, known_share, sentences
from tests.planner.search.test_search import SMALL, cluster, run


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
    assert clause(predicted) == f"predicts from {share} of a batch"


def test_plain_2bw_predicts_from_nothing():
    assert clause(configuration()) is None


def test_sentences_are_of_what_was_kept():
    """A note for each kind of weights that was kept, and for predictions the share in each row."""
    space = {"global_batch_size": 32, "tensor": (1,), "pipeline": (4,), "num_simulated": 1}
    machines = cluster(16.0, nodes=1, gpus=8)
    assert sentences(run(SMALL, machines, schedules=("flush",), **space).kept) == ()
    (delayed,) = sentences(run(SMALL, machines, schedules=("flush", "2bw"), **space).kept)
    assert "one batch old" in delayed and "--2bw-provisional stage" in delayed
    predicted = run(SMALL, machines, schedules=("flush", "2bw"), provisional="stage", **space)
    (noted,) = sentences(predicted.kept)
    assert "prediction from the part" in noted
    shares = {(each.choice.schedule, any("predicts from" in note for note in each.notes)) for each in predicted.kept}
    assert shares == {("flush", False), ("2bw", True)}
