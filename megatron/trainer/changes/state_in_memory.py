"""Moves a run's state between ranks without a file, through the code that saves and loads checkpoints.

    state = hold_run(parts, iteration=...)              # under the old degrees: what each rank has, no copies
    ...                                                 # new groups, chunks, optimizer, update
    moved = hand_over(state, new_parts, iteration=...)  # under the new degrees: they have the old state

The old state is never written to, so a run that still holds it can continue with it where this fails. Memory beyond
the old and the new state: two pieces of a message on each rank, for what is small or scattered (at most 64 MiB each),
and older versions of the weights once more, until they are restored.

The state goes through the job's control group, on the host, from the calling thread. A checkpoint that is being written
in the background uses that group, too, and must be finished before.
"""

import pickle
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from megatron.pipeline.runtime.failure.agreement import agree, agreed, control_group
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.changes.exchange import Exchange, Piece, dtype_name, pieces_of, share_memory
from megatron.trainer.changes.transfer_plan import Box, Shape, TensorPart, plan_moves
from megatron.trainer.checkpoint.loader import is_extra_state
from megatron.trainer.checkpoint.optimizer_state import ELEMENT_RANGES, ElementRange, stays
from megatron.trainer.checkpoint.run_state import Restoration, RunParts, run_state
from megatron.trainer.checkpoint.state import memory_metadata, optimizer_state, own_random_state

PIECE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Moved:
    """What handing over took on this rank. Bytes that stayed on the rank are not sent."""

    bytes_sent: int
    bytes_received: int
    bytes_kept: int
    seconds: float

    @property
    def num_bytes(self) -> int:
        """The bytes of all state of this rank."""
        return self.bytes_received + self.bytes_kept


@dataclass(frozen=True)
class _HeldState:
    """One rank's announcement of the state that it has."""

    parts: list[TensorPart]
    kinds: dict[str, tuple[Shape, str]]  # key of a tensor -> whole shape and dtype
    objects: dict[str, tuple[tuple[int, ...], int]]  # key -> whose replica it is, and bytes
    common: dict


def hold_run(parts: RunParts, *, iteration: int) -> ShardedStateDict:
    """The state that this rank has of a run, drained after `iteration` batches, under the current degrees. Needs no
    other rank.

    The tensors are the run's own, so nothing may change them until they are handed over.
    """
    state = run_state(
        parts, memory_metadata(), iteration=iteration, random_state=own_random_state(), with_optimizer=False
    )
    model = {entry: value for entry, value in state.items() if entry.startswith("model")}
    metadata = {"distrib_optim_sharding_type": ELEMENT_RANGES}  # what ranks have in common, the store finds
    state["optimizer"] = optimizer_state(parts.optimizer, model, metadata, is_loading=False)
    state["opt_param_scheduler"] = parts.scheduler.state_dict()
    return state


def hand_over(
    state: ShardedStateDict, parts: RunParts, *, iteration: int, piece_bytes: int = PIECE_BYTES, anew: bool = False
) -> Moved:
    """Put `parts`, built under other degrees, into what the ranks hold as `state` (see `hold_run`). Collective.

    `anew`: layers that nobody has trained lately are trained again, so the optimizer begins anew (see `anew`).

    Raises:
        CheckpointError: on every rank: something is missing, or was damaged on its way. What is held is as it was.
    """
    start = time.perf_counter()
    store = MemoryStore(state, piece_bytes=piece_bytes, anew=anew)
    with agreed():
        restoration = Restoration(
            store, parts, memory_metadata(), iteration=iteration, random_state=own_random_state(), anew=anew
        )
    loaded = store.load(restoration.request)
    with agreed():
        restoration.complete(loaded)
    return replace(store.moved, seconds=time.perf_counter() - start)


class MemoryStore:
    """What the ranks of the job hold, as a checkpoint would. Making one is collective.

    Args:
        state: this rank's, as for a checkpoint; kept by reference for as long as the store.
        piece_bytes: the longest piece in which something is sent; the same on all ranks.
        anew: what an optimizer that begins anew does not ask for stays as it is.
    """

    def __init__(self, state: ShardedStateDict, *, piece_bytes: int = PIECE_BYTES, anew: bool = False) -> None:
        self._piece_bytes, self._anew = piece_bytes, anew
        self.moved = Moved(0, 0, 0, 0.0)
        with agreed():
            state = _with_own_containers(state)
            apply_factories(state)
            _, kept = extract_nonpersistent(state)
            sharded, common = extract_sharded_base(kept)
            self._pieces = pieces_of(_tensors(sharded))
            objects = _objects(sharded)
            pickled = {key: pickle.dumps(each.data) for key, each in objects.items()}
        own = _HeldState(
            [piece.part() for piece in self._pieces],
            {piece.key: (piece.global_shape, dtype_name(piece.data)) for piece in self._pieces},
            {key: (_replica(each), len(pickled[key])) for key, each in objects.items()},
            common,
        )
        self._pieces += [_piece_of_object(key, dist.get_rank(), _bytes(pickled[key])) for key in objects]
        self._held = _gathered(own)
        self._kinds = {key: kind for each in self._held for key, kind in each.kinds.items()}
        self.common: dict = {}
        for each in self._held:
            _complete(self.common, each.common)

    def holds(self, sharded: ShardedObject | ShardedTensor) -> bool:
        """True if some rank has this tensor, or this very shard of an object."""
        if isinstance(sharded, ShardedObject):
            return any(sharded.unique_key in each.objects for each in self._held)
        return self.holds_key(sharded.key)

    def holds_key(self, key: str) -> bool:
        """True if some rank has a tensor of this key."""
        return key in self._kinds

    def holds_prefix(self, prefix: str) -> bool:
        """True if any of the tensors' keys starts so."""
        return any(key.startswith(prefix) for key in self._kinds)

    def load(self, state: ShardedStateDict) -> dict:
        """What `state` asks for, in the tensors that it gives, and the common entries. Collective.

        Raises CheckpointError on every rank: nobody holds a tensor, or only a part of it, or with another shape or
        dtype, or a message was damaged. What is held is as it was; what was asked for may be filled in part.
        """
        start = time.perf_counter()
        state, _ = extract_matching_values(state, lambda value: not is_extra_state(value) or self.holds(value))
        with agreed():
            sharded, local, factories = load_preprocess(dict_list_map_inplace(_filled_in_place, state))
            sharded, _ = extract_sharded_base(sharded)
            pieces = pieces_of(_tensors(sharded))
            if self._anew:
                pieces = [piece for piece in pieces if not stays(piece.key, self.holds_key)]
            objects = _objects(sharded)
            self._require(pieces, objects)
        received = self._fetch(pieces, objects, start)
        result = _joined(pickle.loads(pickle.dumps(self.common)), local)
        result = _joined(result, dict_list_map_inplace(lambda value: _content(value, received), sharded))
        return apply_factory_merges(result, factories)

    def _require(self, pieces: list[Piece], objects: dict[str, ShardedObject]) -> None:
        """Raise CheckpointError for a tensor that no rank holds as wanted."""
        missing = {piece.key for piece in pieces if piece.key not in self._kinds}
        missing |= {each.key for each in objects.values() if not self.holds(each)}
        if missing:
            raise CheckpointError(f"no rank holds {min(missing)!r}, which is needed under the new degrees")
        for piece in pieces:
            kind = (piece.global_shape, dtype_name(piece.data))
            if kind != self._kinds[piece.key]:
                (shape, dtype), (held_shape, held_dtype) = kind, self._kinds[piece.key]
                raise CheckpointError(
                    f"{piece.key!r} has shape {held_shape} and dtype {held_dtype} where it is held, and {shape} and "
                    f"{dtype} under the new degrees"
                )
        assert not share_memory([each.data for each in self._pieces], [each.data for each in pieces]), (
            "what is asked for lies where something is held"
        )

    def _fetch(self, pieces: list[Piece], objects: dict[str, ShardedObject], start: float) -> dict[str, Tensor]:
        """Fill the pieces; returns the objects, pickled, by their unique keys. Collective."""
        rank = dist.get_rank()
        wanted = _gathered(([piece.part() for piece in pieces], sorted(objects)))
        parts = [
            [*parts, *(self._part_of_object(key, target) for key in keys)]
            for target, (parts, keys) in enumerate(wanted)
        ]
        held = [
            [*each.parts, *(_part(key, number, size) for key, (_, size) in each.objects.items())]
            for number, each in enumerate(self._held)
        ]
        plan = plan_moves(held, parts)
        if plan.missing:  # known to all ranks alike
            target, number = plan.missing[0]
            raise CheckpointError(
                f"ranks hold only parts of {parts[target][number].key!r}, and rank {target} needs more of it under "
                "the new degrees"
            )
        received = {key: torch.empty(part.box.size, dtype=torch.uint8)
                    for key, part in zip(sorted(objects), parts[rank][len(pieces):], strict=True)}  # fmt: skip
        targets = pieces + [
            Piece(part.key, part.box, received[key], part.box.stop)
            for key, part in zip(sorted(objects), parts[rank][len(pieces) :], strict=True)
        ]
        exchange = Exchange(self._pieces, targets, group=control_group(), piece_bytes=self._piece_bytes)
        exchange.run(plan.moves)
        agree("; ".join(exchange.problems) or None)
        self.moved = Moved(
            exchange.bytes_sent, exchange.bytes_received, exchange.bytes_kept, time.perf_counter() - start
        )
        return received

    def _part_of_object(self, key: str, target: int) -> TensorPart:
        """The part of the rank from which `target` takes an object: itself, or the first replica."""
        holders = [(number != target, *each.objects[key], number) for number, each in enumerate(self._held)
                   if key in each.objects]  # fmt: skip
        *_, size, holder = min(holders)
        return _part(key, holder, size)


def _gathered(own: object) -> list:
    """The values of every rank, in rank order. Collective."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=control_group())
    return found


def _tensors(sharded: ShardedStateDict) -> list[ShardedTensor | ElementRange]:
    return [value for value in nested_values(sharded) if not isinstance(value, ShardedObject)]


def _objects(sharded: ShardedStateDict) -> dict[str, ShardedObject]:
    return {value.unique_key: value for value in nested_values(sharded) if isinstance(value, ShardedObject)}


def _replica(sharded: ShardedObject) -> tuple[int, ...]:
    return sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id,)


def _part(key: str, holder: int, num_bytes: int) -> TensorPart:
    """A pickled object of one rank; replicas need not be equal to the byte."""
    return TensorPart(f"{key} of rank {holder}", Box((0,), (num_bytes,)), 1)


def _piece_of_object(key: str, holder: int, data: Tensor) -> Piece:
    part = _part(key, holder, len(data))
    return Piece(part.key, part.box, data, part.box.stop)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _content(value: ShardedBase, received: dict[str, Tensor]) -> object:
    if isinstance(value, ShardedObject):
        return pickle.loads(received[value.unique_key].numpy().tobytes())
    return value.data.detach()


def _with_own_containers(value: object) -> object:
    """A copy of nested dicts and lists, empty ones included, with the same values."""
    if isinstance(value, dict):
        return {key: _with_own_containers(each) for key, each in value.items()}
    return [_with_own_containers(each) for each in value] if isinstance(value, list) else value


def _joined(state: object, more: object) -> object:
    """Nested dicts and lists with what both have. A rank without parameters has said empty lists of tensors."""
    if isinstance(state, dict) and isinstance(more, dict):
        return state | {key: _joined(state[key], value) if key in state else value for key, value in more.items()}
    if isinstance(state, list) and isinstance(more, (list, dict)):
        if not state:
            return more
        places = enumerate(more) if isinstance(more, list) else more.items()
        for place, value in places:
            state[place] = _joined(state[place], value)
        return state
    raise AssertionError(f"{state} and {more} in the same place")


def _filled_in_place(value: object) -> object:
    """A factory whose parts are views of its tensor need not put them together again."""
    if not isinstance(value, ShardedTensorFactory):
        return value
    whole = value.data.detach()
    places = {part.data.untyped_storage().data_ptr() for part in nested_values(value.build())}
    return replace(value, merge_fn=lambda _: whole) if places == {whole.untyped_storage().data_ptr()} else value


def _complete(state: dict, other: dict) -> None:
    """Add to `state` what `other` has beyond it: a rank without parameters knows no count of steps."""
    for key, value in other.items():
        if key not in state:
            state[key] = value
        elif isinstance(value, dict) and isinstance(state[key], dict):
            _complete(state[key], value)
        elif isinstance(value, list) and isinstance(state[key], list):
            for mine, more in zip(state[key], value, strict=False):
                if isinstance(mine, dict) and isinstance(more, dict):
                    _complete(mine, more)
