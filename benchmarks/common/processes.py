"""The processes of a benchmark: a gloo group on this machine, or a job of torchrun."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_group(world_size: int, run: Callable[..., Any], *arguments: object, installs_backend: bool = False) -> Any:
    """Call `run(*arguments)` in each of so many processes; returns what rank 0 returned, plain data, when all have
    ended. `installs_backend`: for megatron.core."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        how = (store.port, world_size, result, installs_backend, run, arguments)
        torch.multiprocessing.spawn(_run_rank, args=how, nprocs=world_size)
        return json.loads(result.read_text())


def _run_rank(
    rank: int,
    port: int,
    world_size: int,
    result: Path,
    installs_backend: bool,
    run: Callable[..., Any],
    arguments: tuple,
) -> None:
    if installs_backend:
        from megatron import backend

        backend.install()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = run(*arguments)
    if rank == 0:
        result.write_text(json.dumps(found))
    if dist.is_initialized():  # `run` may have shut down all that there was
        dist.barrier()
        dist.destroy_process_group()


def gathered(value: Any) -> list:
    """`value` of each rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def torchrun(num_ranks: int, *argv: object, **options: Any) -> subprocess.CompletedProcess:
    """Run a program with its flags on so many ranks; `options`: of `subprocess.run`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.run([*command, *map(str, argv)], **options)
