"""The process groups of a run while its degrees change: those of before, set aside, and new ones beside them.

    before = set_aside()                    # megatron.core is as if it had never been initialised
    parallel_state.initialize_model_parallel(...)
    destroy(before)                         # the new ones hold: the old ones end
    destroy(set_aside()); restore(before)   # or they do not: the old ones are back

Problem: megatron.core forgets its groups without ending them. Each has sockets and threads, hundreds after a few
changes, and a forgotten one lives for as long as torch's registry, which is as long as the process.

Solution: what `parallel_state` has set since it was imported is found by comparing it with a second instance of the
module, which was never initialised; so nothing here depends on the names of one version. The groups found there are
ended one by one. What other modules keep (generators of tensor parallel dropout, timeouts) stays as it is.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.pipeline.runtime.failure.agreement import control_group
from megatron.pipeline.runtime.stages.megatron import groups

_VALUES = (type(None), bool, int, float, str, list, tuple, dict, set)  # what a module's variables begin as


@dataclass
class ParallelState:
    """What `parallel_state` held: name -> value. Spent once it has been restored or destroyed."""

    values: dict[str, object] = field(repr=False)

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups among the values that torch knows, each once, in the order in which they were made."""
        found = set(_groups_in(list(self.values.values())))
        return [group for group in dist.distributed_c10d._world.pg_map if group in found]


def set_aside() -> ParallelState:
    """Take everything out of `parallel_state`. Not collective; the groups go on."""
    module, begins = vars(parallel_state), _as_imported()
    record = ParallelState({name: module[name] for name in _names()})
    for name in record.values:
        del module[name]
    module.update(begins)
    return record


def restore(record: ParallelState) -> None:
    """Put back what was set aside. Not collective. What is there now is forgotten: `destroy` its groups first."""
    module = vars(parallel_state)
    for name in _names():
        del module[name]
    module.update(record.values)
    record.values = {}


def destroy(record: ParallelState) -> None:
    """End the groups that were set aside, but for the job's own and those in use now. Collective over the job.

    Every other reference to them (of chunks, optimizers, gradient buffers) has to be dropped for their threads to end.
    """
    control = control_group()
    dist.barrier(group=control)  # a group that one member has left may fail another that still works with it
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
    """Let ranks agree on how the next groups are called, where some have made more of them than others. Collective.

    torch and the chain's groups are named by counts of those that a process has made or tried to make.
    """
    world, chains = dist.distributed_c10d._world, groups._num_created
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (world.group_count, chains), group=control_group())
    world.group_count = max(count for count, _ in found)
    for _, theirs in found:
        chains |= theirs


def _names() -> list[str]:
    """The module's variables: those that it begins with, and what it has added since."""
    begins, module = _as_imported(), vars(parallel_state)
    known = vars(_untouched())
    return [name for name in module if name in begins or name not in known]


def _as_imported() -> dict[str, object]:
    """How the module's variables begin, containers of their own."""
    return {
        name: type(value)(value) if isinstance(value, (list, dict, set)) else value
        for name, value in vars(_untouched()).items()
        if isinstance(value, _VALUES) and not name.startswith("__")
    }


@cache
def _untouched() -> ModuleType:
    """A second instance of `parallel_state`, which nobody initialises."""
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
