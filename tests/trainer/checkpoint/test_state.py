"""A tensor that a rank holds twice is written once and read into two."""

import torch

from megatron import backend

backend.install()

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.trainer.checkpoint.state import with_copies, without_copies


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
