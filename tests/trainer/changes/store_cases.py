"""What worker processes do in test_store.py: small states, faults of one rank."""

from contextlib import nullcontext
from dataclasses import asdict
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.trainer.changes import state_exchange
from megatron.trainer.changes import transfer_plan as plan
from megatron.trainer.changes.state_in_memory import MemoryStore

ROWS = 8


def _rows(key, data, first, *, of=ROWS):
    """Some rows of a tensor of `of` rows."""
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), (of, *data.shape[1:]), (first, 0), None)


def _held():
    """Rows 0 to 3 on rank 0, 4 to 7 on rank 1, and all of them on rank 2."""
    rank = dist.get_rank()
    whole = torch.arange(ROWS * 3.0).view(ROWS, 3)
    data = whole if rank == 2 else whole[4 * rank : 4 * rank + 4].clone()
    return whole, {
        "model": {"weight": _rows("weight", data, 4 * (rank % 2))},
        "part": _rows("part", torch.ones(1, 3), rank),
        "notes": ShardedObject("notes", {"of": rank}, (2,), (rank % 2,), replica_id=(0, 0, rank // 2)),
        "common": {"count": 3} if rank == 0 else {"count": 4, "only": [rank]},
        "empty": {},
    }


def loads(fault=None, failing_rank=1):
    """What a load gives, on each rank the rows behind its own, or with a fault of one rank its error; then a load of
    the same store without faults."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, state = _held()
    before = {name: value.data.clone() for name, value in state.items() if isinstance(value, ShardedTensor)}
    before |= {"weight": state["model"]["weight"].data.clone()}
    store = MemoryStore(state, piece_bytes=40)
    assert store.holds(state["notes"]) and store.holds_key("weight") and store.holds_prefix("wei")
    assert not store.holds_key("notes") and not store.holds_prefix("weights")
    assert not store.holds(ShardedObject("notes", None, (3,), (0,)))

    def request():
        target = torch.full((5, 3), torch.nan)
        return target, {
            "model": {"weight": _rows("weight", target, rank)},
            "notes": ShardedObject("notes", None, (2,), ((rank + 1) % 2,)),
            "layer._extra_state": ShardedObject("layer._extra_state", None, (1,), (0,)),
        }

    message = None
    if fault is not None:
        wanted = request()[1]
        if rank == failing_rank:
            wanted |= _FAULTS[fault](state)
        damages = fault.startswith("damage") and rank == failing_rank
        content = mock.patch.object(state_exchange, "checksum", lambda data: 7) if damages else nullcontext()
        try:
            with content, mock.patch.object(plan, "DIRECT_BYTES", 1 if fault == "damaged run" else 1000):
                store.load(wanted)
        except ValueError as error:
            message = str(error)
    target, wanted = request()
    loaded = store.load(wanted)
    assert loaded["model"]["weight"].data_ptr() == target.data_ptr() and torch.equal(target, whole[rank : rank + 5])
    assert "layer._extra_state" not in loaded
    assert torch.equal(state["model"]["weight"].data, before["weight"])
    assert torch.equal(state["part"].data, before["part"]) and ranks == 3
    return message, loaded["notes"], loaded["common"], loaded["empty"], asdict(store.moved)


_FAULTS = {
    "missing": lambda state: {"more": _rows("bias", torch.zeros(1, 3), 0)},
    "no object": lambda state: {"more": ShardedObject("diary", None, (1,), (0,))},
    "part": lambda state: {"more": _rows("part", torch.zeros(5, 3), 0)},
    "shape": lambda state: {"more": _rows("weight", torch.zeros(1, 3), 0, of=9)},
    "dtype": lambda state: {"more": _rows("weight", torch.zeros(1, 3, dtype=torch.bfloat16), 0)},
    "overlap": lambda state: {"more": _rows("weight", state["model"]["weight"].data[:1], 0)},
    "damaged run": lambda state: {},
    "damage": lambda state: {},
}
