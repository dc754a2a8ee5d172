"""Smaller batches that stand for a large one: what a pipeline does with many microbatches, it does with fewer."""

from dataclasses import replace

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
        if sizes[-1] < num_microbatches and all(
            resized(schedule, num_microbatches, each).accepts(each) for each in sizes
        ):
            return sizes
    return ()


def resized(schedule: Schedule, num_microbatches: int, fewer: int) -> Schedule:
    """The schedule that does with batches of `fewer` microbatches what this one does with those of so many.

    It differs where each prediction reads a number of microbatches that is given: as many as before are left unread,
    or all but one.
    """
    if schedule.provisional_microbatches is None:
        return schedule
    read = schedule.provisional_microbatches - (num_microbatches - fewer)
    return replace(schedule, provisional_microbatches=max(1, read))
