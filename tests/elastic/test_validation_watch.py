"""When evaluations end freezing, and what they say of its cost."""

import json
import math

import pytest

from megatron.elastic.freezing import Validation, ValidationWatch


def seen(watch: ValidationWatch, values: list[tuple[float, int]], *, is_accuracy: bool = True) -> list[tuple]:
    """(whether freezing is to end, whether a warning came) behind each evaluation (value, frozen layers)."""
    name = "accuracy" if is_accuracy else "lm loss"
    found = []
    for number, (value, frozen) in enumerate(values, start=1):
        warning = watch.note(Validation(name, value, is_accuracy, 10 * number, frozen))
        found.append((watch.has_fallen, warning is not None))
    return found


NO, TOLD, ENDS = (False, False), (False, True), (True, True)


@pytest.mark.parametrize(
    ("tolerance", "values", "expected"),
    [
        (0.02, [(0.5, 0), (0.4, 0), (0.49, 3), (0.47, 3)], [NO, NO, NO, ENDS]),
        (0.0, [(0.5, 0), (0.5, 3), (0.6, 3), (0.59, 5)], [NO, NO, NO, ENDS]),
        (-0.05, [(0.5, 0), (0.6, 3), (0.64, 3)], [NO, NO, ENDS]),
        (0.02, [(0.5, 3), (0.6, 3)], [NO, NO]),
        (0.02, [(0.5, 0), (math.nan, 3)], [NO, ENDS]),
        (None, [(0.5, 0), (0.48, 3), (0.47, 3), (0.55, 3), (0.545, 3), (0.5, 5)], [NO, TOLD, NO, NO, NO, TOLD]),
    ],
)
def test_an_accuracy_that_falls_with_frozen_layers(tolerance, values, expected):
    """Below the best before it by more than the tolerance, or not above it by as much; without frozen layers, or an
    evaluation to compare with, nothing ends. Without a tolerance a fall is told, once for each best."""
    assert seen(ValidationWatch(tolerance), values) == expected


def test_a_loss_that_rises():
    """By a share of the best."""
    assert seen(ValidationWatch(0.1), [(2.0, 0), (2.19, 1), (2.21, 1)], is_accuracy=False) == [NO, NO, ENDS]
    watch = ValidationWatch(-0.5)
    watch.note(Validation("lm loss", 2.0, False, 10, 0))
    assert watch.note(Validation("lm loss", 1.5, False, 20, 1)) == (
        "the validation lm loss is 1.5000 at iteration 20 with 1 layer frozen, and should be better by 50% than 2.0000 "
        "at iteration 10 with no layer frozen"
    )


def test_what_is_said_and_kept():
    """The warning has both evaluations, the summary the last before layers froze, too; a watch that goes on from a
    checkpoint compares with the same best."""
    watch = ValidationWatch(None)
    watch.note(Validation("accuracy", 0.6, True, 76, 0))
    watch.note(Validation("accuracy", 0.7, True, 114, 3))
    again = ValidationWatch(0.05)
    again.load_state_dict(watch.state_dict())
    last = Validation("accuracy", 0.64, True, 133, 5)
    sentence = (
        "the validation accuracy is 0.6400 at iteration 133 with 5 layers frozen, and was 0.7000 at iteration 114 with "
        "3 layers frozen"
    )
    assert watch.note(last) == again.note(last) == sentence
    assert again.has_fallen and not watch.has_fallen
    asking = ValidationWatch(-0.2)
    asking.load_state_dict(watch.state_dict())
    assert "and should be better by 0.2 than 0.7000 at iteration 114" in asking.note(last)
    assert again.summary() == (
        "the validation accuracy is 0.6400 at iteration 133 with 5 layers frozen; at best 0.7000 at iteration 114 with "
        "3 layers frozen; before layers froze 0.6000 at iteration 76 with no layer frozen"
    )
    assert ValidationWatch(None).summary() is None


def test_a_watch_that_goes_on_does_not_repeat_itself():
    """A fall that was told before the checkpoint is not told again, one from a better evaluation is. A checkpoint from
    before this was kept is read, and tells it once more."""
    watch, values = ValidationWatch(None), [(0.5, 0), (0.48, 3)]
    assert seen(watch, values) == [NO, TOLD]
    state = json.loads(json.dumps(watch.state_dict()))
    again, older = ValidationWatch(None), ValidationWatch(None)
    again.load_state_dict(state)
    assert seen(again, [(0.47, 3), (0.55, 3), (0.5, 5)]) == [NO, NO, TOLD]
    older.load_state_dict({name: each for name, each in state.items() if name != "told"})
    assert seen(older, [(0.47, 3), (0.46, 3)]) == [TOLD, NO]
