"""A run takes another place in the pipeline while it trains: drained, without a file, and back if that fails.

The state goes the way it goes through a checkpoint, from the old chunks to new ones. Until all ranks agree that it has
arrived, and that they are about to run the same program, the old place is as it was, and so are its process groups; an
error until then leaves the run there.
"""

from __future__ import annotations

import gc
import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.pipeline.check import check
from megatron.pipeline.runtime import failure
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.text import to_csv
from megatron.training.arrangement import Arrangement, arrange
from megatron.training.assembly import Run, build_engine
from megatron.training.checkpoint.agreement import agreed, control_group
from megatron.training.checkpoint.errors import CheckpointError
from megatron.training.checkpoint.random_state import restore_random_state
from megatron.training.checkpoint.run_state import RunParts
from megatron.training.initialize import make_groups
from megatron.training.optimizer_kernel import choose_kernel
from megatron.training.place import Place, build_place
from megatron.training.transition import parallel_groups
from megatron.training.transition.memory import Moved, hand_over, hold_run

if TYPE_CHECKING:
    from megatron.training.shaping import Outlook


@dataclass(frozen=True)
class Change:
    """What a change of places came to.

    Attributes:
        before, after: how the job was arranged, and is.
        num_layers: of the model.
        num_bytes: of all ranks' new state, and how many of them came from other ranks.
        seconds: from the old engine's end to the new one's beginning.
    """

    before: Arrangement
    after: Arrangement
    num_layers: int
    num_bytes: int
    bytes_moved: int
    seconds: float

    def describe(self, outlook: Outlook | None = None) -> str:
        """One line for the log."""
        text = (
            f"frozen layers: {self.after.num_frozen} of {self.num_layers} (before {self.before.num_frozen}) | "
            f"pipeline: {self.after.pipeline} (before {self.before.pipeline}) | data: {self.after.data} (before "
            f"{self.before.data}) | layers by rank: {self.after} | state: {self.num_bytes / 2**20:.1f} MiB, "
            f"{self.bytes_moved / 2**20:.1f} from other ranks | change took {self.seconds:.2f} s"
        )
        if self.after.pipelines_in_a_row:
            text += " | the ranks of a pipeline in a row"
        if self.after.micro_batch_size != self.before.micro_batch_size:
            text += f" | microbatch: {self.after.micro_batch_size} (before {self.before.micro_batch_size})"
        if outlook is not None and outlook.before > 0:
            text += f" | predicted seconds of a batch: {outlook.after:.4g} ({outlook.before:.4g} without another cut)"
        return text


def change_place(run: Run, wanted: Arrangement) -> Change:
    """Go on in the arrangement `wanted`. Collective, drained.

    Raises:
        CheckpointError: on every rank: that cannot be, or the state did not arrive. The run goes on as it was.
    """
    start = time.perf_counter()
    before, first = run.args.arrangement, run.place
    with agreed():
        arrange(run.args, wanted)
    _end_engine(run)
    state = hold_run(_parts(first), iteration=run.iteration)
    regroups = wanted.ranks != before.ranks
    groups = parallel_groups.set_aside() if regroups else None
    if regroups:
        make_groups(run.args)
    place, problem = None, None
    try:
        place = build_place(run.args, run.parts, draws=False, allocating=agreed)
        _require_same_program(place.schedule, run.args.batch_sizes.num_microbatches(run.consumed_samples))
        moved = hand_over(state, _parts(place), iteration=run.iteration)
    except CheckpointError as error:  # whose frames hold the new place until this block ends
        problem = str(error)
    if problem is not None:
        if place is not None:
            place.update.close()
        del place
        _collect()
        if regroups:
            parallel_groups.destroy(parallel_groups.set_aside())
            parallel_groups.restore(groups)
        arrange(run.args, before)
        restore_random_state(state["rng_state"].data)  # building has drawn
        run.engine = build_engine(run.args, first, run.position())
        raise CheckpointError(problem)
    choose_kernel(place.optimizer, run.args.optimizer_kernel)
    run.place = place
    first.update.close()
    del first, state
    _collect()
    if regroups:
        parallel_groups.destroy(groups)
    run.engine = build_engine(run.args, place, run.position())
    return _summary(run, before, moved, time.perf_counter() - start)


def _end_engine(run: Run) -> None:
    run.engine.close()
    run.engine = None
    guard = failure.active()
    if guard is not None:
        guard.watch(
            name=f"rank {run.args.rank}", doing=lambda: ("a change of the pipeline", None), overdue=lambda: None
        )  # fmt: skip


def _require_same_program(schedule: Schedule, num_microbatches: int) -> None:
    """Raises CheckpointError where ranks are about to run different programs. Collective."""
    with agreed():
        program = schedule.build((num_microbatches,) * 3)
        check(program)
        digest = hashlib.sha256(to_csv(program).encode()).hexdigest()
    digests: list = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest, group=control_group())
    if len(set(digests)) > 1:
        raise CheckpointError(f"ranks have built {len(set(digests))} different programs for {schedule}")


def _summary(run: Run, before: Arrangement, moved: Moved, seconds: float) -> Change:
    """Of all ranks. Collective."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (moved.num_bytes, moved.bytes_received, seconds), group=control_group())
    return Change(
        before, run.args.arrangement, run.args.num_layers, sum(each[0] for each in found),
        sum(each[1] for each in found), max(each[2] for each in found),
    )  # fmt: skip


def _parts(place: Place) -> RunParts:
    return RunParts(place.chunks, place.optimizer, place.scheduler, place.update)


def _collect() -> None:
    """Let go of a place, which has cycles, and keep what is left out of later collections where the run does so."""
    keeps_out = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if keeps_out:
        gc.freeze()
