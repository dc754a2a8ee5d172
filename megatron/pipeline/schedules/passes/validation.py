"""The pass for optimistic steps: where ranks validate a step, and how they begin the batch again if it is refused.

A flush ends with the norm of all gradients, and no rank steps before it. So fill and drain add up, although the ranks
that drain first could begin the next batch. If steps are optimistic, STEP@v stands before REDUCE_NORM@v. It assumes
that nothing overflows and that the norm clips nothing. VALIDATE@v waits for the norm, and stands in the next batch.

**The place** (`add_validations`). VALIDATE@v is the same cut through the next batch for every run. It stands

- before all backwards of the batch at its rank. So the reduced gradients may stay in the gradient buffer until they are
  no longer needed;
- behind no receive whose send stands behind the VALIDATE@v of the sending rank. So every receive before the cut
  completes without any instruction behind the cut. In particular no receive of a gradient comes before the cut.

It is the latest such cut. If the run drains before the next batch, VALIDATE is all that is left to do.

**The continuation** (`continuation`) is what a rank does if VALIDATE@v refuses the step. All ranks refuse it, since all
read the same sums. The rank first receives each tensor that another rank sent before the cut and that it did not
receive before its own. Then nothing is in flight. ROLLBACK@v drops the started part of the batch, restores what the
STEP has changed, and takes the right step, or none. That is the state of a flush between two batches, so the batch
begins again with the instructions of a flush.
"""

from collections.abc import Iterator, Sequence

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Instruction, Kind, Row, Rows, Tensor
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.passes import Segment, Segments

_Tensor = tuple[Tensor, int, int, int]
"""A tensor that travels: its kind, the stages that send and receive it, and its microbatch."""


def add_validations(segments_of_rank: Sequence[Segments], extent: Extent) -> list[Segments]:
    """Add the VALIDATEs to the segments of all ranks, which are complete otherwise."""
    result = [list(segments) for segments in segments_of_rank]
    for index in range(1, len(extent.batches)):
        rows = [segments[index] for segments in segments_of_rank]
        for rank, place in enumerate(_cut(rows, extent)):
            word = _word(Kind.VALIDATE, rank, extent.first_batch + index, extent)
            result[rank][index] = [*rows[rank][:place], word, *rows[rank][place:]]
    end = extent.first_batch + len(extent.batches)
    for rank, segments in enumerate(result):
        segments[-1] = [*segments[-1], _word(Kind.VALIDATE, rank, end, extent)]
    return result


def _word(kind: Kind, rank: int, version: int, extent: Extent) -> Instruction:
    return Instruction(kind, extent.stages_of(rank)[0], version=version)


def _cut(rows: Sequence[Segment], extent: Extent) -> list[int]:
    """Return the place of VALIDATE in the rows of one batch, for each rank."""
    sent_at = {
        tensor: (rank, position)
        for rank, row in enumerate(rows)
        for position, tensor in _travelling(row, extent, sends=True)
    }
    cut = [next(place for place, each in enumerate(row) if _of_backward(each)) for row in rows]
    moved = True
    while moved:  # an earlier cut at one rank may leave a receive of another without its send
        moved = False
        for rank, row in enumerate(rows):
            for position, tensor in _travelling(row[: cut[rank]], extent, sends=False):
                sender, place = sent_at[tensor]
                if place >= cut[sender]:
                    cut[rank], moved = position, True
                    break
    return cut


def _of_backward(instruction: Instruction) -> bool:
    word = instruction.kind.row
    return word.uses_saved or word.receives is Tensor.GRADIENT


def _travelling(row: Sequence[Instruction], extent: Extent, *, sends: bool) -> Iterator[tuple[int, _Tensor]]:
    """Yield the position and the tensor of each SEND of a row, or of each RECV."""
    for position, each in enumerate(row):
        tensor = each.kind.row.sends if sends else each.kind.row.receives
        if tensor is not None:
            peer = extent.graph.peer_of(each)
            ends = (each.stage, peer) if sends else (peer, each.stage)
            yield position, (tensor, *ends, each.microbatch)


# --- where a step is refused


def continuation(program: Program, version: int, begins: Sequence[int], ends: Sequence[int]) -> Rows:
    """Return the instructions of each rank after VALIDATE@version if the step is refused.

    Args:
        program: an optimistic program.
        version: the version that the refused STEP has made.
        begins, ends: for each rank, where the words of batch `version` begin and end in its row. If the run drains
            before that batch, only the VALIDATE lies between them.
    """
    cut = [_position_of(Kind.VALIDATE, version, row) for row in program.rows]
    arriving = {
        tensor for row, place in zip(program.rows, cut, strict=True)
        for _, tensor in _travelling(row[:place], program, sends=True)
    }  # fmt: skip
    rows = []
    for rank, (row, place) in enumerate(zip(program.rows, cut, strict=True)):
        behind = _travelling(row[place:], program, sends=False)
        receives = [row[place + position] for position, tensor in behind if tensor in arriving]
        again = [*row[begins[rank] : place], *row[place + 1 : ends[rank]]]
        rows.append((*receives, _word(Kind.ROLLBACK, rank, version, program), *again))
    return tuple(rows)


def refusing(program: Program, version: int, continuations: Rows, ends: Sequence[int]) -> Program:
    """Return the program as it runs if all ranks refuse the STEP to `version`.

    Behind the VALIDATE they execute their continuations in place of the rest of that batch (up to `ends`), and then the
    program's own rows.
    """
    rows: list[Row] = []
    for row, behind, end in zip(program.rows, continuations, ends, strict=True):
        place = _position_of(Kind.VALIDATE, version, row)
        rows.append((*row[: place + 1], *behind, *row[end:]))
    return program.with_rows(tuple(rows))


def _position_of(kind: Kind, version: int, row: Sequence[Instruction]) -> int:
    return next(place for place, each in enumerate(row) if each.kind is kind and each.version == version)
