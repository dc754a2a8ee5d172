"""The room of the ranks that are left: how many microbatches each may have begun, and the moves that make room.

Each rank holds at most a limit of microbatches. A schedule may keep the limit by moves to the pair rank (`--balance`)
or to the host. So after a loss, too, a rank may have begun more microbatches than it holds:

- **To the pair.** The pairs are those of each replica, if both ranks are left. A rank whose pair is lost moves nothing.
  Both ranks of a pair hold at most the limit, with one microbatch on its way (BPipe, section 3.3), so together they
  have begun at most twice the limit less one.
- **To the host.** A rank has begun at most twice the limit, or as many as while no rank is lost if these are more.

The passes of the presets put the moves into the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.pipeline.program.copies import pair_stages_of
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Row, Rows
from megatron.pipeline.program.lane_order import Pairs, pair_of
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.activations import add_balance, add_swaps
from megatron.pipeline.survivors.sharing import Sharing


@dataclass(frozen=True)
class Room:
    """The numbers of microbatches that the ranks that are left may hold and begin.

    Attributes:
        sharing: the ranks that are left.
        limit: the number of microbatches that a rank may hold, over its stages.
        to_host: whether further microbatches may wait on the host.
        to_pair: whether further microbatches may wait on the pair rank.
    """

    sharing: Sharing
    limit: int
    to_host: bool = False
    to_pair: bool = False

    @property
    def moves(self) -> bool:
        return self.to_host or self.to_pair

    @cached_property
    def pair_stages(self) -> tuple[int | None, ...]:
        """For each stage of the program, its pair stage, which is of the same replica; None: it has none."""
        number_of, num_stages = self.sharing.number_of, self.sharing.schedule.num_stages
        pairs = (number_of.get((pair_of(stage, num_stages), replica)) for stage, replica in self.sharing.stages)
        return tuple(None if pair == number or not self.to_pair else pair for number, pair in enumerate(pairs))

    @cached_property
    def partners(self) -> tuple[int, ...]:
        """For each rank, the other rank of its pair; the rank itself if it has none."""
        extent = self.with_pairs(self.sharing.extent)
        pairs = Pairs(extent.rank_of_stage, of_copies=pair_stages_of(extent.copies))
        return tuple(map(pairs.of_rank, range(len(self.sharing.ranks))))

    @cached_property
    def most(self) -> tuple[int, ...]:
        """For each rank, the number of microbatches that may be between their forward and the end of their backward."""
        if self.to_host:
            begun = self.sharing.begun_undisturbed
            return tuple(max(2 * self.limit, begun[rank]) for _, rank in self.sharing.ranks)
        return tuple(self.limit * (1 + (partner != rank)) for rank, partner in enumerate(self.partners))

    def over(self, begun: Sequence[int]) -> tuple[int, ...]:
        """Return for each rank by how many microbatches it exceeds the number that it may have begun.

        `begun`: for each rank, the most microbatches that it has begun at once.
        """
        allowed = list(self.most)
        for rank, partner in enumerate(self.partners):
            if rank < partner:  # only one of the two sends microbatches away, and one of these is on its way
                full, other = sorted((rank, partner), key=lambda each: (-begun[each], each))
                allowed[full] = max(self.limit, 2 * self.limit - 2)
                moves = begun[full] > self.limit
                allowed[other] = max(1, 2 * self.limit - 1 - begun[full]) if moves else self.limit
        return tuple(max(0, own - most) for own, most in zip(begun, allowed, strict=True))

    def with_pairs(self, extent: Extent) -> Extent:
        """Return the extent with copies that name their pairs."""
        named = zip(extent.copies, self.pair_stages, strict=True)
        return replace(extent, copies=tuple(copy._replace(pair=pair) for copy, pair in named))

    def program(self, extent: Extent, rows: Rows) -> Program:
        """Return the program of rows of computations, with moves where a rank would hold more than the limit.

        Raises:
            ValueError: moves cannot keep the limit.
        """
        plain = Program.of(extent, rows)
        if not self.moves:
            return plain
        segments = [_segments(extent, row) for row in rows]
        if self.to_host:
            moved = [add_swaps(each, self.limit) for each in segments]
        else:
            extent = self.with_pairs(extent)
            moved = add_balance(segments, extent, [self.limit] * len(rows))
        joined = tuple(tuple(each for segment in of_rank for each in segment) for of_rank in moved)
        return plain if joined == rows else Program.of(extent, joined)


def rooms_of(sharing: Sharing, limit: int) -> list[Room]:
    """Return the room without moves and, if the schedule makes moves, the room with its moves."""
    schedule, alone = sharing.schedule, Room(sharing, limit)
    if not (schedule.swaps or schedule.evicting_ranks((sharing.num_microbatches,))):
        return [alone]
    return [alone, replace(alone, to_host=schedule.swaps, to_pair=schedule.balance)]


def _segments(extent: Extent, row: Row) -> Segments:
    """Cut a row of computations at the first one of each batch."""
    segments: Segments = [[]]
    for each in row:
        while extent.batch_of(each.microbatch) - extent.first_batch >= len(segments):
            segments.append([])
        segments[-1].append(each)
    return segments
