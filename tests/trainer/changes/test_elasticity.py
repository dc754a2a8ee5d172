"""What a run does with decisions that do not come about."""

from types import SimpleNamespace

import pytest

from megatron import backend

backend.install()

from megatron.trainer.changes import elasticity as room
from megatron.trainer.changes.elasticity import Elasticity
from megatron.trainer.plan.arrangement import Arrangement, arrange
from tests.trainer.arguments.command_line import arguments


@pytest.fixture
def run(monkeypatch) -> SimpleNamespace:
    """Four layers on two ranks; behind each interval one more is to be frozen, by hand."""
    args = arguments(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --freeze-training --freeze-interval 1 "
        "--freeze-schedule 1,1,1,1,1,1,1,1,2",
        world_size=2,
    )
    args.first_arrangement = Arrangement(2, 1, 1, (2, 2))
    arrange(args, args.first_arrangement)
    monkeypatch.setattr(room, "on_rank_zero", lambda function: function())
    return SimpleNamespace(args=args, iteration=1, engine=None, cache=None)


def test_a_change_that_fails_again_is_tried_less_often(run):
    """Behind the first failure at once, then with 1, 3, 7 decisions in between; what was decided is not lost."""
    elasticity, tried = Elasticity(run.args), []
    for interval in range(9):
        elasticity.decide(run)
        if elasticity.wanted != run.args.arrangement:
            tried.append(interval)
            elasticity.note_failure()
        assert elasticity.wanted == run.args.arrangement
    assert tried == [0, 1, 3, 7]


def test_one_that_comes_about_ends_that(run):
    elasticity = Elasticity(run.args)
    for _ in range(2):
        elasticity.decide(run)
        elasticity.note_failure()
    for _ in range(2):  # the first is passed over
        elasticity.decide(run)
    arrange(run.args, elasticity.wanted)
    elasticity.note_change(1.0)
    assert run.args.arrangement.num_frozen == 1
    for _ in range(5):
        elasticity.decide(run)
    assert elasticity.wanted.num_frozen == 2
