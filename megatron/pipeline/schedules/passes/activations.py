"""The passes for activations: moves between the ranks of a pair, and recomputes.

**Balance (`add_balance`).** Balance saved activations between the ranks of a pair (BPipe, Algorithm 1 and appendix A).

Problem: early ranks save many microbatches, and late ranks save few.

Solution: the two ranks of a pair share their saved microbatches, such that neither rank holds more than the *bound*.
The bound is half of what both ranks save at most, plus one for a microbatch that is loaded while another one is
evicted. For 1F1B on p stages the bound is ceil((p+2)/2), and on p ranks with v virtual stages each it is pv+1.

    stage 0   F0 F1 EVICT1 F2 F3 EVICT3 B0 LOAD1 F4 B1 F5 EVICT5 B2 LOAD3 F6 B3 F7 B4 LOAD5 B5 B6 B7

This row is for 4 stages and 8 microbatches, with bound 3. The pass reads the order of computations and counts saved
microbatches; it uses no formula of the schedule. Before each computation it looks at the next two computations:

- If a forward would find no room, an eviction starts one computation earlier. The victim is the saved microbatch whose
  backward stands last. This is Belady's rule, which needs the fewest transfers.
- If the microbatch of a backward is evicted, its LOAD starts one computation earlier. If that computation is a forward
  that would leave no room for the LOAD, another eviction starts one computation before that. If that computation is a
  backward and there is no room yet, as in the cool-down, the LOAD starts after it.

Algorithm 1 as printed counts distances in a row with bubbles, and so may evict a bubble. Here distances are counted
without bubbles.

At the border of a batch that does not drain, a run may go on or stop, and no move may depend on that decision. So the
pass does not look beyond a border. At each border a fixed set of microbatches is away: as many as make room for the
next forward, namely those whose backwards stand last. So the last forwards of a batch are always evicted, each in
exchange for the microbatch that is needed soonest. Three properties follow. A segment depends only on its own batch and
the batch before. A period repeats. The acceptor has passed the border, too, before the evictor moves any activations in
the new segment.

The acceptor requests its ends of all moves of a segment at the beginning of the segment. The moves are carried out one
after another in the background (see `program.lane_order`). So the acceptor is never late, and a move takes memory only
after as much has been freed.

**Swaps (`add_swaps`).** Keep at most a given number of a rank's microbatches on its device, and the others on the host.
The copies stand where the moves of `add_balance` would stand, for the same microbatches, as if the host were the pair
of the rank. The microbatch that is needed last leaves, so it has the longest time on the host, and each copy has at
least the time of one computation.

**Recompute (`add_recompute`).** Recompute the activations of a microbatch from its stored input before its backward.
R stands directly before the backward, so a stage holds the full activations of only one microbatch at a time. R needs
no tensor from the next stage. So while the gradient of the output is on its way, the recompute runs, and only the
backward waits for the gradient.
"""

from collections.abc import Iterable, Iterator, Sequence

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import (
    BEGINS_BACKWARD,
    ENDS_BACKWARD,
    MOVES,
    OWN_MOVES,
    SWAPS,
    Instruction,
    Kind,
)
from megatron.pipeline.program.lane_order import Pairs
from megatron.pipeline.schedules.passes import Segment, Segments

_Saved = tuple[int, int]  # stage, microbatch


def balanced_bounds(max_saved: Sequence[int], pairs: Pairs) -> tuple[int, ...]:
    """Return the bound of each rank, which is the same for both ranks of a pair (BPipe, section 3.3).

    If the ranks of a pair save at most x and y microbatches, the bound is (x + y + 1) / 2, rounded up. A rank that is
    its own pair, or that has only frozen stages, keeps its own number.

    Args:
        max_saved: the largest number of microbatches that each rank saves without moves.
        pairs: the pairs of ranks.
    """
    partners = [(rank, pairs.of_rank(rank)) for rank in range(len(max_saved))]
    return tuple(
        max_saved[rank] if rank == partner else (max_saved[rank] + max_saved[partner] + 2) // 2
        for rank, partner in partners
    )


def add_balance(segments_of_rank: Sequence[Segments], extent: Extent, bounds: Sequence[int]) -> list[Segments]:
    """Add the moves that keep every rank within its bound.

    Args:
        segments_of_rank: the segments of each rank, with computations only. Each segment but the last begins with a
            forward.
        extent: the extent of the program.
        bounds: the largest number of microbatches that each rank may hold at any time (`balanced_bounds`).

    Raises:
        ValueError: a bound is too small for the order.
    """
    pairs = extent.pairs
    partners = [pairs.of_rank(rank) for rank in range(len(segments_of_rank))]
    balanced = [
        list(segments)
        if rank == partner or _has_room(segments, bounds[rank], pairs.num_frozen)
        else _Evictor(segments, bounds[rank], pairs.num_frozen, OWN_MOVES).segments()
        for rank, (partner, segments) in enumerate(zip(partners, segments_of_rank, strict=True))
    ]
    requests = [[_requests(segment, pairs) for segment in segments] for segments in balanced]
    return [
        [request + segment for request, segment in zip(requests[partner], segments, strict=True)]
        for partner, segments in zip(partners, balanced, strict=True)
    ]


def add_swaps(segments: Segments, most: int) -> Segments:
    """Add the copies to the host and back that keep a rank within `most` saved microbatches.

    Args:
        segments: the segments of the rank, with computations only, as for `add_balance`.
        most: the largest number of microbatches that the rank may hold on the device at any time.

    Raises:
        ValueError: `most` is too small for the order.
    """
    if _has_room(segments, most, 0):
        return segments
    return _Evictor(segments, most, 0, SWAPS).segments()


def _requests(segment: Segment, pairs: Pairs) -> Segment:
    """Return the acceptor's ends of the moves in an evictor's segment."""
    return [pairs.counterpart(instruction) for instruction in segment if instruction.kind in MOVES]


def _has_room(segments: Segments, bound: int, num_frozen: int) -> bool:
    """Whether a rank stays within its bound without moves, even if a forward followed each segment but the last."""
    num_held, last = 0, len(segments) - 1
    for index, segment in enumerate(segments):
        for each in segment:
            if each.kind in ENDS_BACKWARD:
                num_held -= 1
            elif each.kind is Kind.FORWARD and each.stage >= num_frozen:
                num_held += 1
                if num_held > bound:
                    return False
        if index < last and num_held + 1 > bound:
            return False
    return True


def _apart(segment: Segment, num_frozen: int) -> tuple[Segment, list[Segment]]:
    """Separate frozen forwards from a segment.

    Returns:
        The other computations; and the frozen forwards before each of these, and after the last one.
    """
    saving, frozen = [], [[]]
    for each in segment:
        if each.stage < num_frozen:
            frozen[-1].append(each)
        else:
            saving.append(each)
            frozen.append([])
    return saving, frozen


class _Evictor:
    """Adds moves to the row of one rank, and keeps count of the microbatches that are held and away at each place.

    Frozen forwards save nothing, so moves are placed as if there were none. Each frozen forward stays directly before
    the computation that follows it.
    """

    def __init__(self, segments: Segments, bound: int, num_frozen: int, words: frozenset[Kind]) -> None:
        self._word_of = {kind.row.saved: kind for kind in words}  # -1: away; +1: back
        self._bound, parts = bound, [_apart(segment, num_frozen) for segment in segments]
        self._segments, self._frozen = [segment for segment, _ in parts], [frozen for _, frozen in parts]
        row = [instruction for segment in self._segments for instruction in segment]
        self._needed_at = {_saved(each): place for place, each in enumerate(row) if each.kind in BEGINS_BACKWARD}
        self._place = 0  # index in the row of the computation before which moves are placed
        self._held: set[_Saved] = set()
        self._away: set[_Saved] = set()

    def segments(self) -> Segments:
        last = len(self._segments) - 1
        return [
            list(self._segment(segment, frozen, is_last=index == last))
            for index, (segment, frozen) in enumerate(zip(self._segments, self._frozen, strict=True))
        ]

    def _segment(self, segment: Segment, frozen: Sequence[Segment], *, is_last: bool) -> Iterator[Instruction]:
        to_leave_away = set() if is_last else self._away_at_end(segment)
        is_owed = False  # whether a LOAD is due in exchange for the last eviction
        for index, current in enumerate(segment):
            following = segment[index + 1] if index + 1 < len(segment) else None
            after = segment[index + 2] if index + 2 < len(segment) else None
            if is_owed:
                yield self._load(self._soonest(self._away - to_leave_away))
            if self._must_load(current):
                yield self._load(_saved(current))
            starts = current.kind is Kind.FORWARD
            if self._must_load(following):
                if starts and len(self._held) + 2 > self._bound:
                    yield self._evict(following)
                if len(self._held) + starts + 1 <= self._bound:
                    yield self._load(_saved(following))
            is_owed = index > 0 and _saved(segment[index - 1]) in to_leave_away & self._held
            left = len(self._held) + starts - (current.kind in ENDS_BACKWARD)
            lacking = left + 1 + self._must_load(after) - self._bound
            for _ in range(max(0, lacking) if following and following.kind is Kind.FORWARD else 0):
                is_owed = False
                yield self._evict(current, following)
            if is_owed:
                yield self._evict(current, following)
                is_owed = bool(self._away - to_leave_away)
            yield from frozen[index]
            yield current
            self._execute(current)
        if is_owed:
            yield self._load(self._soonest(self._away - to_leave_away))
        yield from frozen[-1]

    def _away_at_end(self, segment: Segment) -> set[_Saved]:
        """Return the microbatches that have to be away at the end of a segment to make room for the next forward."""
        in_flight = self._held | self._away | {_saved(each) for each in segment if each.kind is Kind.FORWARD}
        in_flight -= {_saved(each) for each in segment if each.kind in ENDS_BACKWARD}
        num_away = max(0, len(in_flight) + 1 - self._bound)
        return set(sorted(in_flight, key=self._needed_at.__getitem__)[len(in_flight) - num_away :])

    def _must_load(self, instruction: Instruction | None) -> bool:
        """Whether the instruction needs activations that are away."""
        return instruction is not None and instruction.kind in BEGINS_BACKWARD and _saved(instruction) in self._away

    def _soonest(self, away: Iterable[_Saved]) -> _Saved:
        return min(away, key=self._needed_at.__getitem__)

    def _evict(self, *in_use: Instruction | None) -> Instruction:
        """Evict the held microbatch whose backward stands last, except those of the computations `in_use`."""
        kept = {_saved(each) for each in in_use if each is not None}
        candidates = [each for each in self._held - kept if self._needed_at[each] > self._place]
        if not candidates:
            raise ValueError(f"a bound of {self._bound} saved microbatches is too small for this order; give more")
        victim = max(candidates, key=self._needed_at.__getitem__)
        self._held.remove(victim)
        self._away.add(victim)
        return Instruction(self._word_of[-1], *victim)

    def _load(self, item: _Saved) -> Instruction:
        self._away.remove(item)
        self._held.add(item)
        return Instruction(self._word_of[+1], *item)

    def _execute(self, computation: Instruction) -> None:
        self._place += 1
        if computation.kind is Kind.FORWARD:
            self._held.add(_saved(computation))
        elif computation.kind in ENDS_BACKWARD:
            self._held.remove(_saved(computation))


def _saved(instruction: Instruction) -> _Saved:
    return instruction.stage, instruction.microbatch


def add_recompute(segments: Segments, extent: Extent) -> Segments:
    """Add an R before each B, and before each I of a backward in halves, that needs a recompute."""
    result = []
    for segment in segments:
        extended: Segment = []
        for instruction in segment:
            if instruction.kind in BEGINS_BACKWARD and extent.is_recomputed(instruction.stage, instruction.microbatch):
                extended.append(Instruction(Kind.RECOMPUTE, instruction.stage, instruction.microbatch))
            extended.append(instruction)
        result.append(extended)
    return result
