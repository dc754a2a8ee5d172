"""Complete a program that a user wrote: the passes add the instructions that its rows leave out.

Rows that contain only computations are an order, such as those in compute-only files of torch.distributed.pipelining.
The passes complete them like any other order. A pass is skipped if the rows already have its instructions, so these
stay at the places that the user gave them:

    if rows have no   they are added by the pass
    R                 recompute, if the program recomputes and has no updates of its own
    REDUCE, STEP      updates, and predictions if the program says what they read
    @version          versions
    SEND, RECV        communication
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.check.compact import compact, error_at
from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.instruction import ENDS_BACKWARD, RECEIVES, SENDS, UPDATES, Instruction, Kind, Rows
from megatron.pipeline.program.program import Program, shifted_row
from megatron.pipeline.schedules.continuation import Continuation, cuts_of, find_repetition
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.activations import add_recompute
from megatron.pipeline.schedules.passes.communication import add_communication
from megatron.pipeline.schedules.passes.updates import (
    add_predictions,
    add_updates,
    set_versions,
    without_versions,
)


def completed(
    program: Program, *, fill: int | None = None, period: int | None = None, receives_ahead: int = 1
) -> Program:
    """Return the program with the instructions that its rows leave out.

    Args:
        program: a program from a drained state to a drained state.
        fill, period: how the rows repeat (see `continuation.Repetition`); None: to be found.
        receives_ahead: an added receive stands this many computations before the one that needs the tensor.

    Raises:
        ProgramError: the rows are wrong, before or after their completion.
        ValueError: the program does not train, or has weights on the host, or no REDUCE_NORM; or its weights predict,
            the rows leave out the updates, and the program does not say what predictions read; or `receives_ahead` is
            more than 1, and the rows have transfers.
    """
    require_training(program)
    compact(program)
    kinds = {each.kind for row in program.rows for each in row}
    adds_updates = not kinds & UPDATES
    if receives_ahead > 1 and kinds & (SENDS | RECEIVES):
        raise ValueError(f"the rows have receives, so receives_ahead: {receives_ahead} has no effect; drop it")
    if program.weights.predicts and adds_updates and not program.says_what_predictions_read:
        raise ValueError(
            f"weights {program.weights.name} are predicted, and nothing says from which microbatches; add `# unread:` "
            "with a number for each stage, or the updates and PREDICT of each batch, as `tools/schedule.py show --csv` "
            "writes them"
        )
    if adds_updates and names_versions(program.rows):
        bare = program.with_rows(without_versions(program.rows))
        return _with_versions_of(program, completed(bare, fill=fill, period=period, receives_ahead=receives_ahead))
    if program.recompute and Kind.RECOMPUTE not in kinds and adds_updates:
        program = program.with_rows(tuple(tuple(add_recompute([list(row)], program)[0]) for row in program.rows))
    if not adds_updates and not names_versions(program.rows):
        program = program.with_rows(tuple(tuple(set_versions([list(row)], program)[0]) for row in program.rows))
    check(program)
    communicates = program.num_ranks == 1 or kinds & (SENDS | RECEIVES)
    if communicates and not adds_updates:
        return program
    at_end = list(map(len, program.rows))
    lowered = partial(
        _lowered, adds_updates=adds_updates, communicates=bool(communicates), receives_ahead=receives_ahead
    )
    drains = _drains(program, fill, period)
    if drains != at_end:
        complete = lowered(program, drains)
        with suppress(ProgramError):  # a STEP there may wait for a later instruction of another rank
            check(complete)
            return complete
    complete = lowered(program, at_end)
    check(complete)
    return complete


def _with_versions_of(stated: Program, complete: Program) -> Program:
    """Return the completed program. Raises ProgramError if a computation uses another version than is stated."""
    for rank, (row, own) in enumerate(zip(complete.rows, stated.rows, strict=True)):
        says = {(each.kind, each.stage, each.microbatch): each.version for each in own if each.kind.is_computation}
        for position, each in enumerate(row):
            version = says.get((each.kind, each.stage, each.microbatch))
            if version is not None and version != each.version:
                raise error_at(
                    complete, rank, position,
                    f"the rows say version {version}, and {complete.weights.name} gives it {each.version}",
                )  # fmt: skip
    return complete


def require_training(program: Program) -> None:
    """Raise ValueError for a program that no run can train with, even after completion."""
    if program.forward_only:
        raise ValueError("the rows have forwards alone, so they train nothing; add a backward for each")
    if program.residency is not None:
        raise ValueError("weights live on the host (residency), which only the preset l2l can run; use l2l")
    if program.optimistic:
        raise ValueError(
            "its steps do not wait for their norm (optimistic: yes), and the rows of a file have no words for steps "
            "that are refused; name a schedule and add --optimistic-steps"
        )
    if not program.global_norm:
        raise ValueError(
            "there is no REDUCE_NORM (global_norm: no), which also carries losses and stop requests; add one to each "
            "batch's chain, on every rank"
        )


def _lowered(
    program: Program, drains: Sequence[int], *, adds_updates: bool, communicates: bool, receives_ahead: int
) -> Program:
    """Return the program with updates and transfers added, if each rank drains from its position in `drains` on."""
    segments = _segments(program, drains)
    if adds_updates:
        segments = [add_updates(each, rank, program) for rank, each in enumerate(segments)]
        if program.weights.predicts:
            program.require_what_predictions_read()
            segments = [add_predictions(each, rank, program) for rank, each in enumerate(segments)]
        segments = [set_versions(each, program) for each in segments]
    if not communicates:
        segments = add_communication(segments, program, receives_ahead=receives_ahead)
    return program.with_rows(tuple(tuple(each for part in parts for each in part) for parts in segments))


def names_versions(rows: Rows) -> bool:
    """Whether some computation names the weight version that it uses."""
    return any(each.version is not None for row in rows for each in row if each.kind.is_computation)


def _segments(program: Program, ends: Sequence[int]) -> list[Segments]:
    """Cut the rows at the first computation of each batch, and at `ends`, where the drains of the ranks begin."""
    segments_of_rank = []
    for row, end in zip(program.rows, ends, strict=True):
        cuts, newest = [], program.first_batch
        for position, each in enumerate(row):
            if each.kind.is_computation and program.batch_of(each.microbatch) > newest:
                cuts += [position] * (program.batch_of(each.microbatch) - newest)
                newest = program.batch_of(each.microbatch)
        cuts += [max([*cuts[-1:], end])] * (program.first_batch + len(program.batches) - newest)
        segments_of_rank.append([list(row[begin:end]) for begin, end in pairwise((0, *cuts, len(row)))])
    return segments_of_rank


def _drains(program: Program, fill: int | None, period: int | None) -> list[int]:
    """Return the position at which the drain of each rank begins.

    The drain begins after the instructions that the rank would also run if another batch followed, and after the
    backwards whose gradients the last STEP before the drain needs. If the rows do not tell, it begins at their end.
    """
    ends = list(map(len, program.rows))
    size, num_batches = program.batches[0], len(program.batches)
    if program.weights.drains or num_batches == 1 or set(program.batches) != {size}:
        return ends
    begun = cuts_of(program)
    has_updates = any(each.kind in UPDATES for row in program.rows for each in row)
    settled = renumbered(program, program.weights.first_settled_batch) if has_updates else program
    repetition = find_repetition(settled, begun, fill=fill, period=period)
    heads = Continuation(program, repetition).heads(num_batches - 1)
    last = program.first_microbatch + size * (num_batches - (program.weights.delay or 0))
    for rank, row in enumerate(program.rows):
        needed = (at + 1 for at, each in enumerate(row) if each.kind in ENDS_BACKWARD and each.microbatch < last)
        ends[rank] = max(begun[-2][rank] + heads[rank], max(needed, default=0))
    return ends


def require_equal_batches(program: Program) -> int:
    """Return the number of microbatches of each batch. Raises ProgramError if batches differ in size."""
    sizes = program.batches
    if len(set(sizes)) == 1:
        return sizes[0]
    other = next(index for index, size in enumerate(sizes) if size != sizes[0])
    first = program.first_microbatch + sum(sizes[:other])
    rank = program.rank_of_stage[next(stage for stage in range(program.num_stages) if program.takes(stage, first))]
    position = next(at for at, each in enumerate(program.rows[rank]) if each.microbatch == first)
    raise error_at(
        program, rank, position,
        f"batches of {' '.join(map(str, sizes))} microbatches differ in size, so their rows cannot repeat in a longer "
        "run; write a file for each size",
    )  # fmt: skip


def renumbered(program: Program, first_batch: int) -> Program:
    """Return a complete program renumbered from microbatch 0 and `first_batch`, with the versions of its policy."""
    microbatches, versions = -program.first_microbatch, first_batch - program.first_batch
    extent = replace(program, rows=(), first_batch=first_batch, first_microbatch=0)
    bare = ([_named_where_needed(each, program.graph) for each in row] for row in without_versions(program.rows))
    rows = (shifted_row(row, microbatches=microbatches, versions=versions) for row in bare)
    return extent.with_rows(tuple(tuple(set_versions([list(row)], extent)[0]) for row in rows))


def _named_where_needed(each: Instruction, graph: StageGraph) -> Instruction:
    """Remove the peer of a transfer with only one possible peer, so that equal programs have equal texts."""
    if each.peer is None:
        return each
    between_stages = each.kind in SENDS or each.kind in RECEIVES
    return replace(each, peer=graph.named_peer(each, each.peer) if between_stages else None)
