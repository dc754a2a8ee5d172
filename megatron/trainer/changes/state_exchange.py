"""The exchange of tensors between ranks: messages of bounded size for each pair of ranks, with checksums.

Large contiguous ranges of elements go directly from their source tensors into their target tensors; all of these
messages are posted at once. Small or scattered ranges, and ranges on a device, are packed and sent in rounds. In round
k every rank sends to the rank k places ahead and receives from the rank k places behind, both at once, until both
messages are complete. So each rank has one send buffer and one receive buffer, and ranks never wait in a circle: a rank
in the earliest round has a partner in the same round. Checksums are CRC-32. The checksums of large ranges follow in one
message; a packed message ends with its own checksum.

A rank that finds a fault records it and continues, since the other ranks depend on its messages; afterwards all ranks
decide together how to proceed.

A piece is a part of a tensor of a sharded state dict, with its position in the whole tensor and a view of its data.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.trainer.changes.transfer_plan import Message, Move, TensorPart, direct_messages, packed_messages
from megatron.trainer.checkpoint.boxes import Box, Shape, boxes_of_range
from megatron.trainer.checkpoint.optimizer_state import ElementRange

# --- a state dict as parts of whole tensors ---------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of the tensor `key`, whose whole shape is `global_shape`; `data` has the shape of `box`."""

    key: str
    box: Box
    data: Tensor
    global_shape: Shape

    def part(self) -> TensorPart:
        in_order = self.data.is_contiguous() and self.data.device.type == "cpu"
        return TensorPart(self.key, self.box, self.data.element_size(), in_order)

    def view(self, box: Box) -> Tensor:
        """The view of `box` in the piece's data."""
        return self.data[box.within(self.box)]


def pieces_of(values: Iterable[ShardedTensor | ElementRange]) -> list[Piece]:
    """The pieces of sharded tensors and element ranges, in order."""
    return [piece for value in values for piece in _pieces(value)]


def _pieces(value: ShardedTensor | ElementRange) -> Iterator[Piece]:
    if isinstance(value, ShardedTensor):
        yield _piece(value, Box.whole(value.local_shape), value.data.detach())
        return
    for whole, first, data in value.overlaps():
        begin = 0
        for box in boxes_of_range(tuple(whole.local_shape), first, first + len(data)):
            yield _piece(whole, box, data[begin : begin + box.size].view(box.shape))
            begin += box.size


def _piece(sharded: ShardedTensor, box: Box, data: Tensor) -> Piece:
    """The piece for a box in coordinates of the local tensor."""
    prepended = sharded.prepend_axis_num
    local = Box((0,) * prepended + box.start, (1,) * prepended + box.stop)
    offset = sharded.global_offset
    whole = Box(
        tuple(start + origin for start, origin in zip(local.start, offset, strict=True)),
        tuple(stop + origin for stop, origin in zip(local.stop, offset, strict=True)),
    )
    return Piece(sharded.key, whole, data[(None,) * prepended], tuple(sharded.global_shape))


def share_memory(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether a tensor of `some` and a tensor of `others` share memory."""
    spans = sorted([(*_span(each), 0) for each in some if each.numel()] + [(*_span(each), 1) for each in others
                                                                          if each.numel()])  # fmt: skip
    ends: dict[int, tuple] = {}
    for device, start, end, side in spans:
        if ends.get(1 - side, ("", 0)) > (device, start):
            return True
        ends[side] = max(ends.get(side, ("", 0)), (device, end))
    return False


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """The device of a tensor, its first address, and the address after its last element."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's dtype, such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def _empty_bytes(num_bytes: int) -> Tensor:
    """A buffer for a message in host memory."""
    return torch.empty(num_bytes, dtype=torch.uint8)


# --- messages ---------------------------------------------------------------------------------------------------------

_CHECKSUM_BYTES = 4


class StateExchange:
    """The execution of a plan of moves on one rank.

    Args:
        held, wanted: this rank's pieces, numbered as in the plan.
        group: gloo group of all ranks of the job; no other code may use it during the exchange.
        piece_bytes: largest number of bytes in a message, including its checksum.
    """

    def __init__(
        self, held: Sequence[Piece], wanted: Sequence[Piece], *, group: dist.ProcessGroup, piece_bytes: int
    ) -> None:
        self._held, self._wanted = held, wanted
        self._group = group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._most_bytes = piece_bytes - _CHECKSUM_BYTES
        self.problems: list[str] = []
        self.bytes_sent = self.bytes_received = self.bytes_kept = 0

    @torch.no_grad()
    def run(self, moves: Sequence[Move]) -> None:
        """Carry out `moves`, all moves of the plan in its order; afterwards `problems` has the faults found.

        Collective: every rank must call it.
        """
        outgoing: dict[int, list[Move]] = defaultdict(list)
        incoming: dict[int, list[Move]] = defaultdict(list)
        for move in moves:
            if move.source == move.target == self._rank:
                self._wanted[move.wanted].view(move.box).copy_(self._held[move.held].view(move.box))
                self.bytes_kept += move.num_bytes
            elif move.source == self._rank:
                outgoing[move.target].append(move)
                self.bytes_sent += move.num_bytes
            elif move.target == self._rank:
                incoming[move.source].append(move)
                self.bytes_received += move.num_bytes
        self._exchange_runs(outgoing, incoming)
        self._exchange_packed(outgoing, incoming)

    def _exchange_runs(self, outgoing: dict[int, list[Move]], incoming: dict[int, list[Move]]) -> None:
        arriving, leaving = [], []
        for source in self._others(-1):
            messages = direct_messages(incoming[source], self._most_bytes)
            if messages:
                targets = [_bytes_of(self._wanted[move.wanted].view(move.box)) for (move,), *_ in messages]
                sums = torch.empty(len(messages), dtype=torch.int64)
                posted = [dist.irecv(each, group=self._group, group_src=source) for each in [*targets, sums]]
                arriving.append((source, targets, sums, posted))
        for target in self._others(1):
            messages = direct_messages(outgoing[target], self._most_bytes)
            if messages:
                sums = torch.empty(len(messages), dtype=torch.int64)
                for number, ((move,), *_) in enumerate(messages):
                    data = _bytes_of(self._held[move.held].view(move.box))
                    leaving.append((dist.isend(data, group=self._group, group_dst=target), data))
                    sums[number] = checksum(data)  # computed during the transfer
                leaving.append((dist.isend(sums, group=self._group, group_dst=target), sums))
        for source, targets, sums, posted in arriving:
            found = []
            for target, work in zip(targets, posted, strict=False):
                work.wait()
                found.append(checksum(target))
            posted[-1].wait()
            for target, mine, theirs in zip(targets, found, sums.tolist(), strict=True):
                if mine != theirs:
                    self._report(source, len(target))
        for work, _ in leaving:
            work.wait()

    def _exchange_packed(self, outgoing: dict[int, list[Move]], incoming: dict[int, list[Move]]) -> None:
        into = {source: packed_messages(moves, self._most_bytes) for source, moves in incoming.items()}
        out = {target: packed_messages(moves, self._most_bytes) for target, moves in outgoing.items()}
        longest = max((each.num_bytes for by_rank in (into, out) for all_of in by_rank.values() for each in all_of),
                      default=0)  # fmt: skip
        sending, receiving = _empty_bytes(longest + _CHECKSUM_BYTES), _empty_bytes(longest + _CHECKSUM_BYTES)
        for target, source in zip(self._others(1), self._others(-1), strict=True):
            leaves, arrives = out.get(target, []), into.get(source, [])
            for number in range(max(len(leaves), len(arrives))):
                works = []
                if number < len(arrives):
                    buffer = receiving[: arrives[number].num_bytes + _CHECKSUM_BYTES]
                    works.append(dist.irecv(buffer, group=self._group, group_src=source))
                if number < len(leaves):
                    packed = self._packed(leaves[number], sending)
                    works.append(dist.isend(packed, group=self._group, group_dst=target))
                for work in works:
                    work.wait()
                if number < len(arrives):
                    self._unpack(arrives[number], buffer, source)

    def _others(self, step: int) -> list[int]:
        """The other ranks, starting with the neighbour in the direction `step`."""
        return [(self._rank + step * distance) % self._num_ranks for distance in range(1, self._num_ranks)]

    def _packed(self, message: Message, buffer: Tensor) -> Tensor:
        for move, place in zip(message.moves, message.places, strict=True):
            data = self._held[move.held].view(move.box)
            within(buffer, place, data).copy_(data)
        own = checksum(buffer[: message.num_bytes]).to_bytes(_CHECKSUM_BYTES, "little")
        buffer = buffer[: message.num_bytes + _CHECKSUM_BYTES]
        buffer[-_CHECKSUM_BYTES:].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        return buffer

    def _unpack(self, message: Message, buffer: Tensor, source: int) -> None:
        end = int.from_bytes(buffer[-_CHECKSUM_BYTES:].numpy().tobytes(), "little")
        if end != checksum(buffer[:-_CHECKSUM_BYTES]):
            self._report(source, message.num_bytes)
            return
        for move, place in zip(message.moves, message.places, strict=True):
            data = self._wanted[move.wanted].view(move.box)
            data.copy_(within(buffer, place, data))

    def _report(self, source: int, num_bytes: int) -> None:
        self.problems.append(
            f"{num_bytes:,} bytes from rank {source} to rank {self._rank} were damaged on their way"
        )  # fmt: skip


def checksum(data: Tensor) -> int:
    """The CRC-32 of a tensor of bytes on the host."""
    return zlib.crc32(data.numpy())


def within(buffer: Tensor, first: int, like: Tensor) -> Tensor:
    """A view of a message's bytes from byte `first` on, with the dtype and shape of `like`."""
    return buffer[first : first + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _bytes_of(data: Tensor) -> Tensor:
    """A view of a contiguous tensor as bytes."""
    return data.view(-1).view(torch.uint8)
