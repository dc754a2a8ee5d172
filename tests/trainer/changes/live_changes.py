"""What a run has before and after each change of its pipeline, while it trains: for `watch` of run_case.py."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy
import torch

from megatron.core.utils import unwrap_model
from megatron.elastic.stages import Arrangement
from megatron.trainer.plan.arrangement import Change
from megatron.trainer.run import loop
from megatron.trainer.start_up.run import Run
from tests.trainer.changes.cases import whole_state
from tests.trainer.run.run_case import numbered_names


def states(run: Run) -> Callable[[], list[dict]]:
    """For each change, also one that fails, how many layers are frozen and ranks in a pipeline behind it, and what this
    rank had `before` and has `after`, as `whole_state` finds it, with the weights of frozen layers, too."""
    first, found = loop.change_arrangement, []
    for _ in range(1 + run.args.rank):  # so that no generator is where a seed puts it
        random.random(), numpy.random.rand(), torch.rand(1)

    def watched(run: Run, wanted: Arrangement) -> Change:
        before = _state(run)
        try:
            return first(run, wanted)
        finally:
            now = run.args.arrangement
            found.append({"num_frozen": now.num_frozen, "pipeline": now.pipeline, "before": before,
                          "after": _state(run)})  # fmt: skip

    loop.change_arrangement = watched

    def end() -> list[dict]:
        loop.change_arrangement = first
        return found

    return end


def _state(run: Run) -> tuple:
    pieces, *rest = whole_state(replace(run.model_and_optimizer, chunks=run.update.chunks))
    for chunk in run.chunks:
        for name, value in numbered_names(unwrap_model(chunk)):
            pieces.setdefault(("weight", name, 0), []).append((0, value.numel(), value.detach().flatten().clone()))
    return pieces, *rest
