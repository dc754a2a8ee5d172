"""Proof: inputs that are stashed on the host come back before they are needed, and few are on the device at once.

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
"""

from megatron.pipeline.check.compact import (
    FIRST_STASH,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    KIND_OF_CODE,
    NUM_CODES,
    OFFLOADS,
    RELOADS,
    B,
    CompactProgram,
    F,
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
_MUST_FIND = {
    OFFLOAD: ((_HERE,), _AWAY),
    RELOAD: ((_AWAY,), _BACK),
    R: ((_HERE, _BACK), _USED),
}
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
    for rank, (codes, places) in enumerate(zip(compact.codes, compact.places, strict=True)):
        for position, (code, place) in enumerate(zip(codes, places, strict=True)):
            if code == F:
                state[place] = _HERE
            elif code in _MUST_FIND:
                wanted, left = _MUST_FIND[code]
                reason = "" if state[place] in wanted else _FOUND[state[place]]
                if FIRST_STASH <= code < FIRST_UPDATE:
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
    keeps = not compact.program.forward_only
    held = peak = 0
    for position, (code, place) in enumerate(zip(compact.codes[rank], compact.places[rank], strict=True)):
        held -= len(away.get(position, ()))
        if code < FIRST_TRANSFER:
            stage = place // width
            held += change[stage * NUM_CODES + code]
            held += keeps and code == F and stage > 0
        held += code in RELOADS
        if held > peak:
            if bound is not None and held > bound:
                reason = f"{held} tensors between stages may be on the device then, and {bound} are the most"
                raise compact.error(rank, position, reason)
            peak = held
        held -= code in (B, W) and place // width > 0
    return peak


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
    for position, (code, place) in enumerate(zip(codes, compact.places[rank], strict=True)):
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
