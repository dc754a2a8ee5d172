"""Proof: fill + n periods + drain is a correct program, for every n.

By induction over the number of periods, on the *state* between them:

1. fill + period + drain is a correct program: every proof of `check` holds for it.
2. Every rank can execute its fill before any rank begins its period, and its period before any rank begins its drain.
   So an execution reaches the state after the fill and the state after the period. Since the actions of a rank do not
   depend on the speed of other ranks (see `megatron.pipeline.graph`), an execution through these two states reaches
   every state that any execution reaches. So rows can be cut there and each part can be proved by itself.
3. The state after the period equals the state after the fill, if microbatches, batches and versions are counted from
   one period later.
4. The needs and effects of an instruction and every bound depend on that state, and not on absolute numbers. The
   exception is the start of a run, where several batches use the same version; so the version that the policy gives to
   the next batch is part of the state.

By 3 and 4, a second period, shifted by one period, executes as the first did and ends in the same state, shifted by one
more period; and the shifted drain drains the pipeline after any number of periods, including none. Live versions are
those of step 1, and so are the peaks of a program without moves.

The state at a cut has the following parts.
For each stage: the facts of each microbatch that has begun and is not complete, and the version of its forward; the
live versions; the version of the next batch; the activations that are away or lent; the number of held microbatches.
For each rank: the number of instructions of each link of its chain; reductions that are posted and not complete; moves
that its partner has not requested yet, and moves that are still awaited.
With weights on the host: the stages on the device, the stages with gradients in a buffer, the inputs on the host, and
the words that the lanes cannot have completed yet.
With activations on the host: these microbatches, and the copies that are still awaited.
For each channel: the transfers that only one end has posted.

The largest number of moves in progress is not part of the state: an acceptor waits for no move, so its own row does not
limit the number. Its largest number of held microbatches repeats from the second period on, during which all moves of
the first period may still be in progress. So peaks are taken from two periods.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from megatron.pipeline.check.compact import (
    CODE_OF_KIND,
    FIRST_UPDATE,
    KIND_OF_CODE,
    REDUCE_NORM,
    CompactProgram,
    F,
    error_at,
)
from megatron.pipeline.check.computations import Facts, moves_of_rank
from megatron.pipeline.check.memory import hold
from megatron.pipeline.check.predictions import codes_of_predictions
from megatron.pipeline.check.progress import list_channels, run
from megatron.pipeline.check.residency import codes_of_host_updates
from megatron.pipeline.check.updates import chain_of_rank
from megatron.pipeline.graph.row_graph import RowExecution
from megatron.pipeline.program.instruction import (
    ENDS_BACKWARD,
    OFFLOADS,
    STASH_WORDS,
    SWAPS,
    USES_SAVED,
    WORDS,
    Instruction,
    Kind,
    Row,
)
from megatron.pipeline.program.lane_order import LaneOrder, MoveOrder
from megatron.pipeline.program.program import Program


class Periodic(Protocol):
    """An endless program: the rows of its fill and its first period; `unroll` returns it with `count` periods."""

    fill: Sequence[Sequence[Instruction]]
    period: Sequence[Sequence[Instruction]]

    def unroll(self, count: int, /) -> Program: ...


class PeriodOrigin(NamedTuple):
    """The microbatch and the batch from which the numbers of a state are counted."""

    microbatch: int
    batch: int


# The state of a rank at a cut: a name for messages -> a value that can be compared.
_RankState = dict[str, Any]

# Codes that begin or end the keeping of gradients for a prediction: whether some are kept behind it.
_KEEPS = {CODE_OF_KIND[kind]: word.keeps == "gradients" for kind, word in WORDS.items()
          if word.keeps == "gradients" or word.is_prediction}  # fmt: skip


def prove_periods(compact: CompactProgram, *, fill: Sequence[int], period: Sequence[int], shift: PeriodOrigin) -> None:
    """Prove steps 2 and 3 of the induction.

    Args:
        compact: fill + period + drain, for which every proof of `check` holds.
        fill, period: per rank, the number of instructions of the fill and of the period.
        shift: the numbers of microbatches and batches that one period adds.

    Raises:
        ProgramError: for a rank whose states differ, or for ranks that wait for each other at a cut.
    """
    after_period = [first + second for first, second in zip(fill, period, strict=True)]
    before, after = states_at(compact, [list(fill), after_period], [PeriodOrigin(0, 0), shift])
    if found := difference(before, after):
        rank, reason = found
        raise compact.error(rank, after_period[rank], reason)


def states_at(
    compact: CompactProgram, cuts: Sequence[list[int]], origins: Sequence[PeriodOrigin]
) -> list[list[_RankState]]:
    """The states of all ranks at successive cuts through the rows.

    Args:
        compact: a program for which every proof of `check` holds.
        cuts: for each cut, the number of instructions of each row before it.
        origins: for each cut, the microbatch and the batch from which the numbers of its state are counted.

    Raises:
        ProgramError: for a cut that some rank reaches only after others have passed it.
    """
    execution, states = RowExecution(compact.program, moves=compact.awaited_moves), []
    for ends, origin in zip(cuts, origins, strict=True):
        run(execution, compact, ends)
        states.append(_state(compact, execution, ends, origin))
    return states


def difference(before: Sequence[_RankState], after: Sequence[_RankState]) -> tuple[int, str] | None:
    """The first rank whose state differs between the beginning and the end of a period, and the difference.

    None if all states agree.
    """
    for rank, (first, second) in enumerate(zip(before, after, strict=True)):
        for name in first | second:
            if first.get(name) != second.get(name):
                values = f"{name} is {first.get(name)} before it and {second.get(name)} after it"
                return rank, f"the period does not repeat: counted from its own start, {values}"
    return None


def prove_repetition(
    one: Program, two: Program, *, fill: Sequence[int], period: Sequence[int], shift: PeriodOrigin
) -> None:
    """Prove that the unrolled program repeats its period, as the induction assumes.

    `one` has one period and `two` has two. The second period and the drain of `two` must equal the period and the drain
    of `one`, shifted.

    Raises:
        ProgramError: for the first instruction of `two` that differs.
    """
    for rank, (row_of_one, row_of_two) in enumerate(zip(one.rows, two.rows, strict=True)):
        before, length = fill[rank], period[rank]
        again = (each.shifted(microbatches=shift.microbatch, versions=shift.batch) for each in row_of_one[before:])
        expected = [*row_of_one[: before + length], *again]
        if list(row_of_two) != expected:
            pairs = enumerate(zip(row_of_two, expected, strict=False))
            position = next(
                (position for position, (found, wanted) in pairs if found != wanted),
                min(len(row_of_two), len(expected)),
            )
            wanted = expected[position] if position < len(expected) else "the end of the row"
            raise error_at(two, rank, position, f"in the second of two periods {wanted} is due here")


def _state(compact: CompactProgram, execution: RowExecution, ends: list[int], origin: PeriodOrigin) -> list[_RankState]:
    """The state of each rank when every rank has executed `ends[rank]` instructions, counted from `origin`."""
    known = Facts(compact)
    states = [_rows_state(compact, known, rank, ends[rank], origin) for rank in range(len(ends))]
    for rank, state in enumerate(states):
        for queue, what in (execution.chains[rank], "the chain"), (execution.reports[rank], "the reports"):
            state[f"what is under way in {what} (code, version)"] = [
                (CODE_OF_KIND[each.kind], each.version - origin.batch) for _, _, each in queue.posted
            ]
    if compact.program.residency is not None:
        for rank, state in enumerate(states):
            state |= _host_state(compact, rank, ends[rank], execution.under_way(rank), origin)
    if compact.swaps:
        for rank, state in enumerate(states):
            state |= _swaps_state(compact, rank, ends[rank], origin)
    if compact.moves:
        for rank, state in enumerate(states):
            state |= _moves_state(compact, rank, ends, origin)
    sent, received = list_channels(compact, ends)
    for channel in sent.keys() | received.keys():
        code, sender, receiver = channel
        sends, receives = sent.get(channel, []), received.get(channel, [])
        common = min(len(sends), len(receives))
        for verb, end in ("sent and not received", sends), ("received and not sent", receives):
            tail = [microbatch - origin.microbatch for microbatch in end[common:]]
            what = f"what stage {sender} has {KIND_OF_CODE[code].value} to stage {receiver} {verb}"
            states[compact.rank_of_stage[sender]][what] = tail
    return states


def _rows_state(compact: CompactProgram, known: Facts, rank: int, end: int, origin: PeriodOrigin) -> _RankState:
    """The part of a rank's state that depends only on the first `end` instructions of its row."""
    width = compact.num_microbatches
    stages = compact.stages_of(rank)
    facts = {stage: known.none_yet(width) for stage in stages}
    forward_version: dict[int, int | None] = {}
    posted, made = Counter(), Counter()
    maker, owners = CODE_OF_KIND[compact.program.weights.maker], compact.program.owners(rank)
    keeps = False
    row = zip(
        compact.codes[rank][:end], compact.slots[rank][:end], compact.places[rank][:end], compact.versions[rank][:end],
        strict=True,
    )  # fmt: skip
    for code, slot, place, version in row:
        stage, index = divmod(place, width)
        facts[stage][index] |= known.added[slot]
        if code == F:
            forward_version[place] = version
            facts[stage][index] |= known.known.get(place, 0)
        elif code >= FIRST_UPDATE:
            posted[code, stage] += 1
            if code == maker:
                made.update(next(owned for owned in owners if stage in owned))
            if code in _KEEPS:
                keeps = _KEEPS[code]
    state: _RankState = {"whether gradients are kept for a prediction": keeps}
    for stage in stages:
        complete, taken = known.complete[stage], compact.program.indexes_taken(stage)
        begun = next((len(taken) - back for back, index in enumerate(reversed(taken)) if facts[stage][index]), 0)
        state[f"how many microbatches are begun at stage {stage}"] = begun - bisect_left(taken, origin.microbatch)
        state[f"what is under way at stage {stage} (microbatch, facts, version)"] = [
            (index - origin.microbatch, found, _minus(forward_version.get(stage * width + index), origin.batch))
            for index in taken[:begun]
            if (found := facts[stage][index]) != complete
        ]
        if not compact.versioned:
            continue
        oldest, next_version = _versions_at(compact, stage, facts[stage], made[stage])
        state[f"the oldest version of stage {stage}"] = oldest - origin.batch
        state[f"the version of the next batch at stage {stage}"] = next_version - origin.batch
    codes = (*chain_of_rank(compact, rank), *codes_of_predictions(compact, rank))
    for code in codes if compact.versioned else ():
        for owned in owners[:1] if code == REDUCE_NORM else owners:
            where = "stand on the rank" if len(owners) == 1 else f"stage {owned[0]} has"
            state[f"how many {KIND_OF_CODE[code].value} {where}"] = posted[code, owned[0]] - origin.batch
    return state


def _host_state(
    compact: CompactProgram, rank: int, end: int, posted: Sequence[int], origin: PeriodOrigin
) -> _RankState:
    """The part of a rank's state about weights and inputs on the host.

    `posted`: the positions of the words that its lanes have not completed.
    """
    row = compact.program.rows[rank]
    resident: dict[int, int] = {}
    in_use: set[int] = set()
    counts: Counter[tuple[Kind, int]] = Counter()
    for each in row[:end]:
        counts[each.kind, each.stage] += 1
        if each.kind is Kind.FETCH:
            resident[each.stage] = each.version - origin.batch
        elif each.kind is Kind.FREE:
            del resident[each.stage]
        elif each.kind in ENDS_BACKWARD:
            in_use.add(each.stage)
        elif each.kind is Kind.STORE_GRAD:
            in_use.discard(each.stage)
    under_way = [row[position] for position in posted]
    state: _RankState = {
        "what is resident (stage, version)": resident,
        "which stages have a gradient buffer": in_use,
        "what waits on the host (stage, microbatch)": _on_host(row[:end], origin),
        "what is under way between device and host (kind, stage, version or microbatch)": [
            (each.kind.value, each.stage, _number(each, origin)) for each in under_way
        ],
    }
    for code in codes_of_host_updates(compact):
        kind = KIND_OF_CODE[code]
        state[f"how many {kind.value} each stage of the rank has"] = [
            counts[kind, stage] - origin.batch for stage in compact.program.trained_stages_of(rank)
        ]
    return state


def _on_host(row: Row, origin: PeriodOrigin) -> set[tuple[int, int]]:
    """The microbatches, with their stages, whose inputs or activations are on the host at the end of the row."""
    there: set[tuple[int, int]] = set()
    for each in row:
        if each.kind in STASH_WORDS:
            (there.add if each.kind in OFFLOADS else there.discard)((each.stage, _number(each, origin)))
    return there


def _number(instruction: Instruction, origin: PeriodOrigin) -> int:
    if instruction.microbatch is None:
        return instruction.version - origin.batch
    return instruction.microbatch - origin.microbatch


def _moves_state(compact: CompactProgram, rank: int, ends: list[int], origin: PeriodOrigin) -> _RankState:
    """The part of a rank's state about moves of activations."""
    row, partner = compact.program.rows[rank], compact.partners[rank]
    own = [row[position] for position in moves_of_rank(compact, rank, ends[rank])]
    met = len(moves_of_rank(compact, partner, ends[partner]))
    order = MoveOrder(num_frozen=compact.program.pairs.num_frozen)
    for instruction in row[: ends[rank]]:
        order.awaited(instruction)
    state: _RankState = {}
    for stage in compact.stages_of(rank):
        here = [each for each in own if each.stage == stage]
        away = {each.microbatch for each in here if each.kind.row.leaves}
        away -= {each.microbatch for each in here if not each.kind.row.leaves}
        first = compact.program.first_microbatch + origin.microbatch
        state[f"what is away from stage {stage} or lent to it"] = sorted(each - first for each in away)
    state |= _held_state(compact, rank, ends[rank])
    state["what moves (kind, stage, microbatch)"] = [
        (each.kind.value, each.stage, each.microbatch - origin.microbatch) for each in own[met:]
    ]
    state["which moves, counted from the last, are still awaited"] = order.still_awaited()
    return state


def _held_state(compact: CompactProgram, rank: int, end: int) -> _RankState:
    """The part of a rank's state about the microbatches that its stages hold at the worst timing."""
    return {
        f"how many microbatches stage {stage} has in flight, and holds more than that": (held.own, held.moved)
        for stage, held in hold(compact, rank, end).items()
    }


def _swaps_state(compact: CompactProgram, rank: int, end: int, origin: PeriodOrigin) -> _RankState:
    """The part of a rank's state about activations on the host, and about copies that are still awaited."""
    row, order = compact.program.rows[rank][:end], LaneOrder(compact.num_stages)
    num_copies = sum(each.kind in SWAPS for each in row)
    may_hold = {
        f"what stage {stage} may hold before copies, counted from the last, are complete": [
            (num_copies - number, change - held.moved) for number, change in held.before
        ]
        for stage, held in hold(compact, rank, end).items()
    }
    for each in row:
        order.awaited(each)
    used = {(each.stage, each.microbatch) for each in row if each.kind in USES_SAVED}  # their copies are complete
    awaited = (row[number] for number in order.still_awaited())
    return (
        _held_state(compact, rank, end)
        | may_hold
        | {
            "what waits on the host (stage, microbatch)": _on_host(row, origin),
            "which copies to and from the host are still awaited (kind, stage, microbatch)": [
                (each.kind.value, each.stage, _number(each, origin))
                for each in awaited
                if each.kind in SWAPS and (each.stage, each.microbatch) not in used
            ],
        }
    )


def _minus(version: int | None, batches: int) -> int | None:
    return None if version is None else version - batches


def _versions_at(compact: CompactProgram, stage: int, facts: Sequence[int], num_made: int) -> tuple[int, int]:
    """The oldest version that a stage keeps after `num_made` new ones, and the version of its next batch.

    If stages always use their newest version, it is also the oldest; other versions are kept only for microbatches in
    flight.
    """
    program = compact.program
    newest = program.first_batch + num_made
    delay = program.weights.delay or 0
    index = next((index for index in program.indexes_taken(stage) if not facts[index]), len(facts))
    following = program.version_of_forward(stage, program.first_microbatch + index)
    return max(newest - delay, min(program.entry_versions)), following
