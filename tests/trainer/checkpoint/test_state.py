"""A tensor that a rank holds twice is written once and read into two; step counters go into any optimizer."""

import copy
from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.trainer.checkpoint.optimizer_state import convert_step_counters
from megatron.trainer.checkpoint.state import with_copies, without_copies
from megatron.trainer.start_up.optimizer import Lamb


def sharded(key: str, *, replica_id: tuple[int, ...], offset: int = 0) -> ShardedTensor:
    data = torch.zeros(2)
    return ShardedTensor(key, data, data.dtype, (2,), (4,), (offset,), (2,), replica_id)


def test_each_part_is_handed_over_once():
    """That of the lowest replica, wherever it stands; other parts and other objects stay."""
    copy, own = sharded("embedding", replica_id=(1, 0, 0)), sharded("embedding", replica_id=(0, 0, 0))
    rest, layer = sharded("embedding", replica_id=(0, 0, 0), offset=2), sharded("layer", replica_id=(0, 0, 1))
    state = {"model0": {"output": copy, "layer": layer}, "model1": {"words": own, "rest": rest}, "iteration": 3}
    once = without_copies(state)
    assert once["model0"].keys() == {"layer"} and once["model0"]["layer"] is layer
    assert once["model1"]["words"] is own and once["model1"]["rest"] is rest and once["iteration"] == 3
    assert state["model0"]["output"] is copy


def test_what_is_read_is_not_shared():
    """Tensors that stand twice become two of the same values; all others stay where they are."""
    one, other = torch.arange(3.0), torch.ones(2)
    state = with_copies({"first": one, "list": [one, {"other": other}], "number": 3})
    assert state["first"] is one and state["list"][1]["other"] is other and state["number"] == 3
    assert torch.equal(state["list"][0], one) and state["list"][0].data_ptr() != one.data_ptr()


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
