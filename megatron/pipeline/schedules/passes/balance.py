"""Balance saved activations between the ranks of a pair (BPipe, Algorithm 1 and appendix A).

Early ranks save many microbatches, late ones few. The two ranks of a pair share what both save: neither holds more than
the *bound*, half of what the two save at most, plus one for a microbatch that is loaded while another one is evicted.
For 1F1B on p stages that is ceil((p+2)/2); on p ranks with v virtual stages each, pv+1.

    stage 0   F0 F1 EVICT1 F2 F3 EVICT3 B0 LOAD1 F4 B1 F5 EVICT5 B2 LOAD3 F6 B3 F7 B4 LOAD5 B5 B6 B7

This is the program of 4 stages and 8 microbatches, with bound 3. The pass reads the order of computations and counts;
it knows no formula of the schedule. Before each computation it looks at the next two:

- A forward that would find no room makes an eviction start one computation earlier. The victim is the saved microbatch
  whose backward stands last (Belady's rule, so the number of transfers is the least).
- A backward whose microbatch was evicted has its LOAD start one computation earlier. Where that computation is a
  forward and would leave no room for it, another eviction starts before, one computation earlier again. Where it is a
  backward and leaves no room, as in the cool-down, the LOAD starts after it.

Where Algorithm 1 as printed names computations by their distance in a row with bubbles, and so may evict a bubble, the
distance here is counted without them.

At the border of a batch that does not drain, a run may go on or stop, and no decision may depend on which. So nothing
looks beyond the border, and at each border the same microbatches are away: as many as the next forward needs, and those
whose backwards stand last. The last forwards of a batch are therefore evicted in any case, each in exchange for the
microbatch that is needed soonest. Thus a segment depends on nothing before the batch before it, a period repeats, and
the acceptor has passed the border, too, before the evictor moves anything in the new segment.

The acceptor requests its side of all the moves of a segment at the segment's beginning. They are carried out one after
another in the background (see `program.move_order`), so it is never late, and memory is taken only when it has been
freed.
"""

from collections.abc import Iterable, Iterator, Sequence

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, MOVES, Instruction, Kind
from megatron.pipeline.program.move_order import Pairs
from megatron.pipeline.schedules.passes import Segment, Segments

_Saved = tuple[int, int]  # stage, microbatch


def balanced_bounds(max_saved: Sequence[int], pairs: Pairs) -> tuple[int, ...]:
    """For each rank the bound that the ranks of its pair share, from the most microbatches that each rank saves.

    BPipe, section 3.3: the sum of both and one more, halved, rounded up. A rank between the pairs, or one that is
    frozen, keeps what it has.
    """
    partners = [(rank, pairs.of_rank(rank)) for rank in range(len(max_saved))]
    return tuple(
        max_saved[rank] if rank == partner else (max_saved[rank] + max_saved[partner] + 2) // 2
        for rank, partner in partners
    )


def add_balance(segments_of_rank: Sequence[Segments], extent: Extent, bounds: Sequence[int]) -> list[Segments]:
    """The segments of all ranks, which hold computations alone, with the moves that keep every rank within its bound.

    Args:
        segments_of_rank: F and B (or I and W), in segments; no segment but the last begins with anything but a forward.
        extent: the program to be.
        bounds: for each rank the most microbatches that it may hold at any moment (`balanced_bounds`).

    Raises:
        ValueError: a bound is too small for the order.
    """
    pairs = extent.pairs
    partners = [pairs.of_rank(rank) for rank in range(len(segments_of_rank))]
    balanced = [
        list(segments)
        if rank == partner or _has_room(segments, bounds[rank], pairs.num_frozen)
        else _Evictor(segments, bounds[rank], pairs.num_frozen).segments()
        for rank, (partner, segments) in enumerate(zip(partners, segments_of_rank, strict=True))
    ]
    requests = [[_requests(segment, pairs) for segment in segments] for segments in balanced]
    return [
        [request + segment for request, segment in zip(requests[partner], segments, strict=True)]
        for partner, segments in zip(partners, balanced, strict=True)
    ]


def _requests(segment: Segment, pairs: Pairs) -> Segment:
    """The acceptor's side of the moves of an evictor's segment."""
    return [pairs.counterpart(instruction) for instruction in segment if instruction.kind in MOVES]


def _has_room(segments: Segments, bound: int, num_frozen: int) -> bool:
    """Whether a rank holds no more than its bound, also if another forward came behind each segment but the last."""
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
    """The computations that save anything; and the frozen forwards before each of them, and behind the last."""
    saving, frozen = [], [[]]
    for each in segment:
        if each.stage < num_frozen:
            frozen[-1].append(each)
        else:
            saving.append(each)
            frozen.append([])
    return saving, frozen


class _Evictor:
    """One rank, walked through in its order: what it holds and what is away at each place.

    Frozen forwards save nothing, so moves are set as if there were none; each stays right before what follows it.
    """

    def __init__(self, segments: Segments, bound: int, num_frozen: int) -> None:
        self._bound, parts = bound, [_apart(segment, num_frozen) for segment in segments]
        self._segments, self._frozen = [segment for segment, _ in parts], [frozen for _, frozen in parts]
        row = [instruction for segment in self._segments for instruction in segment]
        self._needed_at = {_saved(each): place for place, each in enumerate(row) if each.kind in BEGINS_BACKWARD}
        self._place = 0  # in the row, of the computation before which moves are set
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
        """What is to be away at the end of a segment that is not the last, so that the next forward finds room."""
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
        """Send away what is needed last of all that is held and neither in use nor about to be."""
        kept = {_saved(each) for each in in_use if each is not None}
        candidates = [each for each in self._held - kept if self._needed_at[each] > self._place]
        if not candidates:
            raise ValueError(f"a bound of {self._bound} saved microbatches is too small for this order; give more")
        victim = max(candidates, key=self._needed_at.__getitem__)
        self._held.remove(victim)
        self._away.add(victim)
        return Instruction(Kind.EVICT, *victim)

    def _load(self, item: _Saved) -> Instruction:
        self._away.remove(item)
        self._held.add(item)
        return Instruction(Kind.LOAD, *item)

    def _execute(self, computation: Instruction) -> None:
        self._place += 1
        if computation.kind is Kind.FORWARD:
            self._held.add(_saved(computation))
        elif computation.kind in ENDS_BACKWARD:
            self._held.remove(_saved(computation))


def _saved(instruction: Instruction) -> _Saved:
    return instruction.stage, instruction.microbatch
