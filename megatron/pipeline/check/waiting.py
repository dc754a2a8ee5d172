"""Count: tensors that wait on a rank between two of its own stages.

What a stage makes for the next one on the same rank is not sent, and not yet saved there either: it waits from the end
of the one computation to the start of the other. Where a rank turns to its next stage soon, one tensor waits; where it
takes a whole batch through a stage first, a whole batch does, of activations on the way up and of gradients on the way
down. That follows from the row alone, under any timing.
"""

from megatron.pipeline.check.compact import FIRST_TRANSFER, KIND_OF_CODE, CompactProgram


def count_waiting(compact: CompactProgram) -> tuple[int, ...]:
    """For each rank the most tensors that wait between two of its own stages.

    Args:
        compact: a program whose computations are proved, so that each tensor is made once before it is taken.
    """
    return tuple(_on_rank(compact, rank) for rank in range(len(compact.codes)))


def _on_rank(compact: CompactProgram, rank: int) -> int:
    stages = set(compact.stages_of(rank))
    if not any(stage + 1 in stages for stage in stages):
        return 0
    words = [KIND_OF_CODE[code].row for code in range(FIRST_TRANSFER)]
    width, waiting, peak = compact.num_microbatches, 0, 0
    for code, place in zip(compact.codes[rank], compact.places[rank], strict=True):
        if code < FIRST_TRANSFER:
            word, stage = words[code], place // width
            waiting -= word.needs is not None and stage - word.needs.value in stages
            waiting += word.makes is not None and stage + word.makes.value in stages
            peak = max(peak, waiting)
    return peak
