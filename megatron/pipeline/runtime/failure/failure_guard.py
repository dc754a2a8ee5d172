"""When one rank fails, every rank ends within seconds and says why.

Problem: a rank that raises, or is killed, leaves the others blocked in transfers and collectives until a timeout of
many minutes. They then print the consequence, not the cause.

Solution: a guard around the training of each rank.

- A key in the job's store holds the story of the first failure: one line with the root cause. The first writer wins. A
  daemon thread on every rank polls the key, prints the story and ends the process, even while the main thread hangs in
  a collective.
- The ranks form a ring, and each listens on a gloo connection to its two neighbours. When a process dies without
  raising (``kill -9``, a crash), the kernel closes its connections and the neighbours notice at once. This needs no
  heartbeat and gives no false alarms. A rank that leaves the guard normally tells its neighbours before.
- A rank whose transfer broke because its peer is gone waits a moment for the peer's story before it writes its own.
- A host that is cut off from the network closes no connection. A rank that waits for it ends at the timeout of the
  transfer or collective and names the ranks that have been silent: each rank publishes its current action every `POLL`
  seconds. A rank that cannot reach the store ends when the store has been silent for the guard's `timeout`.
- A rank that fails stays until the others have read the story, at most `LINGER` seconds. Otherwise a launcher that sees
  it end would end the others before they can print, and this rank may host the store.
- A bus error from a truncated memory-mapped file is such a failure, too, and its story names the file.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, distributed_c10d

from megatron.pipeline.runtime.failure.errors import AgreedError, end_at_once, name_cut_files, write_error_file
from megatron.pipeline.runtime.failure.failure_board import (
    FailureBoard,
    launcher_hosts_store,
    silence,
    story_of_lost_store,
    story_of_silent_store,
    without_frames,
)
from megatron.pipeline.runtime.transport.channels import TransferError
from megatron.pipeline.runtime.transport.links import FOREVER, gloo_pair

POLL = 0.3
"""Seconds between two looks at the board."""
SILENCE_PATIENCE = 0.2
"""Seconds that a neighbour of a dead rank waits for that rank's story, written before its connections close."""
CONSEQUENCE_PATIENCE = 2.0
"""Seconds that a rank with a broken transfer waits for another rank's story."""
LINGER = 2.0
"""Seconds that a failed rank stays so that the others can read its story."""
UNHEARD_PATIENCE = 5 * POLL
"""Seconds without a notice after which a rank counts as silent. Measured only once something has timed out."""
_GOODBYE = timedelta(seconds=5)
_BROKEN = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "remote process exited",
)

_active: Guard | None = None
_num_guards = 0


def active() -> Guard | None:
    """Return the guard that this process is in, or None."""
    return _active


def report(error: BaseException) -> None:
    """End the job because of an error on a background thread. Without a guard do nothing: the main thread raises it."""
    if _active is not None:
        _active.fail(error)


def _tell_of_cut_file(sentence: str) -> None:
    report(OSError(sentence))
    end_at_once(sentence)


@contextmanager
def guard(
    *,
    store: Store | None = None,
    store_host: int = 0,
    exit_code: int = 1,
    timeout: timedelta = timedelta(minutes=10),
    host: str | None = None,
    before_exit: Callable[[], None] = lambda: None,
) -> Iterator[Guard | None]:
    """Guard the block: any error in it, on any rank, ends all ranks of the job with `exit_code`.

    Collective: every rank of the default group enters it, after ``init_process_group``. Enter it as soon as the process
    group exists, since nothing before it is guarded. With one rank, or without a process group, exceptions simply pass.
    ``SystemExit`` with code 0 or None counts as a normal end.

    Args:
        store: the job's store (default: the default group's).
        store_host: the rank whose process hosts the store, if torchrun does not.
        exit_code: exit status of every rank after a failure.
        timeout: how long the ranks may take to enter the block, and how long the store may be silent later.
        host: name of this host in messages (default: its host name).
        before_exit: called when a failure ends this process, since the exit runs no ``finally`` blocks.
    """
    global _active, _num_guards
    name_cut_files(_tell_of_cut_file)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield None
        return
    _num_guards += 1
    guarding = Guard(
        store or distributed_c10d._get_default_store(),
        store_host=store_host,
        scope=f"failure/{_num_guards}",
        exit_code=exit_code,
        timeout=timeout,
        host=host or socket.gethostname(),
        before_exit=before_exit,
    )
    _active = guarding
    try:
        yield guarding
    except SystemExit as error:
        if error.code not in (None, 0):
            guarding.fail(error)
        guarding.leave()
        raise
    except BaseException as error:
        guarding.fail(error)
        raise
    else:
        guarding.leave()
    finally:
        _active = None


def is_consequence(error: BaseException | None) -> bool:
    """Return whether `error` only says that another rank is gone."""
    while error is not None:
        if isinstance(error, TransferError):
            return not error.timed_out
        text = str(error).lower()
        if isinstance(error, RuntimeError | AgreedError) and any(words in text for words in _BROKEN):
            return True
        error = error.__cause__
    return False


def sentence_of(error: BaseException, name: str) -> str:
    """Describe in one line the error that ended the rank called `name`."""
    text = " ".join(without_frames(str(error)).split())
    if isinstance(error, TransferError):
        return text
    instruction = getattr(error, "pipeline_instruction", None)
    during = f" in {instruction}" if instruction is not None else ""
    return f"{getattr(error, 'pipeline_where', name)} failed{during}: {type(error).__name__}: {text}"


def is_timeout(error: BaseException) -> bool:
    """Return whether `error` says that another rank has not come in time."""
    return isinstance(error, TimeoutError) or (isinstance(error, RuntimeError) and "timed out" in str(error).lower())


class Guard:
    """The guard of one rank of the job. The function `guard` makes it."""

    def __init__(
        self, store: Store, *, store_host: int, scope: str, exit_code: int, timeout: timedelta, host: str,
        before_exit: Callable[[], None],
    ) -> None:  # fmt: skip
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self._board = FailureBoard(store, scope=scope, host=host)
        self._exit_code, self._before_exit = exit_code, before_exit
        self._timeout = timeout.total_seconds()
        self._store_host = store_host
        self._hosts_store = self.rank == store_host and not launcher_hosts_store()
        self._name = f"rank {self.rank}"
        self._doing: Callable[[], tuple[str, int | None]] = lambda: ("", None)
        self._overdue: Callable[[], BaseException | None] = lambda: None
        self._leaving = threading.Event()
        self._ending = threading.Lock()  # held once the process ends
        self._is_ending = False
        self._neighbours = self._join_ring(store, scope, timeout)
        self._listeners = [self._spawn(self._listen, *neighbour) for neighbour in self._neighbours]
        self._poller = self._spawn(self._poll)
        self._replaces_default_handler = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._replaces_default_handler:
            signal.signal(signal.SIGTERM, self._on_terminate)

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=f"failure {target.__name__}", daemon=True)
        thread.start()
        return thread

    # -- called by the engine -----------------------------------------------------------------------------------------

    def watch(
        self,
        *,
        name: str,
        doing: Callable[[], tuple[str, int | None]],
        overdue: Callable[[], BaseException | None],
    ) -> None:
        """Use the engine's information about this rank from now on.

        Args:
            name: such as "rank 2 (stage 2)".
            doing: returns (current action, the global rank that this rank waits for, or None).
            overdue: returns the error of an overdue transfer, or None.
        """
        self._name, self._doing, self._overdue = name, doing, overdue
        self._board.set_doing(self.rank, name, "", None)

    def unwatch(self) -> None:
        self._doing, self._overdue = lambda: ("", None), lambda: None

    # -- threads ------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        while not self._leaving.wait(POLL):
            story = self._board.story()
            if story is not None:
                self._end(story)
            self._board.set_doing(self.rank, self._name, *self._doing())
            if self._board.is_lost:
                self._end(story_of_lost_store(self._store_host))
            if self._board.silent_seconds > self._timeout:
                self._end(self._silent_store())
            error = self._overdue()
            if error is not None:
                self.fail(error)

    def _listen(self, neighbour: int, group: Any, side: int) -> None:
        """Wait for the neighbour's goodbye. If its process ends without one, end this process with its story."""
        try:
            group.recv([torch.empty(1)], 1 - side, side).wait(FOREVER)
            return
        except RuntimeError:
            story = self._board.wait_for_story(SILENCE_PATIENCE)
        if story is None:
            name, doing, _ = self._board.doing(neighbour)
            last = f"; last seen in {doing}" if doing else ""
            story = self._tell(f"{name} ended without an error message (killed, or crashed){last}", is_consequence=True)
        self._end(story)

    def _on_terminate(self, number: int, frame: Any) -> None:
        """Handle SIGTERM: print the story before this process ends.

        A launcher sends the signal when another rank has died. Training may replace this handler.
        """
        if self._is_ending:
            return  # the interrupted thread may itself be ending the process: let it continue
        story = self._board.wait_for_story(CONSEQUENCE_PATIENCE)
        if story is not None:
            self._end(story)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # -- stories ------------------------------------------------------------------------------------------------------

    def _tell(self, story: str, *, is_consequence: bool) -> str:
        """Write the story unless the board has one, and return the story on the board.

        If the store is lost and the error may be a consequence of that, return the story of the lost store.
        """
        first = self._board.tell(story)
        return story_of_lost_store(self._store_host) if is_consequence and self._board.is_lost else first

    def _own_story(self, error: BaseException) -> str:
        story = sentence_of(error, self._name)
        if isinstance(error, TransferError):
            return story + (self._circumstances(error.peer_rank) if error.timed_out else "")
        return story + (self._circumstances() if is_timeout(error) else "")

    def _silent_store(self) -> str:
        return story_of_silent_store(self._store_host, self._board.silent_seconds)

    def _circumstances(self, peer: int | None = None) -> str:
        """Describe the state of the other ranks when a collective, or a transfer from `peer`, has timed out."""
        if self._board.silent_seconds:
            return f"; {self._silent_store()}"
        unheard = self._board.unheard((rank for rank in range(self.world_size) if rank != self.rank), UNHEARD_PATIENCE)
        text = ""
        for host, ranks in unheard.items():
            text += f"; nothing is heard of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {host}"
        return text + self._who_waits(peer)

    def _who_waits(self, rank: int | None) -> str:
        """Describe who waits for whom, starting at `rank`, as far as the ranks have published it."""
        text, seen = "", {self.rank}
        while rank is not None and rank not in seen:
            seen.add(rank)
            name, doing, waits_for = self._board.doing(rank)
            if doing:
                text += f"; {name} is in {doing}"
            if waits_for is not None:
                text += f" from rank {waits_for}"
            rank = waits_for
        return text

    # -- the end ------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End the job because of `error` on this rank. Never returns."""
        consequence = is_consequence(error)
        story = self._board.wait_for_story(CONSEQUENCE_PATIENCE if consequence else 0.0)
        if story is None:
            # The traceback of a consequence explains nothing. Print before the story is written, which ends the job.
            if not consequence:
                with suppress(Exception):  # nobody may read it any more
                    sys.stderr.write(without_frames("".join(traceback.format_exception(error))))
            story = self._tell(self._own_story(error), is_consequence=consequence)
        self._end(story)

    def _end(self, story: str) -> None:
        """Print the root cause, wait until the others have read it, and end the process.

        Only the first caller proceeds; later callers block.
        """
        self._is_ending = True
        silence()
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread of this process is ending it
        try:
            self._say(story)
        finally:  # the other threads of this process wait for its end
            os._exit(self._exit_code)

    def _say(self, story: str) -> None:
        with suppress(Exception):
            write_error_file(story)
        with suppress(Exception):
            sys.stderr.write(f"{self._name} stops: {story}\n")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        deadline = time.monotonic() + LINGER
        num_read = self._board.count("read", 1)
        others_need_this_rank = self._hosts_store or story.startswith(f"rank {self.rank} ")
        while others_need_this_rank and num_read < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            num_read = self._board.count("read")
        with suppress(Exception):
            self._before_exit()
        logging.shutdown()

    def leave(self) -> None:
        """Say goodbye to the neighbours and wait for theirs. Meanwhile a failure elsewhere still ends this process.

        The rank that hosts the store leaves last. All threads are stopped: a thread that wakes up while the interpreter
        shuts down would abort the process.
        """
        for _, group, side in self._neighbours:
            with suppress(RuntimeError):  # the neighbour is gone: the listener handles that
                group.send([torch.zeros(1)], 1 - side, 1 - side).wait(_GOODBYE)
        for listener in self._listeners:
            listener.join()
        if not self._hosts_store:
            self._stop_polling()
        self._board.count("left", 1)
        while self._hosts_store and self._board.count("left") < self.world_size and not self._board.is_lost:
            time.sleep(0.02)
        self._stop_polling()
        self._board.close()
        self._neighbours.clear()
        if self._replaces_default_handler and signal.getsignal(signal.SIGTERM) == self._on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _stop_polling(self) -> None:
        self._leaving.set()
        self._poller.join()

    # -- the ring -----------------------------------------------------------------------------------------------------

    def _join_ring(self, store: Store, scope: str, timeout: timedelta) -> list[tuple[int, Any, int]]:
        """Connect to the neighbours. Return (neighbour, group, own side) for each of this rank's edges.

        Edge i joins rank i (side 0) and rank i + 1 (side 1).
        """
        size = self.world_size
        edges = [(edge, (edge + 1) % size) for edge in range(size if size > 2 else 1)]

        def order(edge: tuple[int, int]) -> tuple[int, int]:
            closes_odd_ring = edge[1] == 0 and size % 2 == 1
            return (2 if closes_odd_ring else edge[0] % 2), edge[0]

        joined = []
        for edge in sorted(edges, key=order):
            if self.rank in edge:
                side = edge.index(self.rank)
                name = f"{scope}/alive/{edge[0]}-{edge[1]}"
                joined.append((edge[1 - side], gloo_pair(name, store, member=side, timeout=timeout), side))
        return joined
