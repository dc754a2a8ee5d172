"""A run takes another place in the pipeline while it trains: drained, without a file, and back if that fails.

The state goes the way it goes through a checkpoint, from the old chunks to new ones. Until all ranks agree that it has
arrived, the old place is as it was, and an error until then leaves the run there.
"""

import gc
import time
from dataclasses import dataclass

from megatron.pipeline.runtime import failure
from megatron.training.assembly import Run, build_engine
from megatron.training.checkpoint.errors import CheckpointError
from megatron.training.checkpoint.run_state import RunParts
from megatron.training.optimizer_kernel import choose_kernel
from megatron.training.place import Place, build_place
from megatron.training.transition.memory import Moved, hand_over, hold_run


@dataclass(frozen=True)
class Change:
    """What a change of places came to on this rank.

    Attributes:
        moved: what went from place to place.
        seconds: from the old engine's end to the new one's beginning.
    """

    moved: Moved
    seconds: float


def change_place(run: Run) -> Change:
    """Build the place that `run.args` describe by now and go on there. Collective, drained.

    Raises:
        CheckpointError: on every rank: the state did not arrive. The run goes on at the place that it has.
    """
    start = time.perf_counter()
    run.engine.close()
    guard = failure.active()
    if guard is not None:
        guard.watch(
            name=f"rank {run.args.rank}", doing=lambda: ("a change of the pipeline", None), overdue=lambda: None
        )  # fmt: skip
    before, iteration = run.place, run.iteration
    after = build_place(run.args, run.parts, draws=False)
    try:
        moved = hand_over(hold_run(_parts(before), iteration=iteration), _parts(after), iteration=iteration)
    except CheckpointError:
        after.update.close()
        run.engine = build_engine(run.args, before, run.position())
        raise
    choose_kernel(after.optimizer, run.args.optimizer_kernel)
    run.place, run.engine = after, build_engine(run.args, after, run.position())
    before.update.close()
    del before
    _collect()
    return Change(moved, time.perf_counter() - start)


def _parts(place: Place) -> RunParts:
    return RunParts(place.chunks, place.optimizer, place.scheduler, place.update)


def _collect() -> None:
    """Let go of the old place, which has cycles, and keep what is new out of later collections."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
