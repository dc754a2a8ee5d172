"""A pool of processes that measure, and their tasks: the processes become ranks of a job, build parts, and time them.

Problem: a stage is measured in a job of its tensor parallel ranks. If processes share a processor, several such jobs
have to work at the same time, as in training. Starting processes for each measurement would take longer than the
measurement.

Solution: the processes are started once, and several of them can work on a task at the same time. A task has a number
of jobs and a number of ranks in each job. Each process becomes a rank of its job, builds its part, and reports that it
is ready; when all are ready, all begin. A process that fails or dies ends the pool.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import StagePosition
from megatron.processes import MARK, end_marked, end_worker_with_parent, mark_of
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.plan.command import SEARCHED

if TYPE_CHECKING:
    from megatron.trainer.start_up.run import TrainingProgram

_START_TIMEOUT = 300.0  # seconds; torch's import takes long on a busy machine
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|bad_alloc")


class MeasuringError(ValueError):
    """The error for a task that failed; its text names the process and the reason."""


@dataclass(frozen=True, kw_only=True)
class MeasuringTask:
    """A task that `num_jobs` jobs of `num_ranks` ranks each run at the same time.

    `run` is called in each process with `store`, `start` and the arguments; it must call `start` when it is ready.
    """

    num_ranks: int
    num_jobs: int
    run: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def working(self) -> int:
        return self.num_ranks * self.num_jobs


class Pool:
    """A pool of `size` processes with `threads` CPU threads each. Use it as a context manager."""

    def __init__(self, size: int, *, threads: int, task_timeout: float = 3600.0) -> None:
        self.size = size
        self._task_timeout = task_timeout
        self._stores = tempfile.TemporaryDirectory(prefix="profile_")
        self._mark = mark_of(self._stores.name)
        self._num_tasks = 0
        self._connections: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # started here, since it must not inherit the mark
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            MARK: self._mark,
        }
        with _environment(environment):
            for index in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, index, size), daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        if kind is None:
            for connection in self._connections:
                with suppress(OSError):
                    connection.send(None)
            for process in self._processes:
                process.join(10.0)
        end_marked(self._mark)  # ends the child processes of the pool's processes, too
        for process in self._processes:
            process.join()
        self._stores.cleanup()

    def do(self, task: MeasuringTask) -> list[Any]:
        """Run a task. Returns the results of all ranks of all jobs, job by job. Raises MeasuringError if it fails."""
        assert task.working <= self.size, task
        self._num_tasks += 1
        for index in range(task.working):
            job, rank = divmod(index, task.num_ranks)
            store = os.path.join(self._stores.name, f"{self._num_tasks}_{job}")
            self._send(index, (task, rank, store))
        self._collect(task.working, self._task_timeout + _START_TIMEOUT)  # ready
        for index in range(task.working):
            self._send(index, "start")
        return self._collect(task.working, self._task_timeout)

    def _send(self, index: int, what: object) -> None:
        try:
            self._connections[index].send(what)
        except OSError:
            raise self._death(index) from None

    def _death(self, index: int) -> MeasuringError:
        self._processes[index].join(5.0)
        return MeasuringError(
            f"process {index} ended without an error message (status {self._processes[index].exitcode}); -9 is how "
            "the system ends one when memory is short"
        )

    def _collect(self, count: int, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        index_of = {connection: index for index, connection in enumerate(self._connections[:count])}
        while len(results) < count:
            waiting = [connection for connection, index in index_of.items() if index not in results]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MeasuringError(
                    f"processes {[index_of[each] for each in waiting]} have not ended in {timeout:g} s"
                )
            for connection in ready:
                index = index_of[connection]
                try:
                    is_fine, value = connection.recv()
                except (EOFError, OSError):
                    raise self._death(index) from None
                if not is_fine:
                    raise MeasuringError(f"process {index}: {value}")
                results[index] = value
        return [results[index] for index in range(count)]


def _environment(values: dict[str, str]) -> ExitStack:
    """Set environment variables within a block, for processes started in it; restore the old values at its end."""
    stack = ExitStack()
    for name, value in values.items():
        before = os.environ.get(name)
        os.environ[name] = value
        if before is None:
            stack.callback(os.environ.pop, name, None)
        else:
            stack.callback(os.environ.__setitem__, name, before)
    return stack


def _serve(connection: Connection, local_rank: int, local_size: int) -> None:
    """The main function of a process in the pool: it runs tasks until the parent ends it or a task fails."""
    from megatron import backend

    multiprocessing.current_process().daemon = False  # data loaders start child processes, which daemons cannot have
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to all processes; the parent ends them
    end_worker_with_parent()
    backend.install()
    backend.keep_freed_memory()  # as in training
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    while (order := connection.recv()) is not None:
        task, rank, store = order
        try:
            connection.send((True, _do(task, rank, store, connection)))
        except BaseException as error:
            connection.send((False, _told(error)))
            return


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return text
    if _OUT_OF_MEMORY.search(f"{type(error).__name__}: {text}"):
        return (
            f"out of memory; leave out this microbatch size or recompute scope, or take a larger tensor degree ({text})"
        )
    return f"{type(error).__name__}: {text}\n{traceback.format_exc()}"


def _do(task: MeasuringTask, rank: int, store_path: str, connection: Connection) -> Any:
    import torch

    from megatron import backend
    from megatron.trainer.start_up import initialize

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(task.num_ranks))
    store = torch.distributed.FileStore(store_path, task.num_ranks) if task.num_ranks > 1 else None

    def start() -> None:
        gc.collect()
        gc.freeze()  # as in training
        connection.send((True, "ready"))
        assert connection.recv() == "start"

    try:
        return task.run(store=store or torch.distributed.HashStore(), start=start, **task.arguments)
    finally:
        initialize.shut_down()
        gc.unfreeze()
        gc.collect()  # a stage has reference cycles; its memory must be free for the next one
        if backend.is_cuda():
            torch.cuda.empty_cache()


def working_counts(num_ranks: int, processes: int, *, shares_processor: bool) -> Sequence[int]:
    """The numbers of processes to measure with: the ranks of one job, two jobs, four jobs, ..., up to all processes.

    If each process has its own device, only the largest number is used, as in training.
    """
    most = processes // num_ranks * num_ranks
    if not shares_processor:
        return (most,)
    counts = [num_ranks]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else (*counts, most)


# --- the tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A plan to time one stage. `argv`: flags of the model; see `plan.command.model_argv`."""

    architecture: str
    argv: tuple[str, ...]
    place: StagePosition
    num_layers: int
    tensor: int
    micro_batch_size: int
    recompute: RecomputeScope
    weights: WeightPolicy
    sequence_parallel: bool
    num_microbatches: int
    num_batches: int
    num_warmup: int

    def arguments(self) -> Arguments:
        """The parsed flags of a run with this stage. Raises ValueError for invalid flags."""
        from megatron.trainer.arguments import parse_args

        configuration = Configuration(
            tensor=self.tensor,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.micro_batch_size * self.num_microbatches,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel and self.tensor > 1,
        )
        length = ("--num-layers", str(self.num_layers), "--train-iters", str(self.num_batches), "--eval-iters", "0")
        return parse_args([*self.argv, *configuration.argv(), *length], defaults=SEARCHED[self.architecture][1])

    def time(self, *, store: object, start: Callable[[], None]) -> tuple[dict[str, list[float]], int, int]:
        """Build and time the stage; called on each rank.

        Returns the samples, the number of the rank's parameters, and the bytes that a microbatch keeps between the
        halves of a split backward (0 for Transformer Engine's layers, whose backwards are timed whole).
        """
        from megatron.trainer.profile.measurements import build_lone_stage, time_stage

        args = prepare(self.arguments(), store)
        lone = build_lone_stage(args, training_program(self.architecture), self.place, self.weights)
        try:
            samples = time_stage(
                lone, num_microbatches=self.num_microbatches, num_batches=self.num_batches,
                num_warmup=self.num_warmup, start=start, halves=args.transformer_impl == "local",
            )  # fmt: skip
        finally:
            lone.close()
        return samples, lone.num_parameters, lone.deferred_bytes

    def describe(self, *, store: object, start: Callable[[], None]) -> dict:
        """The profile's fields about the model and the machine; called on one rank, with the arguments of `time`."""
        from megatron.trainer.profile.measurements import describe

        args = prepare(self.arguments(), store)
        start()
        return describe(args)


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """A plan to time transfers between two ranks, or all-reduces over several. `sizes`: numbers of bytes."""

    sizes: tuple[int, ...]
    num_iterations: int
    num_warmup: int

    def time_transfers(self, *, store: object, start: Callable[[], None]) -> dict[int, list[float]]:
        return self._time("time_transfers", store, start)

    def time_all_reduces(self, *, store: object, start: Callable[[], None]) -> dict[int, list[float]]:
        return self._time("time_all_reduces", store, start)

    def _time(self, measurement: str, store: object, start: Callable) -> dict[int, list[float]]:
        import torch

        from megatron import backend
        from megatron.trainer.profile import measurements
        from megatron.trainer.start_up import initialize

        rank, world_size, local_rank = initialize.environment_ranks()
        if backend.is_cuda():
            torch.cuda.set_device(local_rank)
        torch.distributed.init_process_group(
            backend.process_group_backend(), store=store, rank=rank, world_size=world_size
        )
        start()
        measure = getattr(measurements, measurement)
        return measure(self.sizes, num_iterations=self.num_iterations, num_warmup=self.num_warmup)


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """A plan to time copies between host and device, and the host's optimizer.

    `sizes`: numbers of bytes to copy. `model`: the model of the layer that is updated. `dtype`: the dtype of its
    weights.
    """

    sizes: tuple[int, ...]
    model: Architecture
    dtype: str
    num_iterations: int
    num_warmup: int

    def time(self, *, store: object, start: Callable[[], None]) -> tuple[dict, int, dict[str, list[float]]]:
        """Time copies and updates; called in each process.

        Returns the seconds of copies, the number of parameters, and the seconds of their updates.
        """
        import torch

        from megatron import backend
        from megatron.trainer.profile.measurements import time_copies, time_updates
        from megatron.trainer.start_up import initialize

        if backend.is_cuda():
            torch.cuda.set_device(initialize.environment_ranks()[2])
        often = {"num_iterations": self.num_iterations, "num_warmup": self.num_warmup}
        start()
        return time_copies(self.sizes, **often), *time_updates(self.model, self.dtype, **often)


def training_program(architecture: str) -> TrainingProgram:
    """The training program of an architecture."""
    name = SEARCHED[architecture][0].removesuffix(".py")
    return importlib.import_module(f"megatron.trainer.programs.{name}").program()


def prepare(parsed: Arguments, store: object | None) -> TrainConfig:
    """Complete the configuration, and join a job through `store`; None if this process is a rank already.

    Raises ValueError for invalid arguments.
    """
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize

    args, _ = complete(parsed)
    if store is not None:
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        initialize.join_process_group(store, args.distributed_backend, timeout)
    return initialize.set_up(args)
