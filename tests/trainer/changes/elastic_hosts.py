"""A run whose ranks believe to be on two hosts: for `watch` of run_case.py."""

import os
from collections.abc import Callable

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.pipeline.placement.topology import HOST_NAME
from megatron.trainer.start_up.run import Run


def two_hosts(run: Run) -> Callable[[], list[int]]:
    """Half of the ranks on each; at the end, the ranks of this one's pipeline."""
    before = os.environ.get(HOST_NAME)
    os.environ[HOST_NAME] = "ab"[2 * run.args.rank // run.args.world_size]

    def end() -> list[int]:
        del os.environ[HOST_NAME]
        if before is not None:
            os.environ[HOST_NAME] = before
        return dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())

    return end
