"""Proof: saved activations never exceed their bound, at any moment, under any timing.

A microbatch counts at a stage from the start of its forward to the end of its backward (of W, where the backward is
split). That count changes in the row's own order and nowhere else. With recompute the microbatch counts just the same,
for its stored input; what it saves in full between R and the end of its backward is counted apart.

Moves change the count, too, in the background: a LOAD or an ACCEPT adds a microbatch when it is posted, an EVICT or a
RETURN takes one away when it has completed. A rank's moves are carried out in order, so all that timing can change is
how many of them are complete: at least those that the row has waited for, at most those that it has requested. The
proof takes the worst of these, at every place of the row.
"""

from collections import deque
from collections.abc import Sequence

from megatron.pipeline.check.compact import ACCEPT, EVICT, LOAD, RETURN, B, CompactProgram, F, R, W

_CHANGE = {EVICT: -1, ACCEPT: 1, RETURN: -1, LOAD: 1}


class Held:
    """How many microbatches a stage may hold, over all that its rank's moves may have done by now."""

    def __init__(self) -> None:
        self.own = 0  # between their forward and the end of their backward, wherever they are
        self.moved = 0  # held more than `own`, once all moves are complete
        # Before that: up to how many complete moves, and how much held more than `own` then. Only what later ones do
        # not exceed, so the first is the highest.
        self.before: deque[tuple[int, int]] = deque()

    @property
    def most(self) -> int:
        return self.own + (max(self.before[0][1], self.moved) if self.before else self.moved)

    def request(self, change: int, num_moves: int) -> None:
        """The row requests a move, after `num_moves` others."""
        while self.before and self.before[-1][1] <= self.moved:
            self.before.pop()
        self.before.append((num_moves, self.moved))
        self.moved += change

    def complete(self, num_moves: int) -> None:
        """The row has waited for so many moves."""
        while self.before and self.before[0][0] < num_moves:
            self.before.popleft()


def prove_memory(compact: CompactProgram, bounds: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count saved microbatches at each stage, and prove that they stay within `bounds`.

    Args:
        compact: a program whose computations and moves are proved.
        bounds: the largest number of saved microbatches that each stage may hold; None to count only.

    Returns:
        The peak of saved microbatches at each stage, and the peak of those that are recomputed and not yet through
        their backward.

    Raises:
        ProgramError: naming the first forward, LOAD or ACCEPT that may exceed its stage's bound.
    """
    num_stages = compact.num_stages
    if bounds is not None and len(bounds) != num_stages:
        raise ValueError(f"{len(bounds)} bounds are given for {num_stages} stages: give one for each stage")
    peaks = [0] * num_stages
    peaks_full = [0] * num_stages
    for rank, codes in enumerate(compact.codes):
        held = hold(compact, rank, len(codes), peaks, bounds)
        assert not any(each.own or each.moved for each in held.values()), "all have ended and are back"
        if compact.program.recompute:
            _count_recomputed(compact, rank, peaks_full)
    return tuple(peaks), tuple(peaks_full)


def hold(
    compact: CompactProgram, rank: int, end: int, peaks: list[int], bounds: Sequence[int] | None = None
) -> dict[int, Held]:
    """What each stage of a rank holds after the first `end` instructions; raises `peaks`, by stage, where they do."""
    width = compact.num_microbatches
    stages = [stage for stage, owner in enumerate(compact.rank_of_stage) if owner == rank]
    held = {stage: Held() for stage in stages}
    awaited = compact.awaited_moves[rank]
    num_moves = 0
    for position, (code, place) in enumerate(zip(compact.codes[rank][:end], compact.places[rank][:end], strict=True)):
        if position in awaited:
            for each in held.values():
                each.complete(awaited[position])
        if code == F:
            stage = place // width
            held[stage].own += 1
        elif code in (B, W):
            held[place // width].own -= 1
            continue
        elif code in _CHANGE:
            stage = place // width
            held[stage].request(_CHANGE[code], num_moves)
            num_moves += 1
        else:
            continue
        most = held[stage].most
        if most > peaks[stage]:
            if bounds is not None and most > bounds[stage]:
                reason = f"stage {stage} would save {most} microbatches, and its bound is {bounds[stage]}"
                raise compact.error(rank, position, reason)
            peaks[stage] = most
    return held


def _count_recomputed(compact: CompactProgram, rank: int, peaks: list[int]) -> None:
    width = compact.num_microbatches
    full = [0] * compact.num_stages
    for code, place in zip(compact.codes[rank], compact.places[rank], strict=True):
        if code == R:
            stage = place // width
            full[stage] += 1
            peaks[stage] = max(peaks[stage], full[stage])
        elif code in (B, W):
            full[place // width] -= 1
