"""The log lines about a program that was made for a job."""

from collections.abc import Iterator, Sequence

from megatron.documents.tables import ranges_of
from megatron.pipeline.synthesis import Problem, Steady, Synthesis
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.plan.auto_costs import numbers


def beginning(begin: Synthesis | Steady) -> str:
    """A phrase about the program with which a job begins."""
    stages = numbers(sorted(begin.problem.recomputed))
    name = begins_with(begin.begun_with) + (f" with recomputes at stages {stages}" if stages else "")
    return name if isinstance(begin, Synthesis) else f"{name} under {begin.program.weights.name}"


def begins_with(name: str) -> str:
    """The name of the first program of a job as a phrase."""
    order = name.removeprefix("within limits: ")
    return name if order == name else f"{order} within the limits"


def lines_of(best: Synthesis, *, may_recompute: bool) -> Iterator[str]:
    """Yield lines about a program whose batches drain. `may_recompute`: whether the search could choose recomputes."""
    yield (
        f"{AUTO}: a batch takes {_ms(best.seconds)} in simulation, without reductions and the step (a bubble "
        f"of {best.bubble:.1%}); no program takes less than {_ms(best.bound)} "
        f"({1 - best.bound / best.seconds:.1%} less); {_stages(best.problem)}"
    )
    if may_recompute:
        yield _recomputed(best.problem)
    if best.ways:
        moved = ", ".join(f"stage {stage} {ranges_of(each)}" for stage, each in best.moved.items())
        to = "" if best.way is None else {"host": " to the host", "pair": " to the pair rank"}[best.way.name]
        yield f"{AUTO}: moved{to}: {moved or 'nothing'}"
    named = "no named order keeps the limits"
    if best.named is not None:
        named = f"{best.named[0]} takes {_ms(best.named[1])}"
    held = f"activations on the ranks take at most {_gib(best.held)}"
    yield f"{AUTO}: {held}; of named orders with this placement, {named}"


def lines_of_steady(best: Steady, *, may_recompute: bool) -> Iterator[str]:
    """Yield lines, as `lines_of` does, about a program whose batches follow one another without drains."""
    yield (
        f"{AUTO}: under {best.program.weights.name} a batch takes {_ms(best.seconds)} in simulation between fill and "
        f"drain, without reductions and the step, and a microbatch {_ms(best.period)}; no program takes less than "
        f"{_ms(best.bound)} ({max(0.0, 1 - best.bound / best.seconds):.1%} less), from {best.bound_from}; "
        f"{_stages(best.problem)}"
    )
    if may_recompute:
        yield _recomputed(best.problem)
    named = "none goes on without a drain"
    if best.named:
        name, held = min(best.named.items(), key=lambda each: each[1])
        named = f"{name} takes least, up to {_gib([held])} on a rank"
    yield (
        f"{AUTO}: activations on the ranks take at most {_gib(best.held)}, and at this period at least "
        f"{_gib(best.least_held)}; of named orders with this placement, {named}"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"


def _gib(sizes: Sequence[float]) -> str:
    return f"{', '.join(f'{each:.3g}' for each in sizes)} GiB"


def _stages(problem: Problem) -> str:
    place = "one stage on each rank"
    if problem.num_stages > problem.num_ranks:
        place = f"stages on ranks {numbers(problem.rank_of_stage)}"
    return place + ("" if problem.splits else ", whole backwards")


def _recomputed(problem: Problem) -> str:
    parts = (
        f"stage {stage} {'all microbatches' if len(again) == problem.num_microbatches else ranges_of(again)}"
        for stage, again in problem.recomputed_microbatches.items()
    )
    return f"{AUTO}: recomputed: {', '.join(parts) or 'nothing'}"
