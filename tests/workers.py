"""Pools of worker processes for tests that need several ranks.

Problem: a test of a pipeline needs p processes with a process group, and starting them (interpreter, torch,
rendezvous) costs seconds, more than most tests themselves. Solution: one pool per world size, started once and kept
until the pytest session ends, or until others need its place; and its processes are forked from a server that has
imported everything (preloaded.py). A test hands it the name of a function, which every rank runs:

    from tests import workers

    def case(hidden_size):            # at module level, in an importable test module
        rank = torch.distributed.get_rank()
        ...
        return loss                   # anything that pickles

    def test_something():
        losses = workers.run(4, "tests.runtime.test_something:case", hidden_size=8)   # one result per rank

A case that raises, dies or hangs fails its own test only: the message holds the tracebacks of the ranks (for a hang the
stacks of all their threads), the processes and their children are killed, and the next test gets a fresh pool. Every
case has a default group of its own; it, and megatron.core's groups, are destroyed afterwards, and what the case set of
the environment is as before. Engines are the case's to close.

Workers run on the CPU unless `device="cuda"`: GPUs are hidden from them, so results are the same on any machine. With
`device="engine"` they run on the CPU, and megatron.core finds the stand-in of Transformer Engine (tests/stand_ins):
they have a server of their own, since megatron.core looks for it when it is imported.
"""

import atexit
import collections
import contextlib
import datetime
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from unittest import mock

MAX_PROCESSES = 8
START_TIMEOUT_S = 120.0
GRACE_S = 3.0  # after the first failure: time for the other ranks to report theirs
SEED = 1234
PLACE_OF_MARK, MOST_OF_MARK = "WORKERS_PLACE_OF_A_MARK", 1024
"""A server starts with a variable of that many bytes. A process that is forked from it to become a job writes the job's
mark there (tests/trainer/run/forking_launcher.py)."""
_REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_HOW = {"cpu": "forkserver", "engine": "forkserver", "cuda": "spawn"}
_contexts = {device: multiprocessing.get_context(how) for device, how in _HOW.items()}
_contexts["cpu"].set_forkserver_preload(["tests.preloaded"])
_engine_server = multiprocessing.forkserver.ForkServer()
_engine_server.set_forkserver_preload(["tests.preloaded"])
_pools: "collections.OrderedDict[tuple[int, str], _Pool]" = collections.OrderedDict()  # least recently used first


class WorkerError(AssertionError):
    """A case failed on at least one rank; the message holds every rank's traceback or fate."""


def run(
    world_size: int, function: str, *, timeout: float = 120.0, grace: float = GRACE_S, device: str = "cpu", **kwargs
) -> list:
    """Run `function` ("package.module:name") with `kwargs` on `world_size` ranks; return their results in rank order.

    In the workers the default process group (gloo) is up, `backend.install()` has run and the seeds are set. `timeout`
    is in seconds, and so is `grace`, the time for the other ranks after the first failure. Raises `WorkerError` where a
    rank raises, dies, or has not answered in time.
    """
    pool = _get_pool(world_size, device)
    try:
        return pool.run(function, kwargs, timeout, grace)
    except BaseException:  # also the test's own timeout and Ctrl-C: the ranks may still be inside the case
        _pools.pop((world_size, device), None)
        pool.kill()
        raise


def fork(target: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    """Start a process of its own, without GPU, for a test whose processes end badly; importing costs it nothing."""
    with _worker_environment("cpu"):
        process = _contexts["cpu"].Process(target=target, args=arguments)
        process.start()
    return process


def close_all() -> None:
    """End every pool; no worker process is left when this returns."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_all)


def _get_pool(world_size: int, device: str) -> "_Pool":
    if not 1 <= world_size <= MAX_PROCESSES:
        raise ValueError(f"world_size is {world_size}, but tests use 1 to {MAX_PROCESSES} processes")
    key = (world_size, device)
    if key in _pools and not _pools[key].healthy():
        _pools.pop(key).kill()
    if key not in _pools:
        while sum(size for size, _ in _pools) + world_size > MAX_PROCESSES:
            _pools.popitem(last=False)[1].close()
        _pools[key] = _Pool(world_size, device)
    _pools.move_to_end(key)
    return _pools[key]


class _Pool:
    """`world_size` processes in one gloo group, driven over one pipe each."""

    def __init__(self, world_size: int, device: str):
        self._directory = tempfile.TemporaryDirectory(prefix="workers-")
        self._connections = []
        self._processes = []
        context = _contexts[device]
        with _worker_environment(device):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, world_size, theirs, self._stacks_path(rank)), name=f"rank {rank}"
                )
                with _server_of(device):
                    process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
        try:
            # Rank 0 hosts the store on a port that the system chose; the others need its number.
            port = self._receive({0}, START_TIMEOUT_S, "starting")[0]
            for connection in self._connections[1:]:
                connection.send_bytes(pickle.dumps(port))
            self._receive(set(range(world_size)), START_TIMEOUT_S, "starting")
        except BaseException:
            self.kill()
            raise

    def run(self, function: str, kwargs: dict, timeout: float, grace: float) -> list:
        message = pickle.dumps((function, kwargs, list(sys.path)))
        for connection in self._connections:
            connection.send_bytes(message)
        results = self._receive(set(range(len(self._processes))), timeout, f"in {function}", grace)
        return [results[rank] for rank in range(len(self._processes))]

    def healthy(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Ask the idle workers to leave, and kill those that do not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the workers and whatever they started: each leads a process group of its own."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.is_alive():  # it may not have made its group yet
                process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()

    def _receive(self, waiting: set[int], timeout: float, doing: str, grace: float = GRACE_S) -> dict[int, object]:
        """One answer of each rank in `waiting`; after the first failure the others get a short grace only."""
        results, failures = {}, {}
        waiting = set(waiting)
        start = time.monotonic()
        deadline = start + timeout
        while waiting:
            handles = {self._connections[rank]: rank for rank in waiting}
            handles.update({self._processes[rank].sentinel: rank for rank in waiting})
            ready = multiprocessing.connection.wait(handles, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted({handles[handle] for handle in ready}):
                waiting.discard(rank)
                succeeded, value = self._answer(rank)
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + grace)
        if waiting and not failures:
            self._dump_stacks(waiting)
            for rank in sorted(waiting):
                failures[rank] = f"hung: no answer after {timeout:g} s. Its threads:\n{self._stacks(rank)}"
        elif failures:
            for rank in sorted(waiting):
                failures[rank] = f"did not answer within {grace:g} s after the failure above"
        if failures:
            lines = [f"{len(failures)} of {len(self._processes)} ranks failed {doing}"]
            lines += [f"--- rank {rank}: {failure}" for rank, failure in failures.items()]
            raise WorkerError("\n".join(lines))
        return results

    def _answer(self, rank: int) -> tuple[bool, object]:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(GRACE_S)
            code = self._processes[rank].exitcode
            return False, f"died with exit code {code}\n{self._stacks(rank)}"

    def _dump_stacks(self, ranks: set[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _stacks_path(self, rank: int) -> str:
        return os.path.join(self._directory.name, f"stacks_{rank}.txt")

    def _stacks(self, rank: int) -> str:
        try:
            with open(self._stacks_path(rank), encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""


def _server_of(device: str) -> contextlib.AbstractContextManager:
    """While it is active, processes are forked from the server of that device; multiprocessing knows one."""
    if device != "engine":
        return contextlib.nullcontext()
    connect = _engine_server.connect_to_new_process
    return mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", connect)


@contextlib.contextmanager
def _worker_environment(device: str):
    """The environment that workers inherit, or the server does from which they are forked.

    One thread each, no GPU where the case is for the CPU, and the repository on the path: a server that does not find
    its module goes on without it.
    """
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    wanted[PLACE_OF_MARK] = " " * MOST_OF_MARK
    stand_ins = os.path.join(_REPOSITORY, "tests", "stand_ins") if device == "engine" else None
    wanted["PYTHONPATH"] = os.pathsep.join(filter(None, [_REPOSITORY, stand_ins, os.environ.get("PYTHONPATH")]))
    if device != "cuda":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    saved = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(rank: int, world_size: int, connection, stacks_path: str) -> None:
    """A worker's life: join the group, then run one case after another until told to leave."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends the pool
    stacks = open(stacks_path, "w", encoding="utf-8")  # noqa: SIM115 - the signal handlers write to its descriptor
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        store = _join_store(rank, world_size, connection)
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    connection.send_bytes(pickle.dumps((True, None)))
    for number in itertools.count():
        try:
            message = pickle.loads(connection.recv_bytes())
        except EOFError:
            message = None
        if message is None:
            os._exit(0)  # not through interpreter shutdown: peers that are gone already would be waited for
        _enter_group(store, number, rank, world_size)
        succeeded, answer = _answer_to(*message)
        _leave_group(store, number, rank, world_size, succeeded)
        connection.send_bytes(answer)


def _join_store(rank: int, world_size: int, connection):
    """The store where the pool's ranks meet, once per pool."""
    import torch

    from megatron import backend

    torch.set_num_threads(1)
    backend.install()
    timeout = datetime.timedelta(seconds=600)
    if rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False)
        connection.send_bytes(pickle.dumps((True, store.port)))
    else:
        port = pickle.loads(connection.recv_bytes())
        store = torch.distributed.TCPStore("127.0.0.1", port, world_size, False, timeout)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    return store


def _enter_group(store, number: int, rank: int, world_size: int) -> None:
    """Make the default group of one case."""
    import torch

    own = torch.distributed.PrefixStore(f"case{number}", store)
    timeout = datetime.timedelta(seconds=600)
    torch.distributed.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=timeout)


def _leave_group(store, number: int, rank: int, world_size: int, succeeded: bool) -> None:
    """Destroy the groups of a case, its own included: each has threads, which would add up to thousands.

    A rank leaves once its peers are done with it. After a failure the pool is killed, so nothing is waited for.
    """
    import torch

    from megatron.core import parallel_state

    own = torch.distributed.PrefixStore(f"left{number}", store)
    own.set(str(rank), "")
    if not succeeded:
        return
    with contextlib.suppress(torch.distributed.DistStoreError):  # a peer that hangs is the test's to report
        own.wait([str(peer) for peer in range(world_size)], datetime.timedelta(seconds=10))
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    gc.collect()


def _answer_to(function: str, kwargs: dict, path: list[str]) -> tuple[bool, bytes]:
    """(the case succeeded, its pickled answer)."""
    try:
        sys.path[:] = path
        module_name, _, name = function.partition(":")
        case = getattr(importlib.import_module(module_name), name)
        _set_seeds()
        if "transformer_engine.pytorch.fp8" in sys.modules:  # it knows the layers of earlier cases, and their groups
            sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager.reset()
        with mock.patch.dict(os.environ):  # later cases find it as this one did: megatron.core sets variables
            value = case(**kwargs)
        # Plain pickle copies tensors; multiprocessing's own would share memory with a process that may be killed.
        return True, pickle.dumps((True, value))
    except BaseException:
        return False, pickle.dumps((False, traceback.format_exc()))


def _set_seeds() -> None:
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def _leave_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)
