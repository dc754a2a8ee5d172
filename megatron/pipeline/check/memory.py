"""Proofs of memory: inputs on the host come back in time, and saved activations stay within their bounds.

Proof: inputs that are stashed on the host come back before they are needed, and few are on the device at once.

The input of a microbatch may leave a stage once, after its forward, and must come back before its recompute:

    OFFLOAD  after F; not twice; before R; not at the first stage, whose input is data; not without recompute, since the
             graph of the forward would refer to the input
    RELOAD   after OFFLOAD; not twice
    R        not between OFFLOAD and RELOAD

Every backward comes before its batch's STEP, so no input is on the host between batches. A program moves activations to
a pair stage or inputs to the host, as its residency says; EVICT and OFFLOAD never occur in one program.

*Boundaries* are the tensors that stages exchange: tensors that wait between two stages of a rank, and inputs that its
stages keep for their recompute. With the stash on the host and m microbatches a batch, a rank has at most m + 3
boundaries on the device (`lane_order.most_boundaries`), whatever the number of its stages and the timing. An input
counts from the start of its forward until the row has waited for its OFFLOAD, and again from the posting of its RELOAD.

**Waiting tensors.** A tensor that a stage produces for the next stage on the same rank is not sent, and not saved there
yet: it waits from the end of one computation to the start of the other. If a rank soon turns to its next stage, one
tensor waits. If it takes a whole batch through a stage first, the tensors of a whole batch wait: activations on the way
up, gradients on the way down. The row determines this number under any timing.

Proof: saved activations never exceed their bound, at any moment, under any timing.

A microbatch counts at a stage from the start of its forward to the end of its backward (of W, if the backward is
split). This count depends only on the order of the row. With recompute the microbatch counts likewise, for its stored
input; microbatches between R and the end of their backward (of I), whose activations are saved in full, are counted
separately. So are microbatches between I and W, for which a stage keeps only the tensors that W needs.

Moves change the count in the background: a LOAD or an ACCEPT adds a microbatch when it is posted, an EVICT or a RETURN
removes one when it has completed. A rank's moves are carried out in order, so timing only changes the number of
complete moves: at least those that the row has waited for, at most those that it has requested. The proof takes the
worst of these numbers at every position of the row.

Copies of activations to the host and back count as moves do, although SWAP_OUT and SWAP_IN have a lane each. A SWAP_IN
starts when every SWAP_OUT before it in the row is complete. So the largest number is held after some SWAP_IN, when all
copies before it are complete and none behind it is. The host holds a microbatch from its SWAP_OUT to the computation
that waits for its SWAP_IN.

If inputs are stashed on the host, a RELOAD adds a microbatch when it is posted, and an OFFLOAD removes one when the row
has waited for it (see `stash`), since at worst it is in progress until then.

A rank's memory holds the activations of all its stages, which do not reach their peaks at the same time. So with
several stages on a rank, the sum over them is counted and bounded, too.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron.pipeline.check.compact import (
    FIRST_MOVE,
    FIRST_STASH,
    FIRST_SWAP,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    KIND_OF_CODE,
    NUM_CODES,
    OFFLOADS,
    RELOADS,
    B,
    CompactProgram,
    F,
    I,
    R,
    W,
    codes_of,
)
from megatron.pipeline.program.instruction import Lane
from megatron.pipeline.program.lane_order import most_boundaries

OFFLOAD, RELOAD = codes_of("OFFLOAD RELOAD")


def count_waiting(compact: CompactProgram) -> tuple[int, ...]:
    """The largest number of tensors that wait between two stages of a rank, for each rank.

    Args:
        compact: a program whose computations are proved, so that each tensor is produced once before its use.
    """
    return tuple(_on_rank(compact, rank) for rank in range(len(compact.codes)))


def _on_rank(compact: CompactProgram, rank: int) -> int:
    change = handed_on(compact, rank)
    if not any(change.values()):
        return 0
    waiting = peak = 0
    for slot in compact.slots[rank]:
        waiting += change.get(slot, 0)
        peak = max(peak, waiting)
    return peak


def handed_on(compact: CompactProgram, rank: int) -> dict[int, int]:
    """Slot of each computation of a rank -> the change that it makes to the number of waiting tensors."""
    graph, stages = compact.program.graph, set(compact.stages_of(rank))
    change = {}
    for stage in stages:
        for code in range(FIRST_TRANSFER):
            word = KIND_OF_CODE[code].row
            taken = graph.makers(word.needs, stage) if word.needs else ()
            made = graph.takers(word.makes, stage) if word.makes else ()
            change[stage * NUM_CODES + code] = len(stages.intersection(made)) - len(stages.intersection(taken))
    return change


# States of the input of a microbatch at a stage.
_NOWHERE, _HERE, _AWAY, _BACK, _USED = range(5)

# code -> (states in which the instruction is allowed, state that it leaves)
_MUST_FIND = {OFFLOAD: ((_HERE,), _AWAY), RELOAD: ((_AWAY,), _BACK), R: ((_HERE, _BACK), _USED)}
_FOUND = {
    _NOWHERE: "its forward has not run, so there is no input",
    _HERE: "its input is on the device and has never left",
    _AWAY: "its input is on the host, and no RELOAD stands before it",
    _BACK: "its input has left and come back already",
    _USED: "its input has been used already",
}


def prove_stash(compact: CompactProgram) -> None:
    """Prove the module's table of OFFLOAD and RELOAD.

    Args:
        compact: a program whose computations are proved.

    Raises:
        ProgramError: for the first instruction that breaks its rule.
    """
    residency = compact.program.residency
    if residency is None:
        return  # `require_residency` has refused OFFLOAD and RELOAD
    state = bytearray(compact.num_stages * compact.num_microbatches)
    for rank in range(len(compact.codes)):
        for position, (code, place, _) in compact.row(rank):
            if code == F:
                state[place] = _HERE
            elif code in _MUST_FIND:
                wanted, left = _MUST_FIND[code]
                reason = "" if state[place] in wanted else _FOUND[state[place]]
                if FIRST_STASH <= code < FIRST_SWAP:
                    reason = _why_not(compact, place // compact.num_microbatches) or reason
                if reason:
                    raise compact.error(rank, position, reason)
                state[place] = left


def _why_not(compact: CompactProgram, stage: int) -> str:
    """The reason why inputs of the stage may not move to the host; "" if they may."""
    if not compact.program.residency.stashes_on_host:
        return "the inputs of this program wait on the device: its residency does not say host"
    if compact.moves:
        return "activations move to the host or to a pair stage, and this program does both"
    if not compact.program.recomputes(stage):
        return "the stage does not recompute, so the graph of its forward refers to the input"
    return "the input of the first stage is data" if stage == 0 else ""


def prove_boundaries(compact: CompactProgram) -> tuple[int, ...]:
    """Count boundaries on the device, and with the stash on the host prove that they stay within their bound.

    Args:
        compact: a program whose computations and stash are proved.

    Returns:
        For each rank, the largest number of boundaries on its device at the worst timing; empty if weights live on the
        device.

    Raises:
        ProgramError: for the first computation or RELOAD that may exceed the bound.
    """
    program = compact.program
    if program.residency is None:
        return ()
    bound = most_boundaries(max(program.batches)) if program.residency.stashes_on_host else None
    return tuple(_most_on_rank(compact, rank, bound) for rank in range(len(compact.codes)))


def _most_on_rank(compact: CompactProgram, rank: int, bound: int | None) -> int:
    width, change = compact.num_microbatches, handed_on(compact, rank)
    away = offloaded_before(compact, rank)
    keeps = () if compact.program.forward_only else set(compact.program.trained_stages_of(rank)) - {0}
    held = peak = 0
    for position, (code, place, _) in compact.row(rank):
        held -= len(away.get(position, ()))
        if code < FIRST_TRANSFER:
            stage = place // width
            held += change[stage * NUM_CODES + code]
            held += code == F and stage in keeps
        held += code in RELOADS
        if held > peak:
            if bound is not None and held > bound:
                reason = f"{held} tensors between stages may be on the device then, and {bound} are the most"
                raise compact.error(rank, position, reason)
            peak = held
        held -= code in (B, W) and place // width > 0
    return peak


def count_on_host(compact: CompactProgram) -> tuple[int, ...]:
    """The largest number of microbatches whose saved activations are on the host, for each rank over its stages.

    Args:
        compact: a program whose moves are proved.
    """
    peaks = [0] * len(compact.codes)
    for rank in range(len(peaks)) if compact.swaps else ():
        there: set[int] = set()
        for code, place in zip(compact.codes[rank], compact.places[rank], strict=True):
            if code in OFFLOADS:
                there.add(place)
                peaks[rank] = max(peaks[rank], len(there))
            elif code < FIRST_TRANSFER:
                there.discard(place)
    return tuple(peaks)


def offloaded_before(compact: CompactProgram, rank: int) -> dict[int, list[int]]:
    """Position of a row -> the stages of the OFFLOADs whose completion becomes certain there.

    The completion of an OFFLOAD is certain once the row has waited for it, for a later instruction of its lane, or for
    an instruction that has waited for one of these.
    """
    codes = compact.codes[rank]
    if OFFLOADS.isdisjoint(codes):
        return {}
    awaited, width = compact.awaited_in_lanes[rank], compact.num_microbatches
    stages: list[int] = []  # stages of the OFFLOADs so far
    known: list[int] = []  # by position: OFFLOADs that are complete when the instruction is (a computation: starts)
    of_lane = dict.fromkeys(Lane, 0)
    found: dict[int, list[int]] = {}
    for position, (code, place, _) in compact.row(rank):
        lane = KIND_OF_CODE[code].row.lane
        before = of_lane[lane]
        count = max([before, *(known[each] for each in awaited.get(position, ()))])
        if lane is Lane.D2H:
            stages += [place // width] * (code in OFFLOADS)
            count = len(stages)  # its lane is in order
        if lane is Lane.COMPUTE and count > before:
            found[position] = stages[before:count]
        known.append(count)
        of_lane[lane] = count
    return found


# The change in saved microbatches by each move, and by each copy of activations, which counts as a move.
_CHANGE = {
    code: KIND_OF_CODE[code].row.saved for code in (*range(FIRST_MOVE, FIRST_STASH), *range(FIRST_SWAP, FIRST_UPDATE))
}
_ADDS = RELOADS - _CHANGE.keys() | {F}


def complete_at(compact: CompactProgram, rank: int) -> dict[int, int]:
    """Position of a computation -> how many of the first moves, or copies of activations, are complete there."""
    if not compact.swaps:
        return compact.awaited_moves[rank]
    count, found = list(accumulate(FIRST_SWAP <= code < FIRST_UPDATE for code in compact.codes[rank])), {}
    for position, needed in compact.awaited_in_lanes[rank].items():
        if compact.codes[rank][position] < FIRST_TRANSFER:
            found[position] = max(count[each] for each in needed)
    return found


class HeldMicrobatches:
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
    held: HeldMicrobatches
    bound: int | None
    peak: list[int]  # one number
    scope: str = ""


class Peaks(NamedTuple):
    """The largest numbers of microbatches that are held at once, as `CheckReport` has them."""

    peak_saved_microbatches: tuple[int, ...]
    peak_saved_on_rank: tuple[int, ...]
    peak_recomputed_microbatches: tuple[int, ...]
    peak_deferred_microbatches: tuple[int, ...]


def prove_memory(
    compact: CompactProgram, bounds: Sequence[int] | None, bounds_of_ranks: Sequence[int] | None = None
) -> Peaks:
    """Count saved microbatches at each stage and on each rank, and prove that they stay within the bounds.

    Args:
        compact: a program whose computations and moves are proved.
        bounds: the largest number of saved microbatches that each stage may hold; None sets no bound.
        bounds_of_ranks: the same bound for each rank, over all its stages; a microbatch counts once at each stage.

    Raises:
        ProgramError: for the first forward, LOAD, ACCEPT, RELOAD or SWAP_IN that may exceed a bound.
    """
    num_stages, num_ranks = compact.num_stages, len(compact.codes)
    limits = _limits(bounds, num_stages, "stage")
    limits_of_ranks = _limits(bounds_of_ranks, num_ranks, "rank")
    by_stage = {stage: _Count(f"stage {stage}", HeldMicrobatches(), limit, [0]) for stage, limit in enumerate(limits)}
    by_rank = [
        _Count(f"rank {rank}", HeldMicrobatches(), limit, [0], " over its stages")
        for rank, limit in enumerate(limits_of_ranks)
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


def hold(compact: CompactProgram, rank: int, end: int) -> dict[int, HeldMicrobatches]:
    """The microbatches that each stage of a rank holds after the first `end` instructions of its row."""
    by_stage = {stage: _Count(f"stage {stage}", HeldMicrobatches(), None, [0]) for stage in compact.stages_of(rank)}
    _count(compact, rank, end, by_stage, _Count(f"rank {rank}", HeldMicrobatches(), None, [0]))
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
    awaited, away = complete_at(compact, rank), {} if compact.swaps else offloaded_before(compact, rank)
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
        elif (code in _ADDS or code in _CHANGE) and place // width not in saves_nothing:
            for count in (by_stage[place // width], on_rank):
                if code in _ADDS:
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
