"""A program that somebody brings, made complete: what its rows leave out is added by the passes.

Rows with computations alone are an order, such as the compute-only files of torch.distributed.pipelining hold. They get
what any order gets. Each concern is left alone where the rows have it already, so the places of what is written are the
file's:

    rows have no      added by
    R                 recompute, where the program shall recompute and has no updates of its own
    REDUCE, STEP      updates
    @version          versions
    SEND, RECV        communication
"""

from collections.abc import Iterator, Sequence

from megatron.pipeline.check import check
from megatron.pipeline.check.compact import compact
from megatron.pipeline.check.error import error_at
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import RECEIVES, SENDS, UPDATES, Instruction, Kind, Row, Rows
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.passes import Segments
from megatron.pipeline.schedules.passes.communication import add_communication
from megatron.pipeline.schedules.passes.recompute import add_recompute
from megatron.pipeline.schedules.passes.updates import add_updates
from megatron.pipeline.schedules.passes.versions import set_versions


def completed(program: Program) -> Program:
    """The program with what its rows leave out.

    Raises:
        ProgramError: rows that are wrong, as they are or completed.
        ValueError: a program that evaluates, or one that only whole rows can say.
    """
    require_training(program)
    compact(program)
    kinds = {each.kind for row in program.rows for each in row}
    adds_updates = not kinds & UPDATES
    if program.weights.predicts and adds_updates:
        raise ValueError(
            f"weights {program.weights.name} are predicted where the rows say it; add the updates and PREDICT of each "
            "batch, as `tools/schedule.py show --csv` writes them"
        )
    segments = [_segments(program, row) for row in program.rows]
    if program.recompute and Kind.RECOMPUTE not in kinds and adds_updates:
        segments = [add_recompute(each, program) for each in segments]
    if not adds_updates and not names_versions(program.rows):
        segments = [set_versions(each, program) for each in segments]
    check(_joined(program, segments))
    if adds_updates:
        segments = [add_updates(each, rank, program) for rank, each in enumerate(segments)]
        segments = [set_versions(each, program) for each in segments]
    if program.num_ranks > 1 and not kinds & (SENDS | RECEIVES):
        segments = add_communication(segments, program)
    complete = _joined(program, segments)
    check(complete)
    return complete


def require_training(program: Program) -> None:
    """Raises ValueError for a program that no run can train with, whatever is added to it."""
    if program.forward_only:
        raise ValueError("the rows have forwards alone, so they train nothing; add a backward for each")
    if program.residency is not None:
        raise ValueError("weights live on the host (residency), and a run with them follows the preset l2l; use that")
    if not program.global_norm:
        raise ValueError(
            "there is no REDUCE_NORM (global_norm: no), and with it travel losses and requests to stop; add one to "
            "each batch's chain, on every rank"
        )


def _joined(program: Program, segments_of_rank: Sequence[Segments]) -> Program:
    return program.with_rows(tuple(tuple(each for part in parts for each in part) for parts in segments_of_rank))


def names_versions(rows: Rows) -> bool:
    """Whether some computation says which weights it uses."""
    return any(each.version is not None for row in rows for each in row if each.kind.is_computation)


def _segments(extent: Extent, row: Row) -> Segments:
    """A row, cut where each batch's first computation stands; behind the last batch's segment nothing is left."""
    cuts, newest = [], extent.first_batch
    for position, each in enumerate(row):
        if each.kind.is_computation and extent.batch_of(each.microbatch) > newest:
            cuts += [position] * (extent.batch_of(each.microbatch) - newest)
            newest = extent.batch_of(each.microbatch)
    cuts += [len(row)] * (extent.first_batch + len(extent.batches) - newest)
    return [list(row[begin:end]) for begin, end in zip((0, *cuts), (*cuts, len(row)), strict=True)]


def without_versions(rows: Rows) -> Rows:
    """The rows, with nothing said of the weights that computations use: that follows from the policy."""
    return tuple(tuple(_bare(row)) for row in rows)


def _bare(row: Row) -> Iterator[Instruction]:
    for each in row:
        yield Instruction(each.kind, each.stage, each.microbatch, peer=each.peer) if each.kind.is_computation else each


def require_equal_batches(program: Program) -> int:
    """The number of microbatches of each batch. Raises ProgramError where batches differ."""
    sizes = program.batches
    if len(set(sizes)) == 1:
        return sizes[0]
    other = next(index for index, size in enumerate(sizes) if size != sizes[0])
    first = program.first_microbatch + sum(sizes[:other])
    row = program.rows[program.rank_of_stage[0]]
    position = next(at for at, each in enumerate(row) if each.microbatch == first)
    raise error_at(
        program, program.rank_of_stage[0], position,
        f"batches of {' '.join(map(str, sizes))} microbatches are not alike, so the rows say nothing of a run of any "
        "number of them; write a file for each size",
    )  # fmt: skip
