"""The processes of `transition.py`; what they do is in transition_turns.py, which needs the backend installed."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Job:
    """`flags` of the run beside its degrees; its stages before and after; where checkpoints go."""

    flags: str
    world_size: int
    stages: tuple[int, int]
    repeats: int
    directory: str


def run_rank(rank: int, port: int, job: Job, result: Path) -> None:
    """The process of one rank; rank 0 writes what all turns took."""
    from megatron import backend

    backend.install()
    from benchmarks.transition_turns import take_turns

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, job.world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
    found = take_turns(job)
    if rank == 0:
        result.write_text(json.dumps(found))


def run_job(job: Job) -> dict:
    """Start the processes of a job, wait for them, return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(run_rank, args=(store.port, job, result), nprocs=job.world_size)
        return json.loads(result.read_text())
