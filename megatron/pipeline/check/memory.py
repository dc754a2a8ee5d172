"""Proof: saved activations never exceed their bound, at any moment, under any timing.

A microbatch counts at a stage from the start of its forward to the end of its backward (of W, if the backward is
split). This count depends only on the order of the row. With recompute the microbatch counts likewise, for its stored
input; microbatches between R and the end of their backward (of I), whose activations are saved in full, are counted
separately. So are microbatches between I and W, for which a stage keeps only the tensors that W needs.

Moves change the count in the background: a LOAD or an ACCEPT adds a microbatch when it is posted, an EVICT or a RETURN
removes one when it has completed. A rank's moves are carried out in order, so timing only changes the number of
complete moves: at least those that the row has waited for, at most those that it has requested. The proof takes the
worst of these numbers at every position of the row.

If inputs are stashed on the host, a RELOAD adds a microbatch when it is posted, and an OFFLOAD removes one when the row
has waited for it (see `stash`), since at worst it is in progress until then.

A rank's memory holds the activations of all its stages, which do not reach their peaks at the same time. So with
several stages on a rank, the sum over them is counted and bounded, too.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.pipeline.check.compact import (
    FIRST_MOVE,
    FIRST_STASH,
    FIRST_TRANSFER,
    KIND_OF_CODE,
    RELOAD,
    B,
    CompactProgram,
    F,
    I,
    R,
    W,
)
from megatron.pipeline.check.stash import offloaded_before

_CHANGE = {code: KIND_OF_CODE[code].row.saved for code in range(FIRST_MOVE, FIRST_STASH)}  # of moves


class Held:
    """The possible numbers of microbatches that a stage holds, depending on how many moves are complete."""

    def __init__(self) -> None:
        self.own = 0  # microbatches between their forward and the end of their backward, without those on the host
        self.moved = 0  # microbatches held in addition to `own` once all moves are complete
        # (number of complete moves, microbatches held in addition to `own` up to that number). An entry that a later
        # one exceeds is dropped, so the first is the highest.
        self.before: deque[tuple[int, int]] = deque()

    @property
    def most(self) -> int:
        return self.own + (max(self.before[0][1], self.moved) if self.before else self.moved)

    def request(self, change: int, num_moves: int) -> None:
        """Note that the row requests a move after `num_moves` others. `change`: microbatches that the move adds."""
        while self.before and self.before[-1][1] <= self.moved:
            self.before.pop()
        self.before.append((num_moves, self.moved))
        self.moved += change

    def complete(self, num_moves: int) -> None:
        """Note that the row has waited for the first `num_moves` moves."""
        while self.before and self.before[0][0] < num_moves:
            self.before.popleft()


class _Count(NamedTuple):
    """The count of a stage or of a rank, with its largest number so far and the largest allowed number."""

    name: str
    held: Held
    bound: int | None
    peak: list[int]  # one number
    scope: str = ""


class Peaks(NamedTuple):
    """The largest numbers of microbatches that are held at once.

    Attributes:
        saved: by stage.
        on_rank: by rank, over all its stages.
        recomputed: by stage, between R and B or I.
        deferred: by stage, between I and W.
    """

    saved: tuple[int, ...]
    on_rank: tuple[int, ...]
    recomputed: tuple[int, ...]
    deferred: tuple[int, ...]


def prove_memory(
    compact: CompactProgram, bounds: Sequence[int] | None, bounds_of_ranks: Sequence[int] | None = None
) -> Peaks:
    """Count saved microbatches at each stage and on each rank, and prove that they stay within the bounds.

    Args:
        compact: a program whose computations and moves are proved.
        bounds: the largest number of saved microbatches that each stage may hold; None sets no bound.
        bounds_of_ranks: the same bound for each rank, over all its stages; a microbatch counts once at each stage.

    Raises:
        ProgramError: for the first forward, LOAD, ACCEPT or RELOAD that may exceed a bound.
    """
    num_stages, num_ranks = compact.num_stages, len(compact.codes)
    limits = _limits(bounds, num_stages, "stage")
    limits_of_ranks = _limits(bounds_of_ranks, num_ranks, "rank")
    by_stage = {stage: _Count(f"stage {stage}", Held(), limit, [0]) for stage, limit in enumerate(limits)}
    by_rank = [
        _Count(f"rank {rank}", Held(), limit, [0], " over its stages") for rank, limit in enumerate(limits_of_ranks)
    ]
    recomputed, deferred = [0] * num_stages, [0] * num_stages
    for rank, codes in enumerate(compact.codes):
        _count(compact, rank, len(codes), by_stage, by_rank[rank])
        if compact.program.recompute:
            _count_between(compact, rank, (R,), (B, I), recomputed)
        if I in codes:
            _count_between(compact, rank, (I,), (W,), deferred)
    assert not any(each.held.own or each.held.moved for each in by_stage.values()), "all have ended and are back"
    saved, on_rank = (tuple(each.peak[0] for each in counts) for counts in (by_stage.values(), by_rank))
    return Peaks(saved, on_rank, tuple(recomputed), tuple(deferred))


def hold(compact: CompactProgram, rank: int, end: int) -> dict[int, Held]:
    """The microbatches that each stage of a rank holds after the first `end` instructions of its row."""
    by_stage = {stage: _Count(f"stage {stage}", Held(), None, [0]) for stage in compact.stages_of(rank)}
    _count(compact, rank, end, by_stage, _Count(f"rank {rank}", Held(), None, [0]))
    return {stage: count.held for stage, count in by_stage.items()}


def _limits(bounds: Sequence[int] | None, count: int, of: str) -> list[int | None]:
    if bounds is not None and len(bounds) != count:
        raise ValueError(f"{len(bounds)} bounds are given for {count} {of}s: give one for each {of}")
    return [None] * count if bounds is None else list(bounds)


def _count(compact: CompactProgram, rank: int, end: int, by_stage: Mapping[int, _Count], on_rank: _Count) -> None:
    width = compact.num_microbatches
    graph = compact.program.graph
    saves_nothing = {stage for stage in compact.stages_of(rank) if graph.is_forward_only(stage)}
    counts = [*(by_stage[stage] for stage in compact.stages_of(rank)), on_rank]
    awaited, away = compact.awaited_moves[rank], offloaded_before(compact, rank)
    num_moves = 0
    for position, (code, place) in enumerate(zip(compact.codes[rank][:end], compact.places[rank][:end], strict=True)):
        if FIRST_TRANSFER <= code < FIRST_MOVE:
            continue
        if awaited and position in awaited:
            for count in counts:
                count.held.complete(awaited[position])
        for stage in away.get(position, ()):
            by_stage[stage].held.own -= 1
            on_rank.held.own -= 1
        if code in (B, W):
            by_stage[place // width].held.own -= 1
            on_rank.held.own -= 1
        elif (code in (F, RELOAD) or code in _CHANGE) and place // width not in saves_nothing:
            for count in (by_stage[place // width], on_rank):
                if code in (F, RELOAD):
                    count.held.own += 1
                else:
                    count.held.request(_CHANGE[code], num_moves)
                most = count.held.most
                if most > count.peak[0]:
                    if count.bound is not None and most > count.bound:
                        saves = f"{count.name} would save {most} microbatches{count.scope}"
                        reason = f"{saves}, and its bound is {count.bound}"
                        raise compact.error(rank, position, reason)
                    count.peak[0] = most
            num_moves += code in _CHANGE


def _count_between(
    compact: CompactProgram, rank: int, begins: Sequence[int], ends: Sequence[int], peaks: list[int]
) -> None:
    """Raise the peak of each stage of a rank to its largest number of microbatches between two kinds of instructions.

    A microbatch that has an instruction of `ends` but none of `begins` does not count.
    """
    width = compact.num_microbatches
    between = {stage: set() for stage in compact.stages_of(rank)}
    for code, place in zip(compact.codes[rank], compact.places[rank], strict=True):
        if code in begins:
            stage = place // width
            between[stage].add(place)
            peaks[stage] = max(peaks[stage], len(between[stage]))
        elif code in ends:
            between[place // width].discard(place)
