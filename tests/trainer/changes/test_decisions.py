"""What a run does with decisions that do not come about."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron import backend

backend.install()

from megatron.elastic.stages import Arrangement
from megatron.trainer.changes import decisions as room
from megatron.trainer.changes.decisions import ChangeDecisions
from megatron.trainer.plan.arrangement import arranged
from tests.trainer.arguments.command_line import arguments


@pytest.fixture
def run(monkeypatch) -> SimpleNamespace:
    """Four layers on two ranks; behind each interval one more is to be frozen, by hand."""
    args = arguments(
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --freeze-training --freeze-interval 1 "
        "--freeze-schedule 1,1,1,1,1,1,1,1,2",
        world_size=2,
    )
    first = Arrangement(2, 1, 1, (2, 2))
    args = arranged(replace(args, first_arrangement=first), first)
    monkeypatch.setattr(room, "on_rank_zero", lambda function: function())
    return SimpleNamespace(args=args, iteration=1, engine=None, cache=None)


def go_on(run: SimpleNamespace, decisions: ChangeDecisions) -> None:
    """Let the run go on as was decided."""
    run.args = arranged(run.args, decisions.wanted)
    decisions.go_on_with(run.args)


def test_a_change_that_fails_again_is_tried_less_often(run):
    """Behind the first failure at once, then with 1, 3, 7 decisions in between; what was decided is not lost."""
    decisions, tried = ChangeDecisions(run.args), []
    for interval in range(9):
        decisions.decide(run)
        if decisions.wanted != run.args.arrangement:
            tried.append(interval)
            decisions.note_failure()
        assert decisions.wanted == run.args.arrangement
    assert tried == [0, 1, 3, 7]


def test_one_that_comes_about_ends_that(run):
    decisions = ChangeDecisions(run.args)
    for _ in range(2):
        decisions.decide(run)
        decisions.note_failure()
    for _ in range(2):  # the first is passed over
        decisions.decide(run)
    go_on(run, decisions)
    decisions.note_change(1.0)
    assert run.args.arrangement.num_frozen == 1
    for _ in range(5):
        decisions.decide(run)
    assert decisions.wanted.num_frozen == 2


def watching(run: SimpleNamespace, tolerance: float | None) -> ChangeDecisions:
    """One with a layer frozen, behind an evaluation without."""
    run.args = replace(run.args, freeze_watch_validation=tolerance)
    decisions = ChangeDecisions(run.args)
    assert decisions.note_validation({"lm loss": 2.0}, iteration=1) is None
    decisions.decide(run)
    go_on(run, decisions)
    return decisions


def test_validation_that_falls_has_all_layers_train_again(run):
    """From then on no interval freezes any; and where that fails, the next one asks for it again."""
    decisions = watching(run, 0.1)
    assert decisions.note_validation({"lm loss": 2.1}, iteration=2) is None and not decisions.is_to_thaw
    warning = decisions.note_validation({"lm loss": 2.3}, iteration=3)
    assert warning.endswith("was 2.0000 at iteration 1 with no layer frozen: freezing ends, and all layers train again")
    assert decisions.is_to_thaw
    decisions.thaw(run)
    assert decisions.wanted.num_frozen == 0 and not decisions.is_to_thaw
    decisions.note_failure()
    assert decisions.wanted == run.args.arrangement
    decisions.decide(run)
    assert decisions.wanted.num_frozen == 0
    go_on(run, decisions)
    for _ in range(9):
        decisions.decide(run)
        assert decisions.wanted.num_frozen == 0
    assert decisions.cost_of_freezing().startswith("freezing: the validation lm loss is 2.3000 at iteration 3 with 1 ")


@pytest.mark.parametrize("same", [True, False])
def test_a_checkpoint_saved_before_layers_train_again(run, same):
    """It says how the run is arranged, which has no optimizer state of what is frozen yet, and what is to come; in
    another arrangement, that all layers train."""
    decisions = watching(run, 0.1)
    decisions.note_validation({"lm loss": 2.3}, iteration=3)
    decisions.thaw(run)
    state = decisions.state_dict()
    assert (state["wanted"]["num_frozen"], state["thawed"]["num_frozen"]) == (1, 0)
    if not same:
        run.args = arranged(run.args, Arrangement(2, 1, 1, (3, 1), num_frozen=1))
    resumed = ChangeDecisions(run.args)
    resumed.load_state_dict(state)
    assert resumed.wanted == Arrangement(2, 1, 1, (2, 2) if same else (3, 1))
    assert not resumed.is_to_thaw
    resumed.decide(run)
    assert resumed.wanted.num_frozen == 0


def test_without_a_tolerance_a_fall_is_told(run):
    """With the flag that ends freezing; at the end, too, also where nothing was evaluated."""
    decisions = watching(run, None)
    warning = decisions.note_validation({"lm loss": 2.3}, iteration=3)
    assert warning.endswith("--freeze-watch-validation TOLERANCE has all layers train again")
    assert not decisions.is_to_thaw
    assert decisions.cost_of_freezing().endswith("--freeze-watch-validation TOLERANCE ends freezing at a fall")
    blind = ChangeDecisions(run.args)
    assert "1 of 4 layers are frozen, and no evaluation has shown what that costs" in blind.cost_of_freezing()
