"""A step is undone exactly: weights, moments, counters and numbers are those of before, bit for bit."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from megatron.pipeline.runtime.update.kept_state import KeptState


def everything(parameters, optimizer, other) -> dict:
    """A copy of all that a step changes."""
    state = {
        (number, name): value for number, each in enumerate(parameters) for name, value in optimizer.state[each].items()
    }
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return deepcopy({"weights": [each.data for each in parameters], "state": state, "groups": groups, "o": vars(other)})


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("gradient", [1e-3, 1e38, float("nan")])
def test_a_step_is_undone_exactly(steps_before, gradient):
    """The first one, too, which makes the moments; and one that leaves no finite weight."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    other = SimpleNamespace(num_steps=0, scale=torch.tensor([8.0]), after_step={1: 8.0}, name="kept as it is")
    kept = KeptState(parameters, [optimizer], [other, None])

    def step(size: float) -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        other.num_steps, other.scale = other.num_steps + 1, other.scale * 2
        other.after_step = {other.num_steps: float(other.scale)}

    for _ in range(steps_before):
        step(0.5)
    before = everything(parameters, optimizer, other)
    for _ in range(2):  # a copy is used again
        kept.take()
        step(gradient)
        assert not equal(before, everything(parameters, optimizer, other))
        kept.restore()
        assert equal(before, everything(parameters, optimizer, other))
    step(0.25)
    after = everything(parameters, optimizer, other)
    kept.take()
    kept.restore()
    assert equal(after, everything(parameters, optimizer, other))
