"""The processes of `transition.py`; what they do is in transition_turns.py, which needs the backend installed."""

import os
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Job:
    """`flags` of the run beside its degrees; its stages before and after; where checkpoints go."""

    flags: str
    world_size: int
    stages: tuple[int, int]
    repeats: int
    directory: str


def run(job: Job) -> dict:
    """In the process of one rank: what all turns took."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(dist.get_rank()))
    from benchmarks.transition_turns import take_turns

    return take_turns(job)
