"""The processes of a benchmark: a gloo group on this machine, or a job of torchrun."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron import backend

ROOT = Path(__file__).resolve().parents[2]


def run_group(world_size: int, run: Callable[..., Any] | str, *arguments: object) -> Any:
    """Call `run(*arguments)` in each of `world_size` processes, and wait for their end. Returns rank 0's result.

    The result must be plain data. `run` may be given as `MODULE:FUNCTION`; such a module may import megatron.core,
    since the backend is installed first.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        how = (store.port, world_size, result, run, arguments)
        torch.multiprocessing.spawn(_run_rank, args=how, nprocs=world_size)
        return json.loads(result.read_text())


def _run_rank(
    rank: int, port: int, world_size: int, result: Path, run: Callable[..., Any] | str, arguments: tuple
) -> None:
    if isinstance(run, str):
        run = function_of(run)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = run(*arguments)
    if rank == 0:
        result.write_text(json.dumps(found))
    if dist.is_initialized():  # `run` may have destroyed the process group
        dist.barrier()
        dist.destroy_process_group()


def function_of(name: str) -> Callable[..., Any]:
    """Import a function given as `MODULE:FUNCTION`, after installing the backend, which megatron.core needs."""
    backend.install()
    module, function = name.split(":")
    return getattr(import_module(module), function)


def gathered(value: Any) -> list:
    """The `value` of each rank. Collective: every rank must call it."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def torchrun(num_ranks: int, *argv: object, **options: Any) -> subprocess.CompletedProcess:
    """Run a program with its flags on `num_ranks` ranks. `options`: arguments of `subprocess.run`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.run([*command, *map(str, argv)], **{"env": environment(), **options})


def call(num_ranks: int, function: str, *words: object, **options: Any) -> subprocess.CompletedProcess:
    """Make `num_ranks` ranks call `MODULE:FUNCTION` with `words`. The module may import megatron.core."""
    return torchrun(num_ranks, "-m", "benchmarks.common.rank", function, *words, **options)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that imports from this checkout, with one thread unless the user sets another
    number."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **variables,
    }
