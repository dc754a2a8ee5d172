"""Whatever a process waits for over its connections ends when these are broken, and what is kept stays."""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from megatron.backend.gloo import remember_groups, share_device
from megatron.pipeline.runtime.failure import connections
from megatron.pipeline.runtime.failure.connections import (
    break_connections,
    interrupt_waits,
    leave_behind,
    open_connections,
)
from tests import workers

LONG = timedelta(seconds=300)
PATIENCE = 60.0  # seconds for what takes a moment, on a busy machine


def ended(wait: Callable[[], object], found: dict, name: str) -> threading.Thread:
    """A thread that waits, and notes the error with which this ends, and when."""

    def target() -> None:
        try:
            wait()
            found[name] = ("no error", time.monotonic())
        except Exception as error:
            found[name] = (type(error).__name__, time.monotonic())

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def rank(number: int, port: int, pipe: Connection) -> None:
    """Rank 0 waits for what rank 1 never does, and breaks its connections; rank 1 waits for rank 0."""
    kept_store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    kept = open_connections()
    store = kept_store.clone()
    dist.init_process_group("gloo", store=dist.PrefixStore("groups", store), rank=number, world_size=2, timeout=LONG)
    groups = [dist.new_group([0, 1], timeout=LONG) for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    found: dict[str, tuple[str, float]] = {}
    threads = []
    if number == 0:
        other = kept_store.clone()
        threads += [
            ended(lambda: dist.recv(torch.ones(8), 1, group=groups[0]), found, "receive"),
            ended(lambda: dist.all_reduce(torch.ones(8), group=groups[1]), found, "all-reduce"),
            ended(lambda: other.get("nobody writes it"), found, "key"),
        ]
        time.sleep(0.5)
        began, before = time.monotonic(), dict(found)
        num_broken = break_connections(kept=kept)
        for thread in threads:
            thread.join(PATIENCE)
        seconds = {name: at - began for name, (_, at) in found.items()}
        kept_store.set("written", "afterwards")
        break_connections(kept=kept)  # as at each heartbeat until all ranks have agreed
        pipe.send((before, {name: error for name, (error, _) in found.items()}, seconds, num_broken,
                   kept_store.get("written")))  # fmt: skip
    else:
        thread = ended(lambda: dist.recv(torch.ones(8), 0, group=groups[2]), found, "receive")
        thread.join(PATIENCE)
        pipe.send((found["receive"][0] if found else "waits", kept_store.get("written")))
    pipe.recv()
    os._exit(0)


@contextmanager
def two_ranks(target: Callable, *arguments) -> Iterator[tuple[list[Connection], list[BaseProcess]]]:
    """The pipes of two forked ranks, which get their number, `arguments`, the port of their store and a pipe."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [Pipe() for _ in range(2)]
    processes = [workers.fork(target, number, *arguments, store.port, pipes[number][1]) for number in range(2)]
    try:
        yield [here for here, _ in pipes], processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_all_waits_end_and_the_kept_connection_stays():
    """A receive, a collective and the wait for a key end with errors, and so does what the other process waits for."""
    with two_ranks(rank) as (pipes, _):
        assert pipes[0].poll(PATIENCE)
        before, errors, seconds, num_broken, kept = pipes[0].recv()
        assert not before, "something ended by itself"
        assert sorted(errors) == ["all-reduce", "key", "receive"] and "no error" not in errors.values(), errors
        assert max(seconds.values()) < 5.0, seconds  # a second, where nothing else runs
        assert num_broken >= 5 and kept == b"afterwards"
        assert pipes[1].poll(PATIENCE)
        error, told = pipes[1].recv()
        assert error not in ("waits", "no error") and told == b"afterwards"


def test_connections_are_broken_but_those_that_are_kept(tmp_path):
    """This end reads the end of its stream; a kept connection, a door, local sockets, a pipe and a file stay."""
    with socket.create_server(("127.0.0.1", 0)) as door, open(tmp_path / "file", "w") as file:
        ends = [socket.create_connection(door.getsockname()) for _ in range(2)]
        peers = [door.accept()[0] for _ in ends]
        local, pipe = socket.socketpair(), os.pipe()
        inodes = [os.fstat(each.fileno()).st_ino for each in (*ends, *peers)]
        assert {*inodes} <= open_connections()
        kept = open_connections() - {inodes[0]}
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            break_connections(kept=kept)
        assert len(os.listdir("/proc/self/fd")) == before  # whatever they are, none was left open beside
        assert ends[0].recv(1) == b""
        ends[0].send(b"0")  # gloo would forget a send that fails
        assert peers[0].recv(1) == b"0"
        ends[1].send(b"1")
        local[0].send(b"2")
        os.write(pipe[1], b"3")
        file.write("4")
        assert (peers[1].recv(1), local[1].recv(1), os.read(pipe[0], 1)) == (b"1", b"2", b"3")
        with socket.create_connection(door.getsockname()):
            door.accept()[0].close()
        for each in (*ends, *peers, *local):
            each.close()
        for number in pipe:
            os.close(number)


def test_a_connection_with_the_number_of_a_kept_one_is_broken():
    """The kept one was closed, and the next connection of the process has its descriptor. One that is a duplicate of a
    kept one stays with it."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def connected() -> tuple[socket.socket, socket.socket]:
            return socket.create_connection(door.getsockname()), door.accept()[0]

        first, second = connected(), connected()
        kept = open_connections()
        number = first[0].fileno()
        first[0].close()
        later = connected()
        assert later[0].fileno() == number
        duplicate = second[0].dup()
        assert break_connections(kept=kept) == 2  # both ends of the later one
        assert later[1].recv(1) == later[0].recv(1) == b""
        duplicate.send(b"1")
        assert second[1].recv(1) == b"1"
        for each in (first[1], *second, *later, duplicate):
            each.close()


# --- collectives and sends that gloo does not end

chain = []  # a group as the chain of reductions has them, in a rank


def scatter_in_chain(whole: torch.Tensor) -> None:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.SUM
    chain[0]._reduce_scatter_base(torch.empty(len(whole) // 2), whole, options).wait()


COLLECTIVES = {
    "all-reduce": lambda whole: dist.all_reduce(whole),
    "reduce-scatter": lambda whole: dist.reduce_scatter_tensor(torch.empty(len(whole) // 2), whole),
    "all-gather": lambda whole: dist.all_gather_into_tensor(torch.empty(2 * len(whole)), whole),
    "reduce-scatter of the chain": scatter_in_chain,
}


def joined(number: int, port: int) -> None:
    torch.set_num_threads(1)
    share_device()
    remember_groups()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=LONG)
    dist.all_reduce(torch.ones(1))
    chain.append(dist.ProcessGroupGloo(dist.PrefixStore("chain", store), number, 2, LONG))


def given_up() -> float:
    """Give up all groups, and return the seconds that this took."""
    began = time.monotonic()
    leave_behind(LONG)
    dist.destroy_process_group()
    chain.clear()
    gc.collect()
    return time.monotonic() - began


def forgotten(number: int, name: str, port: int, pipe: Connection) -> None:
    """Rank 0 waits without rank 1, while breaks leave all connections: as where gloo forgets a send."""
    joined(number, port)
    if number == 1:
        pipe.recv()  # the end of the pipe
    interrupt_waits()
    found: dict[str, tuple[str, float]] = {}
    began = time.monotonic()
    waits = COLLECTIVES | {"send": lambda whole: dist.send(whole, 1)}
    thread = ended(lambda: waits[name](torch.ones(8)), found, name)
    thread.join(0.5)
    before = dict(found)
    while thread.is_alive() and time.monotonic() < began + PATIENCE:
        break_connections(kept=open_connections())
        thread.join(0.1)
    pipe.send((before, found.get(name), given_up()))
    pipe.recv()  # the process ends, although gloo's thread still waits


@pytest.mark.parametrize("name", [*COLLECTIVES, "send"])
def test_a_wait_that_gloo_forgets_ends(name):
    """The wait raises an error, the groups can be destroyed, and the process ends."""
    with two_ranks(forgotten, name) as (pipes, processes):
        assert pipes[0].poll(2 * PATIENCE), "it waits for the collective, or for the end of the groups"
        before, (error, _), seconds = pipes[0].recv()
        assert not before and error == "RuntimeError" and seconds < 5.0
        pipes[0].send(None)
        processes[0].join(PATIENCE)
        assert processes[0].exitcode == 0


def gone(number: int, name: str, port: int, pipe: Connection) -> None:
    """Rank 1 ends while rank 0 waits for it, and rank 0 breaks nothing."""
    joined(number, port)
    interrupt_waits()
    if number == 1:
        time.sleep(0.5)
        os._exit(0)
    waits = COLLECTIVES | {"send": lambda whole: dist.send(whole, 1)}
    try:
        waits[name](torch.ones(8))
        pipe.send("no error")
    except RuntimeError as error:
        pipe.send(str(error))
    os._exit(0)


@pytest.mark.parametrize("name", [*COLLECTIVES, "send"])
def test_an_error_of_gloo_is_raised_at_once(name):
    with two_ranks(gone, name) as (pipes, _):
        assert pipes[0].poll(PATIENCE), "the error is taken for a wait that takes longer"
        error = pipes[0].recv()
        assert error != "no error" and "does not end" not in error


def test_a_send_that_fails_at_the_last_moment_is_not_done(monkeypatch):
    """Its thread notes the error and ends while it is looked at."""
    go = threading.Event()

    def fail(work: object) -> None:
        go.wait()
        raise RuntimeError("the send failed")

    monkeypatch.setattr(connections, "_wait", fail)
    look = connections._LooksAtSend(None)
    is_alive = look._thread.is_alive

    def after_its_end() -> bool:
        go.set()
        look._thread.join()
        return is_alive()

    monkeypatch.setattr(look._thread, "is_alive", after_its_end)
    with pytest.raises(RuntimeError, match="the send failed"):
        look()


def test_what_is_left_behind_is_dropped_when_its_time_is_over(monkeypatch):
    kept = []
    monkeypatch.setattr(connections, "_left_behind", kept)
    monkeypatch.setattr(connections, "take_groups", lambda: ["a group"])
    leave_behind(timedelta(seconds=-10))
    assert [groups for _, groups in kept] == [["a group"]]
    monkeypatch.setattr(connections, "take_groups", lambda: ["another one"])
    for _ in range(2):
        leave_behind(LONG)
    assert [groups for _, groups in kept] == [["another one"]] * 2


def in_turn(number: int, name: str, size: int, delay: float, port: int, pipe: Connection) -> None:
    """Ranks that are busy with collectives break their connections, rank 1 `delay` seconds behind rank 0."""
    joined(number, port)
    interrupt_waits()

    def break_them() -> None:
        time.sleep(0.2 + delay * number)
        for _ in range(30):
            break_connections(kept=())
            time.sleep(0.1)

    threading.Thread(target=break_them, daemon=True).start()
    whole, began = torch.ones(size), time.monotonic()
    try:
        while True:
            began = time.monotonic()
            COLLECTIVES[name](whole)
    except RuntimeError:
        pipe.send((time.monotonic() - began, given_up()))


@pytest.mark.full
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [1000, 200_000])
def test_busy_ranks_are_not_left_behind(name, size):
    """gloo forgets the send of about one in ten of these jobs."""
    for attempt in range(8):
        with two_ranks(in_turn, name, size, 0.02 * (attempt % 2)) as (pipes, processes):
            for pipe in pipes:
                assert pipe.poll(PATIENCE)
                assert max(pipe.recv()) < 10.0
            for process in processes:
                process.join(PATIENCE)
                assert process.exitcode == 0


def test_sends_arrive_and_fail_as_before():
    """Before and after waits can be interrupted: what is sent arrives, and a closed connection is an error."""
    for numbers, error in workers.run(2, f"{__name__}:sent_to_another", timeout=60):
        assert numbers == [0, 1, 2, 3] and error == "RuntimeError"


def sent_to_another() -> tuple[list, str]:
    interrupt_waits()
    rank, received = dist.get_rank(), []
    for number in range(4):
        tensor = torch.full((300_000,), float(number))
        work = dist.isend(tensor, 1 - rank)
        got = torch.empty(300_000)
        dist.recv(got, 1 - rank)
        work.wait()
        received.append(int(got.mean()))
    dist.barrier()
    try:
        dist.isend(torch.ones(8), 1 - rank).wait(timedelta(seconds=0.2))  # nobody receives it, so gloo closes it
        return received, ""
    except RuntimeError as error:
        return received, type(error).__name__


def test_reduce_scatters_are_those_of_torch():
    """Bit for bit, whatever is reduced, before and after waits can be interrupted."""
    for first, second in workers.run(2, f"{__name__}:before_and_after", timeout=60):
        assert [each.tolist() for each in first] == [each.tolist() for each in second]


def before_and_after() -> tuple[list, list]:
    def shares() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        found = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            whole = torch.randn(6, 5, generator=generator)
            share = torch.empty(3, 5)
            work = dist.reduce_scatter_tensor(share, whole, op=op, async_op=True)
            work.wait()
            dist.reduce_scatter_tensor(also := torch.empty(15), whole.view(-1), op=op)
            found += [share, also]
        return found

    first = shares()
    interrupt_waits()
    return first, shares()
