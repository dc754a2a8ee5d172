"""Count: tensors that wait on a rank between two of its own stages.

What a stage makes for the next one on the same rank is not sent, and not yet saved there either: it waits from the end
of the one computation to the start of the other. Where a rank turns to its next stage soon, one tensor waits; where it
takes a whole batch through a stage first, a whole batch does, of activations on the way up and of gradients on the way
down. That follows from the row alone, under any timing.
"""

from megatron.pipeline.check.compact import FIRST_TRANSFER, KIND_OF_CODE, NUM_CODES, CompactProgram


def count_waiting(compact: CompactProgram) -> tuple[int, ...]:
    """For each rank the most tensors that wait between two of its own stages.

    Args:
        compact: a program whose computations are proved, so that each tensor is made once before it is taken.
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
    """For the slot of each computation of a rank: how many more tensors wait between its own stages behind it."""
    graph, stages = compact.program.graph, set(compact.stages_of(rank))
    change = {}
    for stage in stages:
        for code in range(FIRST_TRANSFER):
            word = KIND_OF_CODE[code].row
            taken = graph.makers(word.needs, stage) if word.needs else ()
            made = graph.takers(word.makes, stage) if word.makes else ()
            change[stage * NUM_CODES + code] = len(stages.intersection(made)) - len(stages.intersection(taken))
    return change
