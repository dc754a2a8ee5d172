"""What worker processes do in test_parallel_groups.py."""

import gc
import os

import torch.distributed as dist

from megatron.core import parallel_state, tensor_parallel
from megatron.pipeline.runtime.failure.agreement import control_group
from megatron.trainer.changes.change import destroy_groups, restore_groups, set_groups_aside
from megatron.trainer.start_up import initialize
from tests.trainer.changes.cases import arguments, rebuilt


def _state():
    return {name: value for name, value in vars(parallel_state).items() if name.startswith(("_MPU", "_DATA", "_PIPE"))}


def _works():
    """The sum of ranks over the data and the pipeline group."""
    import torch

    sums = []
    for group in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    ):
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    return sums


def roll_back_and_commit(flags):
    """Sums over the groups before, beside, after a rollback, and after a commit; whether everything was as before."""
    initialize.set_up(arguments(flags, 4))
    control_group()
    state, sums, known = _state(), [_works()], len(dist.distributed_c10d._world.pg_map)
    before = set_groups_aside()
    assert not parallel_state.model_parallel_is_initialized()
    initialize.set_up(arguments(flags, 2))
    sums.append(_works())
    destroy_groups(set_groups_aside())
    restore_groups(before)
    same = _state() == state and len(dist.distributed_c10d._world.pg_map) == known
    sums.append(_works())
    before = set_groups_aside()
    initialize.set_up(arguments(flags, 2))
    generators = str(tensor_parallel.get_cuda_rng_tracker().get_states())
    destroy_groups(before)
    assert str(tensor_parallel.get_cuda_rng_tracker().get_states()) == generators
    sums.append(_works())
    dist.barrier(group=control_group())
    return sums, same, before.groups()


def shared_with_new_ones():
    """A group that was set aside and is in use again outlives the rest, and so do the job's own."""
    import torch

    parallel_state.initialize_model_parallel(1, 2)
    before = set_groups_aside()
    parallel_state.initialize_model_parallel(1, 1)
    shared = before.values["_PIPELINE_MODEL_PARALLEL_GROUP"]
    parallel_state._GROUP_OF_ANOTHER_VERSION = {"any": [shared, dist.group.WORLD]}
    before.values["_WORLD"] = (dist.group.WORLD, control_group())
    destroy_groups(before)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=shared)
    dist.all_reduce(tensor)
    dist.barrier(group=control_group())
    record = set_groups_aside()
    assert not hasattr(parallel_state, "_GROUP_OF_ANOTHER_VERSION") and shared in record.groups()
    destroy_groups(record)
    return tensor.item(), len(dist.distributed_c10d._world.pg_map)


def change_often(flags, cycles):
    """(open files, threads) of this rank after each change of the degrees with all that is built on groups; every
    third one is rolled back."""
    choices = [arguments(flags, num_stages) for num_stages in (4, 2, 1)]
    args = initialize.set_up(choices[0])
    parts, looks = rebuilt(args, args), []
    for cycle in range(cycles):
        before = set_groups_aside()
        new_args = initialize.set_up(choices[(cycle + 1) % 3])
        new = rebuilt(new_args, args)
        if cycle % 3 == 2:
            new.update.close()
            del new
            gc.collect()
            destroy_groups(set_groups_aside())
            restore_groups(before)
        else:
            parts.update.close()
            parts = new
            del new
            gc.collect()
            destroy_groups(before)
        looks.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    parts.update.close()
    return looks
