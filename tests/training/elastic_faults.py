"""What goes wrong once in a run whose pipeline changes: functions for `watch` of run_case.py, each on one rank."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.pipeline.runtime.megatron_gradients import GradientBuffers
from megatron.training.assembly import Run


def _once(run: Run, rank: int, function: Callable, error: Exception) -> Callable:
    """`function`, which raises where it is called the first time, on `rank`."""
    calls = itertools.count()

    def faulty(*args, **options):
        if run.args.rank == rank and next(calls) == 0:
            raise error
        return function(*args, **options)

    return faulty


def no_memory_for_chunks(run: Run) -> Callable[[], None]:
    """Rank 1 has none for its chunks."""
    provider = _once(run, 1, run.parts.model_provider, torch.OutOfMemoryError("tried to allocate 80 GiB"))
    run.parts = replace(run.parts, model_provider=provider)
    return lambda: None


def no_memory_for_gradients(run: Run) -> Callable[[], None]:
    """The last rank has none for its weight update; others have no such update, or wait to warm up their groups."""
    first = GradientBuffers.__init__
    GradientBuffers.__init__ = _once(run, run.args.world_size - 1, first, torch.OutOfMemoryError("80 GiB"))

    def mend() -> None:
        GradientBuffers.__init__ = first

    return mend


def a_rule_that_fails(run: Run) -> Callable[[], None]:
    """Rank 0, which decides, has a rule of a user's own that is wrong."""
    rule = run.elasticity._freezing._rule
    rule.decide = _once(run, 0, rule.decide, ZeroDivisionError("division by zero"))
    return lambda: None
