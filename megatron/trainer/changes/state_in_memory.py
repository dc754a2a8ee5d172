"""The move of a run's state between ranks without a file, through the code that saves and loads checkpoints.

    state = hold_run(parts, iteration=...)              # under the old degrees: each rank's state, without copies
    ...                                                 # new groups, chunks, optimizer, update
    moved = hand_over(state, new_parts, iteration=...)  # under the new degrees: the new parts have the old state

        hand_to_new(parts, iteration=..., is_new=...)       # the new ranks have the state of the others
        hand_between(before, after, iteration=...)          # the parts `after` have the state of the parts `before`

The old state is never written to, so if the move fails, a run that still holds it can continue with it. In addition to
the old and the new state, each rank needs memory for two messages with small or scattered parts (at most 64 MiB each),
and for a second copy of older weight versions until they are restored.

The state goes through the job's control group, on the host, from the calling thread. A checkpoint that is written in
the background also uses this group and must be finished first.
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
from megatron.pipeline.runtime.failure.agreement import agree, agreed, control_group, gathered
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.changes.state_exchange import Piece, StateExchange, dtype_name, pieces_of, share_memory
from megatron.trainer.changes.transfer_plan import TensorPart, plan_moves
from megatron.trainer.checkpoint.boxes import Box, Shape
from megatron.trainer.checkpoint.checkpoint import Restoration, RunParts, run_state
from megatron.trainer.checkpoint.loader import is_extra_state
from megatron.trainer.checkpoint.optimizer_state import ELEMENT_RANGES, ElementRange, stays
from megatron.trainer.checkpoint.state import memory_metadata, optimizer_state, own_random_state

PIECE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Moved:
    """The bytes and the seconds of a move of state on this rank. `bytes_kept`: bytes that stayed on the rank."""

    bytes_sent: int
    bytes_received: int
    bytes_kept: int
    seconds: float

    @property
    def num_bytes(self) -> int:
        """The bytes of the rank's whole new state."""
        return self.bytes_received + self.bytes_kept


@dataclass(frozen=True)
class _HeldState:
    """A description of one rank's state, which is sent to all ranks."""

    parts: list[TensorPart]
    kinds: dict[str, tuple[Shape, str]]  # key of a tensor -> whole shape and dtype
    objects: dict[str, tuple[tuple[int, ...], int]]  # key -> replica id, and bytes
    common: dict


def hold_run(parts: RunParts, *, iteration: int) -> ShardedStateDict:
    """This rank's state of a run that is drained after `iteration` batches, under the current degrees. Not collective.

    The tensors are the run's own, so they must not change until they are handed over.
    """
    state = run_state(
        parts, memory_metadata(), iteration=iteration, random_state=own_random_state(), with_optimizer=False
    )
    model = {entry: value for entry, value in state.items() if entry.startswith("model")}
    metadata = {"distrib_optim_sharding_type": ELEMENT_RANGES}  # without the common state, which the store collects
    state["optimizer"] = optimizer_state(parts.optimizer, model, metadata, is_loading=False)
    state["opt_param_scheduler"] = parts.scheduler.state_dict()
    return state


def hand_over(
    state: ShardedStateDict, parts: RunParts, *, iteration: int, piece_bytes: int = PIECE_BYTES, anew: bool = False
) -> Moved:
    """Load the state that all ranks hold (see `hold_run`) into `parts`, which were built under other degrees.

    Collective: every rank must call it. `anew`: frozen layers train again, so the optimizer's state is reset (see
    `optimizer_state.Anew`).

    Raises:
        CheckpointError: on every rank, if a part is missing or was damaged in transfer. The held state is unchanged.
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


def hand_to_new(parts: RunParts, *, iteration: int, is_new: bool, piece_bytes: int = PIECE_BYTES) -> Moved:
    """Load the state of the ranks that have one into the parts of the new ranks, as `hand_between` does."""
    held, wanting = (None, parts) if is_new else (parts, None)
    return hand_between(held, wanting, iteration=iteration, piece_bytes=piece_bytes)


def hand_between(
    before: RunParts | None, after: RunParts | None, *, iteration: int, piece_bytes: int = PIECE_BYTES
) -> Moved:
    """Load the state of all ranks' `before` into their `after`. Random generators are not changed.

    Collective: every rank must call it. Raises CheckpointError on every rank as `hand_over` does.

    Args:
        before: this rank's parts of a run that is drained after `iteration` batches; None: it has none.
        after: the newly built parts of this rank; None: it has none.
    """
    start = time.perf_counter()
    store = MemoryStore({} if before is None else hold_run(before, iteration=iteration), piece_bytes=piece_bytes)
    with agreed():
        restoration = None
        if after is not None:
            restoration = Restoration(store, after, memory_metadata(), iteration=iteration, random_state=None)
    loaded = store.load({} if restoration is None else restoration.request)
    with agreed():
        if restoration is not None:
            restoration.complete(loaded)
    return replace(store.moved, seconds=time.perf_counter() - start)


class MemoryStore:
    """The state of all ranks of the job as a `StateStore`, like a checkpoint.

    Collective: every rank must call the constructor.

    Args:
        state: this rank's state, as for a checkpoint; the store keeps references to its tensors.
        piece_bytes: largest number of bytes in a message; the same on all ranks.
        anew: do not load the tensors that a reset of the optimizer's state does not take from the store.
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
        self._held = gathered(own, control_group())
        self._kinds = {key: kind for each in self._held for key, kind in each.kinds.items()}
        self.common: dict = {}
        for each in self._held:
            _complete(self.common, each.common)

    def holds(self, sharded: ShardedObject | ShardedTensor) -> bool:
        """Whether a rank has the key of a tensor, or the shard of an object."""
        if isinstance(sharded, ShardedObject):
            return any(sharded.unique_key in each.objects for each in self._held)
        return self.holds_key(sharded.key)

    def holds_key(self, key: str) -> bool:
        """Whether a rank has a tensor with the key `key`."""
        return key in self._kinds

    def holds_prefix(self, prefix: str) -> bool:
        """Whether the key of any tensor starts with `prefix`."""
        return any(key.startswith(prefix) for key in self._kinds)

    def load(self, state: ShardedStateDict) -> dict:
        """Load the entries that `state` requests, into its tensors, and the common entries.

        Collective: every rank must call it. Raises CheckpointError on every rank if the ranks do not hold a requested
        tensor completely, with the same shape and dtype, or if a message was damaged. The held state is unchanged; the
        requested tensors may be partly filled.
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
        """Raise CheckpointError for a tensor or object that no rank holds, or a tensor with another shape or dtype."""
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
        """Fill the pieces. Returns the pickled objects by their unique keys.

        Collective: every rank must call it.
        """
        rank = dist.get_rank()
        wanted = gathered(([piece.part() for piece in pieces], sorted(objects)), control_group())
        parts = [
            [*parts, *(self._part_of_object(key, target) for key in keys)]
            for target, (parts, keys) in enumerate(wanted)
        ]
        held = [
            [*each.parts, *(_part(key, number, size) for key, (_, size) in each.objects.items())]
            for number, each in enumerate(self._held)
        ]
        plan = plan_moves(held, parts)
        if plan.missing:  # the same on all ranks
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
        exchange = StateExchange(self._pieces, targets, group=control_group(), piece_bytes=self._piece_bytes)
        exchange.run(plan.moves)
        agree("; ".join(exchange.problems) or None)
        self.moved = Moved(
            exchange.bytes_sent, exchange.bytes_received, exchange.bytes_kept, time.perf_counter() - start
        )
        return received

    def _part_of_object(self, key: str, target: int) -> TensorPart:
        """The part of the rank from which `target` takes an object: `target` itself, or the first replica."""
        holders = [(number != target, *each.objects[key], number) for number, each in enumerate(self._held)
                   if key in each.objects]  # fmt: skip
        *_, size, holder = min(holders)
        return _part(key, holder, size)


def _tensors(sharded: ShardedStateDict) -> list[ShardedTensor | ElementRange]:
    return [value for value in nested_values(sharded) if not isinstance(value, ShardedObject)]


def _objects(sharded: ShardedStateDict) -> dict[str, ShardedObject]:
    return {value.unique_key: value for value in nested_values(sharded) if isinstance(value, ShardedObject)}


def _replica(sharded: ShardedObject) -> tuple[int, ...]:
    return sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id,)


def _part(key: str, holder: int, num_bytes: int) -> TensorPart:
    """A pickled object of one rank as a part. The rank is in the key, since the bytes of replicas may differ."""
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
    """The union of two nested values of dicts and lists.

    An empty list, as of a rank without parameters, is replaced.
    """
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
    """The value itself; a factory loses its merge if its parts are views of its tensor, which are filled in place."""
    if not isinstance(value, ShardedTensorFactory):
        return value
    whole = value.data.detach()
    places = {part.data.untyped_storage().data_ptr() for part in nested_values(value.build())}
    return replace(value, merge_fn=lambda _: whole) if places == {whole.untyped_storage().data_ptr()} else value


def _complete(state: dict, other: dict) -> None:
    """Add to `state` the entries that only `other` has. For example, a rank without parameters has no step counter."""
    for key, value in other.items():
        if key not in state:
            state[key] = value
        elif isinstance(value, dict) and isinstance(state[key], dict):
            _complete(state[key], value)
        elif isinstance(value, list) and isinstance(state[key], list):
            for mine, more in zip(state[key], value, strict=False):
                if isinstance(mine, dict) and isinstance(more, dict):
                    _complete(mine, more)
