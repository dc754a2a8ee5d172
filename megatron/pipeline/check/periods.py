"""Proof: fill, any number of periods, and drain make a good program, whatever the number.

By induction over the number of periods, on the *state* between them:

1. fill + period + drain is a good program: every proof of `check` holds for it.
2. Every rank can execute its fill before any rank begins its period, and its period before any rank begins its drain.
   So the state after the fill and the state after the period are states that an execution reaches. An execution that
   reaches them reaches every state that any other reaches, for what a rank does depends on no other rank's speed (see
   `megatron.pipeline.graph`): rows cut there may be reasoned about one part at a time.
3. The state after the period equals the state after the fill, with microbatches, batches and versions counted from one
   period later.
4. What an instruction needs, what it does, and every bound are stated in terms of that state, and none in absolute
   numbers. The exception is the start of a run, where several batches use the same version; so the version that the
   policy gives to the next batch is a part of the state.

From 3 and 4, a second period, shifted by one, executes as the first did and ends in the same state, shifted by one
more; and the drain, shifted, ends drained after each of them, and after none. Live versions are those of step 1,
and so are peaks where nothing moves.

The state at a cut is, for each stage: which facts hold of each microbatch that has been touched and is not complete,
and the version of its forward; which versions are live; the version of the next batch; what is away or lent, and how
much it holds. For each rank: how many of each link of its chain stand; its reductions that are posted and not complete;
the moves that its partner has not requested, and those that are still awaited. Where weights live on the host: which
are on the device, whose gradients are in a buffer, which inputs the host has, and what its lanes cannot have completed
yet. For each channel: what only one of its ends has posted.

How many moves may be under way at worst is no part of the state: an acceptor waits for none, so from its own row alone
any number may be. What it holds at worst repeats from the second period on, in which the whole first one may be under
way; so peaks are taken from two periods.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from megatron.pipeline.check.balance import moves_of_rank
from megatron.pipeline.check.compact import (
    CODE_OF_KIND,
    FIRST_UPDATE,
    KIND_OF_CODE,
    REDUCE_NORM,
    CompactProgram,
    F,
    error_at,
)
from megatron.pipeline.check.computations import Facts
from megatron.pipeline.check.memory import hold
from megatron.pipeline.check.predictions import codes_of_predictions
from megatron.pipeline.check.progress import list_channels, run
from megatron.pipeline.check.residency import codes_of_host_updates
from megatron.pipeline.check.updates import chain_of_rank
from megatron.pipeline.graph.row_graph import RowExecution
from megatron.pipeline.program.instruction import ENDS_BACKWARD, OFFLOADS, RELOADS, WORDS, Instruction, Kind
from megatron.pipeline.program.move_order import MoveOrder
from megatron.pipeline.program.program import Program


class Periodic(Protocol):
    """A program without an end: the rows of its fill and of its first period, and the whole with `count` periods."""

    fill: Sequence[Sequence[Instruction]]
    period: Sequence[Sequence[Instruction]]

    def unroll(self, count: int, /) -> Program: ...


class PeriodOrigin(NamedTuple):
    """What the numbers of a state are counted from."""

    microbatch: int
    batch: int


# What is said of a rank at a cut: a name for messages -> a value that can be compared.
_RankState = dict[str, Any]

# Codes that begin or end the keeping of gradients for a prediction: whether some are kept behind it.
_KEEPS = {CODE_OF_KIND[kind]: word.keeps == "gradients" for kind, word in WORDS.items()
          if word.keeps == "gradients" or word.is_prediction}  # fmt: skip


def prove_periods(compact: CompactProgram, *, fill: Sequence[int], period: Sequence[int], shift: PeriodOrigin) -> None:
    """Prove steps 2 and 3.

    Args:
        compact: fill + period + drain, for which every proof of `check` holds.
        fill, period: how many instructions of each row belong to the fill and to the period.
        shift: how many microbatches and batches one period adds.

    Raises:
        ProgramError: naming the rank whose state differs, or who waits for whom at a cut.
    """
    after_period = [first + second for first, second in zip(fill, period, strict=True)]
    before, after = states_at(compact, [list(fill), after_period], [PeriodOrigin(0, 0), shift])
    if found := difference(before, after):
        rank, reason = found
        raise compact.error(rank, after_period[rank], reason)


def states_at(
    compact: CompactProgram, cuts: Sequence[list[int]], origins: Sequence[PeriodOrigin]
) -> list[list[_RankState]]:
    """The states at cuts through all rows, each behind the one before it, rank by rank.

    Args:
        compact: a program for which every proof of `check` holds.
        cuts: how many instructions of each row stand before each cut.
        origins: what the numbers of each state are counted from.

    Raises:
        ProgramError: a cut that some rank reaches only once others have gone beyond it.
    """
    execution, states = RowExecution(compact.program, moves=compact.awaited_moves), []
    for ends, origin in zip(cuts, origins, strict=True):
        run(execution, compact, ends)
        states.append(_state(compact, execution, ends, origin))
    return states


def difference(before: Sequence[_RankState], after: Sequence[_RankState]) -> tuple[int, str] | None:
    """The first rank whose state at the end of a period is not that at its beginning, and how; None: all agree."""
    for rank, (first, second) in enumerate(zip(before, after, strict=True)):
        for name in first | second:
            if first.get(name) != second.get(name):
                values = f"{name} is {first.get(name)} before it and {second.get(name)} after it"
                return rank, f"the period does not repeat: counted from its own start, {values}"
    return None


def prove_repetition(
    one: Program, two: Program, *, fill: Sequence[int], period: Sequence[int], shift: PeriodOrigin
) -> None:
    """Prove that the second period of `two` is its first one shifted, and so its drain: what the induction is about is
    what is unrolled.

    Raises:
        ProgramError: naming the first instruction of `two` that is another one.
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
    """The state when every rank has executed `ends[rank]` instructions, counted from `origin`, rank by rank."""
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
    """What follows from the first `end` instructions of one row alone."""
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
        elif code >= FIRST_UPDATE:
            posted[code, stage] += 1
            if code == maker:
                made.update(next(owned for owned in owners if stage in owned))
            if code in _KEEPS:
                keeps = _KEEPS[code]
    state: _RankState = {"whether gradients are kept for a prediction": keeps}
    for stage in stages:
        complete = known.complete[stage]
        begun = next((width - back for back, found in enumerate(reversed(facts[stage])) if found), 0)
        state[f"how many microbatches are begun at stage {stage}"] = begun - origin.microbatch
        state[f"what is under way at stage {stage} (microbatch, facts, version)"] = [
            (index - origin.microbatch, found, _minus(forward_version.get(stage * width + index), origin.batch))
            for index, found in enumerate(facts[stage][:begun])
            if found != complete
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
    """What a rank's words to and from the host before a cut leave to those after it. `posted`: the positions of those
    that its lanes have not completed.
    """
    row = compact.program.rows[rank]
    resident: dict[int, int] = {}
    in_use: set[int] = set()
    away: set[tuple[int, int]] = set()
    counts: Counter[tuple[Kind, int]] = Counter()
    for each in row[:end]:
        counts[each.kind, each.stage] += 1
        if each.kind in OFFLOADS:
            away.add((each.stage, each.microbatch - origin.microbatch))
        elif each.kind in RELOADS:
            away.discard((each.stage, each.microbatch - origin.microbatch))
        elif each.kind is Kind.FETCH:
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
        "which inputs the host has (stage, microbatch)": away,
        "what is under way between device and host (kind, stage, version or microbatch)": [
            (each.kind.value, each.stage, _number(each, origin)) for each in under_way
        ],
    }
    for code in codes_of_host_updates(compact):
        kind = KIND_OF_CODE[code]
        state[f"how many {kind.value} each stage of the rank has"] = [
            counts[kind, stage] - origin.batch for stage in compact.stages_of(rank)
        ]
    return state


def _number(instruction: Instruction, origin: PeriodOrigin) -> int:
    if instruction.microbatch is None:
        return instruction.version - origin.batch
    return instruction.microbatch - origin.microbatch


def _moves_state(compact: CompactProgram, rank: int, ends: list[int], origin: PeriodOrigin) -> _RankState:
    """What a rank's moves before a cut leave to those after it."""
    row, partner = compact.program.rows[rank], compact.partners[rank]
    own = [row[position] for position in moves_of_rank(compact, rank, ends[rank])]
    met = len(moves_of_rank(compact, partner, ends[partner]))
    order = MoveOrder(num_frozen=compact.program.pairs.num_frozen)
    for instruction in row[: ends[rank]]:
        order.awaited(instruction)
    state: _RankState = {}
    for stage, held in hold(compact, rank, ends[rank]).items():
        here = [each for each in own if each.stage == stage]
        away = {each.microbatch for each in here if each.kind.row.leaves}
        away -= {each.microbatch for each in here if not each.kind.row.leaves}
        first = compact.program.first_microbatch + origin.microbatch
        state[f"what is away from stage {stage} or lent to it"] = sorted(each - first for each in away)
        state[f"how many microbatches stage {stage} has in flight, and holds more than that"] = held.own, held.moved
    state["what moves (kind, stage, microbatch)"] = [
        (each.kind.value, each.stage, each.microbatch - origin.microbatch) for each in own[met:]
    ]
    state["which moves, counted from the last, are still awaited"] = order.still_awaited()
    return state


def _minus(version: int | None, batches: int) -> int | None:
    return None if version is None else version - batches


def _versions_at(compact: CompactProgram, stage: int, facts: Sequence[int], num_made: int) -> tuple[int, int]:
    """The oldest version that a stage keeps after so many were made, and the one that the policy gives its next batch.

    Where stages use their newest version, it is also the oldest; what else is kept is what is under way.
    """
    program, index = compact.program, facts.index(0) if 0 in facts else -1
    newest = program.first_batch + num_made
    delay = program.weights.delay or 0
    index = len(facts) if index < 0 else index
    following = program.version_of_forward(stage, program.first_microbatch + index)
    return max(newest - delay, min(program.entry_versions)), following
