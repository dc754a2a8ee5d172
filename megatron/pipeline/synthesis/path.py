"""The way of a microbatch down all stages and back: its seconds, and a rank's places on it."""

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.synthesis.problem import Problem


def path_seconds(problem: Problem, first: int, last: int) -> float:
    """Seconds from the start of the first queue of the path to the start of the last one, places in `problem.path`."""
    path = problem.path
    return sum(
        problem.seconds[path[at]] + problem.sources[path[at + 1]][1]
        for at in range(first, last)
    )  # fmt: skip


def weight_seconds(problem: Problem, stage: int) -> float:
    return problem.seconds[problem.number_of[Kind.BACKWARD_WEIGHT, stage]] if problem.splits else 0.0


def own_places(problem: Problem, rank: int) -> tuple[list[int], list[int]]:
    """Places in the path of a rank's forwards, and of its I or B."""
    places = [at for at, queue in enumerate(problem.path) if problem.rank_of_queue[queue] == rank]
    return [at for at in places if at < problem.num_stages], [at for at in places if at >= problem.num_stages]
