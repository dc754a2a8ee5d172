"""Moves tensors from rank to rank: one message per pair of ranks, in pieces of bounded size, each with a checksum.

In round k every rank sends to the rank k places on and receives from the one k places back, both at once, until that
message is through. So each rank has one buffer to send from and one to receive into at any time, and no rank waits for
one that waits for it: whoever is in the earliest round has a partner in that round. The checksum (CRC-32) stands in the
last bytes of each piece and is compared before its content is unpacked.

A rank that finds a fault remembers it and goes on, since the others count on its part; what to make of it is for all
of them to decide afterwards.
"""

import zlib
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training.transition.pieces import Piece, empty_bytes
from megatron.training.transition.plan import Message, Move, messages

_CHECKSUM_BYTES = 4


class Exchange:
    """One rank's part in carrying out a plan.

    Args:
        held, wanted: this rank's pieces, numbered as in the plan.
        group: gloo, over all ranks of the job; nobody else may use it meanwhile.
        piece_bytes: the longest piece of a message, checksum included.
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
        """Carry out `moves`, the whole plan's, in its order. Collective. Faults are in `problems` afterwards."""
        by_pair: dict[tuple[int, int], list[Move]] = defaultdict(list)
        for move in moves:
            if self._rank in (move.source, move.target):
                by_pair[move.source, move.target].append(move)
        for move in by_pair.pop((self._rank, self._rank), []):
            self._wanted[move.wanted].view(move.box).copy_(self._held[move.held].view(move.box))
            self.bytes_kept += move.num_bytes
        message_of = {pair: messages(pair_moves, self._most_bytes) for pair, pair_moves in by_pair.items()}
        longest = max((each.num_bytes for pieces in message_of.values() for each in pieces), default=0)
        outgoing, incoming = empty_bytes(longest + _CHECKSUM_BYTES), empty_bytes(longest + _CHECKSUM_BYTES)
        for distance in range(1, self._num_ranks):
            target, source = (self._rank + distance) % self._num_ranks, (self._rank - distance) % self._num_ranks
            out, into = message_of.get((self._rank, target), []), message_of.get((source, self._rank), [])
            for number in range(max(len(out), len(into))):
                arriving = leaving = None
                if number < len(into):
                    buffer = incoming[: into[number].num_bytes + _CHECKSUM_BYTES]
                    arriving = dist.irecv(buffer, group=self._group, group_src=source)
                if number < len(out):
                    leaving = dist.isend(self._packed(out[number], outgoing), group=self._group, group_dst=target)
                if arriving is not None:
                    arriving.wait()
                    self._unpack(into[number], buffer, source)
                if leaving is not None:
                    leaving.wait()

    def _packed(self, message: Message, buffer: Tensor) -> Tensor:
        buffer = buffer[: message.num_bytes + _CHECKSUM_BYTES]
        for move, place in zip(message.moves, message.places, strict=True):
            data = self._held[move.held].view(move.box)
            within(buffer, place, data).copy_(data)
        buffer[-_CHECKSUM_BYTES:].copy_(torch.frombuffer(checksum(buffer), dtype=torch.uint8))
        self.bytes_sent += message.num_bytes
        return buffer

    def _unpack(self, message: Message, buffer: Tensor, source: int) -> None:
        self.bytes_received += message.num_bytes
        if buffer[-_CHECKSUM_BYTES:].numpy().tobytes() != checksum(buffer):
            self.problems.append(
                f"{message.num_bytes:,} bytes from rank {source} to rank {self._rank} were damaged on their way"
            )
            return
        for move, place in zip(message.moves, message.places, strict=True):
            data = self._wanted[move.wanted].view(move.box)
            data.copy_(within(buffer, place, data))


def checksum(buffer: Tensor) -> bytearray:
    """CRC-32 of a message, without the place of the checksum itself."""
    return bytearray(zlib.crc32(buffer[:-_CHECKSUM_BYTES].numpy()).to_bytes(_CHECKSUM_BYTES, "little"))


def within(buffer: Tensor, first: int, like: Tensor) -> Tensor:
    """A tensor like this one in the bytes of a message from `first` on."""
    return buffer[first : first + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
