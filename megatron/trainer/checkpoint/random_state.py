"""Random number generators of one rank, in Megatron-LM's layout, so that either program resumes the other's runs."""

import random

import numpy as np
import torch

from megatron import backend
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject


def random_state() -> dict:
    """State of every generator of this process: Python, NumPy, torch, the device, tensor parallel dropout."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": backend.device_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(states: list[dict]) -> None:
    """Set the generators; `states` holds one entry, or one for each data-parallel rank."""
    state = states[parallel_state.get_data_parallel_rank() if len(states) > 1 else 0]
    random.setstate(_tuples(state["random_rng_state"]))
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    backend.set_device_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def sharded_random_state() -> ShardedObject:
    """The state as one object for each (pipeline, tensor) rank; data-parallel replicas share that of the first."""
    pipeline_size, tensor_size = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    return ShardedObject(
        "rng_state",
        [random_state()],
        (pipeline_size, tensor_size),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def own_random_state() -> ShardedObject:
    """The state as one object for each rank of the job, which the same rank takes back under other degrees."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return ShardedObject("rng_state", [random_state()], (size,), (rank,))


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
