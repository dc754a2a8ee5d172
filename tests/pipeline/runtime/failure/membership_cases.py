"""What the processes of test_membership.py do, and the job that they form."""

import ctypes
import math
import os
import random
import signal
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch.distributed import TCPStore

from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.runtime.failure.membership import Membership
from tests import workers

PATIENCE = 60.0  # seconds for anything that should take less than a second, on a busy machine


def live(
    connection: Connection,
    output: str,
    port: int,
    rank: int,
    world_size: int,
    failure_timeout: float,
    patience: float,
    group_size: int,
) -> None:
    """A rank: it does what it is told, comes to an agreement after each alarm, and says which epochs it is in."""
    os.setpgid(0, 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    try:
        membership = Membership(
            TCPStore("127.0.0.1", port, is_master=False), rank, world_size, failure_timeout=failure_timeout,
            group_size=group_size,
        )  # fmt: skip
        say(connection, membership.begin(PATIENCE))
        while True:
            if membership.alarm is not None:
                say(connection, membership.agree(f"note of {rank}", timeout=PATIENCE, patience=patience))
            if connection.poll(0.01):
                do, *arguments = connection.recv()
                if do == "leave":
                    membership.leave()
                    break
                if do == "agree":
                    admits, timeout = arguments
                    say(connection, membership.agree(f"note of {rank}", admits=admits, timeout=timeout))
                elif do == "hold":  # the interpreter, as a call into a library may
                    ctypes.PyDLL(None).sleep(*arguments)
                    connection.send("held")
                elif do == "announce":  # and hold it longer than the failure timeout
                    announced, seconds = arguments
                    with membership.silent_for(announced):
                        connection.send("announced")
                        ctypes.PyDLL(None).sleep(seconds)
                    connection.send("held")
                elif do == "hang":  # the training thread alone
                    time.sleep(*arguments)
                elif do == "suspect":
                    membership.suspect(*arguments)
                elif do == "newcomers":
                    connection.send(membership.newcomers())
                elif do == "confirm":
                    os.kill(os.getpid(), signal.SIGSTOP)  # between the decision to write and the writing
                    membership.confirm()
                    Path(arguments[0]).write_text("written")
                elif do == "store":
                    membership.store().set(*arguments)
                    connection.send(membership.store().get(arguments[0]))
    except OnThisRank as error:
        connection.send(str(error))
        os._exit(3)
    os._exit(0)


def say(connection: Connection, epoch) -> None:
    told = {"ranks": epoch.ranks, "lost": dict(epoch.lost), "joined": epoch.joined, "notes": dict(epoch.notes)}
    connection.send((epoch.number, told))


class Job:
    """Ranks in processes of their own, and the store that their launcher would host."""

    def __init__(
        self, folder: Path, world_size: int, *, timeout: float = 4.0, patience: float = math.inf, group_size: int = 1
    ) -> None:
        self.folder, self.world_size, self.timeout, self.patience = folder, world_size, timeout, patience
        self.group_size = group_size
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.connections = {}, {}
        self.all = []
        self.epochs = {}  # number -> {rank: what it told of the epoch}
        self.latest = {}  # rank -> the number of its epoch
        self.said = {}  # rank -> everything else that it has said
        for rank in range(world_size):
            self.start(rank)
        self.wait_for(range(world_size))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.all:
            process.kill()
            process.join()

    def start(self, rank: int) -> None:
        """Start a process of this rank; another one may have been there before."""
        self.connections[rank], theirs = Pipe()
        output = str(self.folder / f"{rank}.txt")
        process = workers.fork(
            live, theirs, output, self.store.port, rank, self.world_size, self.timeout, self.patience, self.group_size
        )
        theirs.close()
        self.processes[rank] = process
        self.all.append(process)
        self.latest[rank], self.said[rank] = -1, []

    def send(self, number: int, *ranks: int) -> float:
        """Send a signal to these ranks. Returns when."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, number)
        return time.monotonic()

    def tell(self, *command: object, ranks) -> None:
        for rank in ranks:
            self.connections[rank].send(command)

    def listen(self, seconds: float) -> None:
        """Take note of what the ranks say within this time, or until one has said something."""
        for connection in wait(list(self.connections.values()), seconds):
            rank = next(rank for rank, each in self.connections.items() if each is connection)
            try:
                said = connection.recv()
            except (EOFError, ConnectionResetError):
                del self.connections[rank]
                continue
            if not (isinstance(said, tuple) and said and isinstance(said[-1], dict)):
                self.said[rank].append(said)
                continue
            number, told = said
            assert number > self.latest[rank]
            self.latest[rank] = number
            epoch = self.epochs.setdefault(number, {})
            epoch[rank] = told
            assert all(told == each for each in epoch.values()), f"two views of epoch {number}: {epoch}"

    def wait_for(self, ranks, *, patience: float = PATIENCE) -> float:
        """Wait until exactly these ranks are in one epoch, and all of them have said so. Returns when."""
        ranks = tuple(sorted(ranks))
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not self.connections.keys().isdisjoint(ranks):
            numbers = {self.latest[rank] for rank in ranks}
            if len(numbers) == 1 and numbers != {-1} and self.epochs[max(numbers)][ranks[0]]["ranks"] == ranks:
                return time.monotonic()
            self.listen(max(0.0, deadline - time.monotonic()))
        raise AssertionError(f"{ranks} are not in one epoch: {self.latest}, {self.epochs}, {self.said}")

    def hear(self, rank: int) -> object:
        """The next thing that a rank says beside its epochs."""
        deadline = time.monotonic() + PATIENCE
        while not self.said[rank] and time.monotonic() < deadline and rank in self.connections:
            self.listen(max(0.0, deadline - time.monotonic()))
        return self.said[rank].pop(0)

    def status(self, rank: int) -> int | None:
        self.processes[rank].join(PATIENCE)
        return self.processes[rank].exitcode

    def output(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text()

    @property
    def current(self) -> dict:
        return next(iter(self.epochs[max(self.epochs)].values()))


def lose_at_random(folder: Path, seed: int, *, num_losses: int, world_size: int, timeout: float) -> float:
    """Kill or stop ranks at random moments, some of them together or during an agreement, until `num_losses` are lost.

    Those that were stopped are woken up. Returns the longest time from a loss, the last one before an agreement, to
    the agreement of all that survive.
    """
    draw = random.Random(seed)
    longest = 0.0
    with Job(folder, world_size, timeout=timeout) as job:
        alive, left = set(range(world_size)), num_losses
        while left:
            stopped = set()
            for _ in range(draw.choice([1, 1, 2, 3])):
                if not left:
                    break
                time.sleep(draw.choice([0.0, draw.uniform(0.0, 0.3), draw.uniform(0.0, 1.5 * timeout)]))
                rank = draw.choice(sorted(alive))
                number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
                alive.discard(rank)
                if number == signal.SIGSTOP:
                    stopped.add(rank)
                at = job.send(number, rank)
                left -= 1
            longest = max(longest, job.wait_for(alive, patience=timeout + 30) - at)
            job.send(signal.SIGCONT, *stopped)
            for rank in stopped:
                assert job.status(rank) == 1
                assert job.output(rank).count(f"rank {rank} was declared lost (no heartbeat") == 1
        told = {}
        for epoch in job.epochs.values():
            told |= next(iter(epoch.values()))["lost"]
        assert set(told) == set(range(world_size)) - alive
        job.tell("leave", ranks=alive)
        assert [job.status(rank) for rank in sorted(alive)] == [0] * len(alive)
    return longest
