"""Proof: an optimistic step is validated by all ranks at one cut, and a refused one can be undone by all of them.

STEP@v stands before REDUCE_NORM@v, and VALIDATE@v is the last link of the chain (`updates`). That proof also shows that
a rank has at most one step that is not validated, and no gradients of the next batch before the VALIDATE.

Proof: no instruction before the VALIDATEs of version v waits for an instruction behind them. The send of each receive
before its rank's VALIDATE@v stands before the VALIDATE@v of the sending rank.

**A program with ROLLBACK@v** is one in which all ranks refuse the STEP to version v. It is proved in two parts:

- The part up to the ROLLBACKs. Between VALIDATE@v and its ROLLBACK@v there are only receives. Between REDUCE_NORM@v and
  VALIDATE@v there are only words of batch v, and the row behind ROLLBACK begins with the same words. Every rank reaches
  its ROLLBACK while the others stop at theirs, and then every send has been received. So there is a state in which
  nothing is in flight, and every rank has its state behind REDUCE_NORM@v, plus only what ROLLBACK drops.
- The program without the dropped words, the receives and the ROLLBACK. It is proved like any other program. In it
  VALIDATE@v directly follows REDUCE_NORM@v.
"""

from collections.abc import Sequence

from megatron.pipeline.check.compact import KIND_OF_CODE, STEP, VALIDATE, CompactProgram, compact, error_at
from megatron.pipeline.check.progress import explain_deadlock, list_channels
from megatron.pipeline.graph.row_graph import RowExecution
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program


def prove_validations(compact: CompactProgram) -> tuple[int, ...]:
    """Prove that every cut of VALIDATEs has the sends of its receives before it.

    Args:
        compact: a program whose transfers and updates are proved.

    Returns:
        For each rank, the largest number of steps that are not validated; empty if steps are not optimistic.

    Raises:
        ProgramError: for the first receive before a VALIDATE whose send comes too late.
    """
    program = compact.program
    if not program.optimistic:
        return ()
    for version in range(program.first_batch + 1, program.first_batch + len(program.batches) + 1):
        cut = [
            next(position for position, (code, _, made) in compact.row(rank) if (code, made) == (VALIDATE, version))
            for rank in range(program.num_ranks)
        ]
        sent, received = list_channels(compact, cut)
        for channel, microbatches in received.items():
            num_sent = len(sent.get(channel, ()))
            if len(microbatches) > num_sent:
                _raise_too_early(compact, cut, channel, microbatches[num_sent], version)
    return tuple(_peak(compact, rank) for rank in range(program.num_ranks))


def _raise_too_early(
    compact: CompactProgram, cut: Sequence[int], channel: tuple[int, int, int], microbatch: int, version: int
) -> None:
    send, sender, receiver = channel
    word = compact.word(send, sender * compact.num_microbatches + microbatch, receiver)
    raise compact.error(
        *compact.receive(channel, microbatch),
        f"it stands before the {KIND_OF_CODE[VALIDATE].value}@{version} of its rank, and {word} behind that of rank "
        f"{compact.rank_of_stage[sender]}, so a refused step would leave it in flight",
    )


def _peak(compact: CompactProgram, rank: int) -> int:
    count = peak = 0
    for _, (code, _, _) in compact.row(rank):
        count += (code == STEP) - (code == VALIDATE)
        peak = max(peak, count)
    return peak


def without_refused(program: Program) -> Program:
    """Prove the part of a program up to its ROLLBACKs, and return the program without the words that they drop.

    A program without ROLLBACK is returned as it is.

    Raises:
        ProgramError: for a ROLLBACK out of place, or a transfer that is in flight at the ROLLBACKs.
    """
    if not any(each.kind is Kind.ROLLBACK for row in program.rows for each in row):
        return program
    heads, rest, version = [], [], None
    for rank, row in enumerate(program.rows):
        places = [place for place, each in enumerate(row) if each.kind is Kind.ROLLBACK]
        if len(places) != 1 or row[places[0]].version != (version := version or row[places[0]].version):
            raise error_at(program, rank, len(row), "every rank rolls back the same step, once, and this one does not")
        norm = _place(program, rank, Kind.REDUCE_NORM, version)
        validate = _place(program, rank, Kind.VALIDATE, version)
        heads.append(row[: places[0]])
        _prove_place(program, rank, norm, validate, places[0])
        rest.append((*row[: norm + 1], row[validate], *row[places[0] + 1 :]))
    _prove_drained(program.with_rows(tuple(heads)))
    return program.with_rows(tuple(rest))


def _place(program: Program, rank: int, kind: Kind, version: int) -> int:
    row = program.rows[rank]
    place = next((place for place, each in enumerate(row) if (each.kind, each.version) == (kind, version)), None)
    if place is None:
        raise error_at(program, rank, len(row), f"no {kind.value}@{version} stands before the ROLLBACK of its version")
    return place


def _prove_place(program: Program, rank: int, norm: int, validate: int, rollback: int) -> None:
    """Prove what stands between REDUCE_NORM and ROLLBACK, and that the batch begins again behind it."""
    row, version = program.rows[rank], program.rows[rank][rollback].version
    if not norm < validate < rollback:
        raise error_at(program, rank, rollback, "REDUCE_NORM and VALIDATE of its version come before it, in this order")
    for place in range(validate + 1, rollback):
        if row[place].kind.row.receives is None:
            raise error_at(
                program, rank, place, "between a VALIDATE that refuses and its ROLLBACK a rank only receives"
            )
    dropped = range(norm + 1, validate)
    for place, again in zip(dropped, row[rollback + 1 :], strict=False):
        if row[place] != again or _batch_of(program, again) != version:
            raise error_at(program, rank, place, f"batch {version} does not begin again with it behind the ROLLBACK")
    if len(dropped) > len(row) - rollback - 1:
        raise error_at(program, rank, len(row), f"batch {version} does not begin again behind the ROLLBACK")


def _batch_of(program: Program, instruction: Instruction) -> int | None:
    return None if instruction.microbatch is None else program.batch_of(instruction.microbatch)


def _prove_drained(head: Program) -> None:
    """Prove that every rank reaches the end of its row, and that nothing is in flight then.

    Raises:
        ProgramError: for a rank that does not, or a transfer that one end has not posted.
    """
    compacted = compact(head)
    execution, ends = RowExecution(head), list(map(len, head.rows))
    if execution.reach(ends) != ends:
        raise compacted.error(*explain_deadlock(execution))
    sent, received = list_channels(compacted, ends)
    for channel in sent.keys() | received.keys():
        if sent.get(channel, []) != received.get(channel, []):
            _, sender, receiver = channel
            reason = f"stage {receiver} does not receive before it all that stage {sender} sends before it"
            raise compacted.error(compacted.rank_of_stage[receiver], ends[compacted.rank_of_stage[receiver]], reason)
