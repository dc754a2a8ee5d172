"""Where optimizers keep the number of their steps: loaded from one kind into the other."""

import copy
from types import SimpleNamespace

import pytest
import torch

from megatron import backend

backend.install()

from megatron.trainer.checkpoint.optimizer_state import convert_step_counters
from megatron.trainer.start_up.model_and_optimizer import Lamb

MOMENTS = {0: {"exp_avg": torch.zeros(2)}, 1: {"exp_avg": torch.zeros(2)}}
OF_TORCH = {"state": {**MOMENTS, "common_step": torch.tensor(7.0)}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}
OF_APEX = {"state": MOMENTS, "param_groups": [{"lr": 0.1, "step": 7}, {"lr": 0.2, "step": 7}]}
NEW = {"state": MOMENTS, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}


class FusedAdam:
    """Apex's and Transformer Engine's keep the number in their groups."""


def converted(state: dict, optimizer: object, *, wrapped: bool) -> dict:
    state = copy.deepcopy(state)
    convert_step_counters({"optimizer": state} if wrapped else state, SimpleNamespace(optimizer=optimizer))
    return state


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("saved", "number"), [(OF_TORCH, 7), (OF_APEX, 7), (NEW, 0)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Lamb, FusedAdam])
def test_the_number_is_where_the_optimizer_looks(kind, saved, number, wrapped):
    """And nowhere else, where a later save would find an old one."""
    optimizer = kind() if kind is FusedAdam else kind([torch.zeros(2)])
    found = converted(saved, optimizer, wrapped=wrapped)
    if kind is FusedAdam:
        assert "common_step" not in found["state"] and [each["step"] for each in found["param_groups"]] == [number] * 2
    else:
        assert found["state"]["common_step"] == number and not any("step" in each for each in found["param_groups"])
    assert [each["lr"] for each in found["param_groups"]] == [0.1, 0.2]


def test_others_are_left_alone():
    """SGD counts nothing; a state without moments has nothing to count."""
    assert converted(NEW, torch.optim.SGD([torch.zeros(2)], lr=1), wrapped=False)["param_groups"] == NEW["param_groups"]
    empty = {"state": {}, "param_groups": [{"lr": 0.1, "step": 3}]}
    assert converted(empty, FusedAdam(), wrapped=False) == empty
