"""What goes wrong once in a run whose pipeline changes: functions for `watch` of run_case.py."""

import argparse
import errno
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.pipeline.runtime.stages.megatron.groups import ChainGroups
from megatron.pipeline.runtime.stages.megatron.optimizers import CoreGradientBuffers
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.trainer.changes import change
from megatron.trainer.plan import arrangement
from megatron.trainer.start_up.run import ModelAndOptimizer, Run

NO_FILES = OSError(errno.EMFILE, "Too many open files")


def _once(run: Run, rank: int | None, function: Callable, error: Exception) -> Callable:
    """`function`, which raises where it is called the first time, on `rank` (None: on every rank)."""
    calls = itertools.count()

    def faulty(*args, **options):
        if (rank is None or run.args.rank == rank) and next(calls) == 0:
            raise error
        return function(*args, **options)

    return faulty


def _breaks(run: Run, rank: int | None, owner: object, name: str, error: Exception) -> Callable[[], None]:
    """`owner.name` raises where it is called the first time, on `rank` (None: on every rank); returns what mends it."""
    first = vars(owner)[name]
    faulty = _once(run, rank, getattr(owner, name), error)
    setattr(owner, name, staticmethod(faulty) if isinstance(first, classmethod) else faulty)
    return lambda: setattr(owner, name, first)


def no_memory_for_chunks(run: Run) -> Callable[[], None]:
    """Rank 1 has none for its chunks."""
    provider = _once(run, 1, run.program.model_provider, torch.OutOfMemoryError("tried to allocate 80 GiB"))
    run.program = replace(run.program, model_provider=provider)
    return lambda: None


def no_memory_for_gradients(run: Run) -> Callable[[], None]:
    """The last rank has none for its weight update; others have no such update, or wait to warm up their groups."""
    return _breaks(run, run.args.world_size - 1, CoreGradientBuffers, "__init__", torch.OutOfMemoryError("80 GiB"))


def an_arrangement_that_cannot_be(run: Run) -> Callable[[], None]:
    """Rank 1 says so; the others have taken it over."""
    return _breaks(run, 1, change, "arranged", ValueError("no such ranks"))


def one_state_that_cannot_be_held(run: Run) -> Callable[[], None]:
    """Rank 1 cannot say what it has."""
    return _breaks(run, 1, change, "hold_run", RuntimeError("no state"))


def no_state_that_can_be_held(run: Run) -> Callable[[], None]:
    """Nobody can."""
    return _breaks(run, None, change, "hold_run", RuntimeError("no state"))


def no_files_for_groups(run: Run) -> Callable[[], None]:
    """On every rank, behind one group, or two where the rank is odd."""
    make = change.make_groups

    def without_files(args: argparse.Namespace) -> None:
        change.make_groups = make
        for _ in range(1 + args.rank % 2):
            torch.distributed.new_group([args.rank])
        raise NO_FILES

    change.make_groups = without_files
    return lambda: None


def a_model_that_cannot_be(run: Run) -> Callable[[], None]:
    """Rank 1 finds no configuration for it."""
    return _breaks(run, 1, arrangement, "model_config", ValueError("no such model"))


def no_files_for_the_chain(run: Run) -> Callable[[], None]:
    """Nobody gets groups for reductions."""
    return _breaks(run, None, ChainGroups, "create", RuntimeError("no sockets"))


def a_stage_that_cannot_be(run: Run) -> Callable[[], None]:
    """On the last rank."""
    return _breaks(run, run.args.world_size - 1, MegatronStage, "__init__", ValueError("no such stage"))


def another_program(run: Run) -> Callable[[], None]:
    """Every rank finds that they have built several."""
    return _breaks(run, None, change, "_require_same_program", change.CheckpointError("2 different programs"))


def a_late_fault(run: Run) -> Callable[[], list[tuple[int, int]]]:
    """Rank 1 fails when what is built has the state; returns the bytes of gradients that there were before,
    and were left while the new one was built."""
    vars(run.update).pop("_apply", None)  # which looks at gradients through numpy, and so keeps their memory
    update, build, looks = run.update, change.setup_model_and_optimizer, []
    mend = _breaks(run, 1, change, "choose_kernel", RuntimeError("no kernel"))

    def looking(*args, **options) -> ModelAndOptimizer:
        looks.append(_bytes_of_gradients(update))
        change.setup_model_and_optimizer = build
        return build(*args, **options)

    before, change.setup_model_and_optimizer = _bytes_of_gradients(update), looking

    def end() -> list[tuple[int, int]]:
        mend()
        return [(before, each) for each in looks]

    return end


def every_second_change(run: Run) -> Callable[[], None]:
    """Rank 1 fails at the end of each second one."""
    choose, calls = change.choose_kernel, itertools.count(1)

    def faulty(*args) -> None:
        if next(calls) % 2 == 0 and run.args.rank == 1:
            raise RuntimeError("no kernel")
        choose(*args)

    change.choose_kernel = faulty

    def end() -> None:
        change.choose_kernel = choose

    return end


def _bytes_of_gradients(update: object) -> int:
    buffers = getattr(update, "_gradients", None)
    slots = [] if buffers is None else [buffers[slot] for slot in range(buffers.num_slots)]
    return sum(flat.untyped_storage().nbytes() for slot in slots for flat in slot.flats)


def a_rule_that_fails(run: Run) -> Callable[[], None]:
    """Rank 0, which decides, has a rule of a user's own that is wrong."""
    rule = run.decisions._freezing._rule
    rule.decide = _once(run, 0, rule.decide, ZeroDivisionError("division by zero"))
    return lambda: None
