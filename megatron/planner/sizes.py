"""Smaller batches that stand for a large one: what a pipeline does with many microbatches, it does with fewer."""

from megatron.pipeline.schedules import Schedule

_MOST_GROUPS = 6  # of p microbatches, by which batches that a schedule takes may differ


def alike(schedule: Schedule, num_microbatches: int, *, least: int, step: int, count: int) -> tuple[int, ...]:
    """Sizes of `count` batches, ascending, about `step` apart and the first about `least`, all below this one.

    They differ from it by whole groups of p microbatches, so that what is left over is the same; by as many as it takes
    for the schedule to run them all. None of them: there are no such batches.
    """
    p = schedule.num_ranks
    for unit in range(p, (_MOST_GROUPS + 1) * p, p):
        apart = max(step // unit, 1) * unit
        first = num_microbatches - (num_microbatches - least) // unit * unit
        sizes = tuple(first + index * apart for index in range(count))
        if sizes[-1] < num_microbatches and all(map(schedule.runs, sizes)):
            return sizes
    return ()
