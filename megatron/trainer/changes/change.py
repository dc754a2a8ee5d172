"""The change of a run's arrangement during training: the pipeline is drained, no file is written, and errors undo it.

The state moves as through a checkpoint, from the old chunks to new ones. The old chunks and their process groups stay
unchanged until all ranks agree that the state has arrived and that they will run the same program. An error before this
point leaves the run in the old arrangement.

Between two batches no gradient is read, since a batch begins with zeros. So the gradient buffers of the old chunks are
freed while the new chunks, which have their own buffers, are built. If the run keeps the old chunks, their buffers are
allocated again and filled with zeros. All references to a buffer (views of parameters, buckets, shards) refer to its
storage, which stays the same object and is empty during the change.

If the degrees change, the old process groups are kept beside the new ones:

        before = set_groups_aside()                           # megatron.core looks as if it had never been initialised
    parallel_state.initialize_model_parallel(...)
        destroy_groups(before)                                # success: destroy the old groups
        destroy_groups(set_groups_aside()); restore_groups(before)  # failure: return to the old groups

megatron.core drops its groups without destroying them. Each group has sockets and threads, hundreds after a few
changes, and torch's registry keeps a dropped group for as long as the process lives. So this module destroys the groups
one by one. It finds the variables that `parallel_state` has set since its import by comparison with a second instance
of the module that was never initialised, so that it needs no names of a particular version. The state of other modules
(generators of tensor parallel dropout, timeouts) is not changed.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from types import ModuleType

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.elastic.stages import Arrangement
from megatron.pipeline.check import check
from megatron.pipeline.runtime.contract.meetings import num_named
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.agreement import agreed, control_group, gathered
from megatron.pipeline.runtime.failure.errors import AgreedError, CheckpointError
from megatron.pipeline.runtime.stages.megatron.optimizers import CoreGradientBuffers
from megatron.pipeline.schedules import Schedule
from megatron.trainer.changes.state_in_memory import Moved, hand_over, hold_run
from megatron.trainer.checkpoint.state import random_state, restore_random_state
from megatron.trainer.plan.arrangement import Change, arranged
from megatron.trainer.start_up.initialize import make_groups
from megatron.trainer.start_up.optimizer import choose_kernel
from megatron.trainer.start_up.run import (
    ModelAndOptimizer,
    Run,
    build_engine,
    setup_model_and_optimizer,
)

# --- gradient buffers, released during a change -----------------------------------------------------------------------


class _GradientMemory:
    """The gradient buffers of a drained `update`; empty if the update has no gradients, as on a frozen rank."""

    def __init__(self, update: object) -> None:
        buffers: CoreGradientBuffers | None = getattr(update, "_gradients", None)
        slots = [] if buffers is None else [buffers[slot] for slot in range(buffers.num_slots)]
        storages = [flat.untyped_storage() for slot in slots for flat in slot.flats]
        self._storages = [storage for storage in storages if storage.resizable()]  # a numpy view prevents it
        self._num_bytes = [storage.nbytes() for storage in self._storages]

    def release(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def take_again(self) -> None:
        """Allocate the buffers again and fill them with zeros. Their memory must still be available."""
        for storage, num_bytes in zip(self._storages, self._num_bytes, strict=True):
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


# --- the change -------------------------------------------------------------------------------------------------------

PATIENCE = timedelta(minutes=1)
"""The time for which a failed rank waits for the other ranks to agree on the outcome."""


def change_arrangement(run: Run, wanted: Arrangement) -> Change:
    """Change the run to the arrangement `wanted`.

    Collective: every rank must call it. The pipeline must be drained.

    Raises:
        CheckpointError: on every rank, if the arrangement is impossible, a step fails, or the state does not arrive.
            The run then continues in the old arrangement. There is one exception: if a collective fails on some ranks
            only, and the other ranks still wait in it (for example, if a rank cannot open the sockets of a group), the
            failed ranks raise their own error after `PATIENCE`, and the guard ends the job, as if a rank had been
            killed.
    """
    start = time.perf_counter()
    before, way_back = run.args.arrangement, _WayBack(run)
    built, problem = None, None
    try:
        with agreed(patience=PATIENCE):
            state = _leave(run, wanted, way_back)
            built = setup_model_and_optimizer(run.args, run.program, draws=False, locally=agreed)
            moved = _move_in(run, built, state, before)
    except AgreedError as error:  # the error's frames keep the new objects alive until this block ends
        problem = str(error)
    if problem is not None:
        if built is not None:
            built.update.close()
        del built
        way_back.go(run)
        raise CheckpointError(problem)
    run.model_and_optimizer = built
    way_back.model_and_optimizer.update.close()
    groups = way_back.groups
    del way_back, state
    collect(run)
    if groups is not None:
        destroy_groups(groups)
    run.engine = build_engine(run.args, built, run.position())
    return _summary(run, before, moved, time.perf_counter() - start)


class _WayBack:
    """The state with which a run continues if a change fails: configuration, model, optimizer, gradients, generators.

    Attributes:
        groups: the old process groups, once they have been set aside.
    """

    def __init__(self, run: Run) -> None:
        self.args, self.model_and_optimizer = run.args, run.model_and_optimizer
        self.gradients = _GradientMemory(run.update)
        self.groups: ParallelState | None = None
        self._random_state = random_state()  # building a model draws random numbers

    def go(self, run: Run) -> None:
        """Restore the run to its state before the change, and drop the new groups.

        Collective: every rank must call it.
        """
        collect(run)
        if self.groups is not None:
            destroy_groups(set_groups_aside())
            restore_groups(self.groups)
            align_names()
        run.args = self.args
        restore_random_state([self._random_state])
        self.gradients.take_again()
        if run.engine is None:
            run.engine = build_engine(run.args, self.model_and_optimizer, run.position())


def _leave(run: Run, wanted: Arrangement, way_back: _WayBack) -> ShardedStateDict:
    """Set the configuration and the process groups to the arrangement `wanted`. Returns this rank's state.

    Collective: every rank must call it.
    """
    with agreed():
        run.args = arranged(run.args, wanted)
    end_engine(run)
    with agreed():
        state = hold_run(way_back.model_and_optimizer, iteration=run.iteration)
        way_back.gradients.release()
    if wanted.ranks != way_back.args.arrangement.ranks:
        way_back.groups = set_groups_aside()
        make_groups(run.args)
    return state


def _move_in(run: Run, built: ModelAndOptimizer, state: ShardedStateDict, before: Arrangement) -> Moved:
    """Load the state that the ranks hold into the new model and optimizer.

    Collective: every rank must call it.
    """
    _require_same_program(built.schedule, run.args.batch_sizes.num_microbatches(run.consumed_samples))
    thaws = run.args.arrangement.num_frozen < before.num_frozen
    moved = hand_over(state, built, iteration=run.iteration, anew=thaws)
    choose_kernel(built.optimizer, run.args.optimizer_kernel)
    return moved


def end_engine(run: Run) -> None:
    """Close the drained engine of a run that will get another engine.

    Collective: every rank must call it.
    """
    engine, run.engine = run.engine, None
    engine.close()
    guard = failure_guard.active()
    if guard is not None:
        guard.watch(
            name=f"rank {run.args.rank}", doing=lambda: ("a change of the pipeline", None), overdue=lambda: None
        )  # fmt: skip


def _require_same_program(schedule: Schedule, num_microbatches: int) -> None:
    """Check that all ranks are about to run the same program. Raises CheckpointError if not.

    Collective: every rank must call it.
    """
    with agreed():
        program = schedule.build((num_microbatches,) * 3)
        check(program)
        digest = hashlib.sha256(program.to_csv().encode()).hexdigest()
    digests = set(gathered(digest, control_group()))
    if len(digests) > 1:
        raise CheckpointError(f"ranks have built {len(digests)} different programs for {schedule}")


def _summary(run: Run, before: Arrangement, moved: Moved, seconds: float) -> Change:
    """The record of a change, with bytes summed and seconds maximised over all ranks.

    Collective: every rank must call it.
    """
    found = gathered((moved.num_bytes, moved.bytes_received, seconds), control_group())
    return Change(
        before, run.args.arrangement, run.args.num_layers, sum(each[0] for each in found),
        sum(each[1] for each in found), max(each[2] for each in found),
    )  # fmt: skip


def collect(run: Run) -> None:
    """Free dropped objects that are in reference cycles.

    If the run keeps its objects out of garbage collection (gc.freeze), the remaining objects are frozen again.
    """
    if not run.is_kept_out_of_collections:
        gc.collect()
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()


_VALUES = (type(None), bool, int, float, str, list, tuple, dict, set)  # types of a module's initial variables


@dataclass
class ParallelState:
    """The variables of `parallel_state`, name -> value. The record is empty after it is restored or destroyed."""

    values: dict[str, object] = field(repr=False)

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups among the values that torch has registered, each once, in the order of their creation."""
        found = set(_groups_in(list(self.values.values())))
        return [group for group in dist.distributed_c10d._world.pg_map if group in found]


def set_groups_aside() -> ParallelState:
    """Take all variables out of `parallel_state` and return them. Not collective; the groups stay alive."""
    module, begins = vars(parallel_state), _as_imported()
    record = ParallelState({name: module[name] for name in _names()})
    for name in record.values:
        del module[name]
    module.update(begins)
    return record


def restore_groups(record: ParallelState) -> None:
    """Put the variables of `record` back into `parallel_state`. Not collective.

    The current groups are dropped without being destroyed, so call `destroy_groups` on them first.
    """
    module = vars(parallel_state)
    for name in _names():
        del module[name]
    module.update(record.values)
    record.values = {}


def destroy_groups(record: ParallelState) -> None:
    """Destroy the groups of `record`, except for the job's own groups and the groups in use.

    The threads of a group end only if all other references to it (of chunks, optimizers, gradient buffers) are dropped.
    Collective: every rank of the job must call it.
    """
    control = control_group()
    dist.barrier(group=control)  # a group that one member has left may fail for a member that still uses it
    in_use = {
        dist.group.WORLD,
        control,
        *ParallelState({name: vars(parallel_state)[name] for name in _names()}).groups(),
    }
    for group in record.groups():
        if group not in in_use:
            dist.destroy_process_group(group)
    record.values = {}


def align_names() -> None:
    """Make the ranks agree on the names of the next groups, even if some ranks have made more groups than others.

    The groups of torch and of the chain are named by the number of groups that a process has made or tried to make.
    Collective: every rank must call it.
    """
    world, chains = dist.distributed_c10d._world, num_named
    found = gathered((world.group_count, chains), control_group())
    world.group_count = max(count for count, _ in found)
    for _, theirs in found:
        chains |= theirs


def _names() -> list[str]:
    """The names of the module's variables: those set by its import, and those added since."""
    begins, module = _as_imported(), vars(parallel_state)
    known = vars(_untouched())
    return [name for name in module if name in begins or name not in known]


def _as_imported() -> dict[str, object]:
    """The variables of the module as its import sets them, with copies of containers."""
    return {
        name: type(value)(value) if isinstance(value, (list, dict, set)) else value
        for name, value in vars(_untouched()).items()
        if isinstance(value, _VALUES) and not name.startswith("__")
    }


@cache
def _untouched() -> ModuleType:
    """A second instance of `parallel_state`, which is never initialised."""
    spec = importlib.util.spec_from_file_location(f"{parallel_state.__name__}_untouched", parallel_state.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _groups_in(value: object) -> Iterator[dist.ProcessGroup]:
    if isinstance(value, dist.ProcessGroup):
        yield value
    elif isinstance(value, dict):
        yield from _groups_in([*value, *value.values()])
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _groups_in(each)
