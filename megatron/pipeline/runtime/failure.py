"""When one rank fails, every rank ends within seconds and says why.

Problem: a rank that raises, or is killed, leaves the others blocked in transfers and collectives until a timeout of many
minutes, and what they then print is the consequence, not the cause.

Solution: a guard around the training of each rank.

- A key in the job's store holds the story of the first failure; the first writer wins. A daemon thread on every rank polls
  it and ends the process with one line that tells the root cause, even while the main thread hangs in a collective.
- The ranks form a ring, each listening on a gloo connection to its two neighbours. When a process dies without a word
  (``kill -9``, a crash), the kernel closes its connections and the neighbours know at once: no heartbeat, no false alarm.
  A rank that leaves the guard in peace says so before.
- A rank whose transfer broke because its peer is gone waits a moment for the peer's own story before it tells its own.
- A rank that fails lingers until the others have read the story (at most `LINGER` seconds), because a launcher that sees it
  go would end them before they could speak, and because rank 0 may host the store.
"""

from __future__ import annotations

import json
import logging
import os
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

from megatron.pipeline.runtime.channels import TransferError
from megatron.pipeline.runtime.links import gloo_pair

POLL = 0.3
"""Seconds between two looks at the failure key."""
SILENCE_PATIENCE = 1.0
"""How long a neighbour of a dead rank waits for that rank's own story."""
CONSEQUENCE_PATIENCE = 2.0
"""How long a rank with a broken transfer waits for somebody else's story."""
LINGER = 3.0
"""How long a failed rank stays for the others to read its story."""
_FOREVER = timedelta(days=3650)
_GOODBYE = timedelta(seconds=5)
_BROKEN = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "remote process exited")

_active: Guard | None = None
_num_guards = 0


def active() -> Guard | None:
    """The guard this process is in, if any."""
    return _active


def report(error: BaseException) -> None:
    """End the job because of an error on a background thread; without a guard, leave it to the main thread to raise it."""
    if _active is not None:
        _active.fail(error)


@contextmanager
def guard(*, store: Store | None = None, exit_code: int = 1) -> Iterator[Guard | None]:
    """Guard the block: whatever it raises, on whichever rank, ends all ranks of the job with `exit_code`.

    Collective: every rank of the default group enters it, after ``init_process_group``. `store`: the job's store (default:
    the default group's). With one rank, or without a process group, exceptions simply pass. ``SystemExit`` with code 0 or
    None counts as a peaceful end.
    """
    global _active, _num_guards
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield None
        return
    _num_guards += 1
    guarding = Guard(store or distributed_c10d._get_default_store(), scope=f"failure/{_num_guards}", exit_code=exit_code)
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
    """Whether `error` says no more than that somebody else is gone."""
    while error is not None:
        if isinstance(error, TransferError):
            return not error.timed_out
        text = str(error).lower()
        if isinstance(error, RuntimeError) and any(words in text for words in _BROKEN):
            return True
        error = error.__cause__
    return False


class Guard:
    """Watches over one rank of the job; made by `guard`."""

    def __init__(self, store: Store, *, scope: str, exit_code: int) -> None:
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self._store = store.clone() if hasattr(store, "clone") else store  # own connection: polls never wait behind others
        self._scope = scope
        self._exit_code = exit_code
        self._hosts_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._name = f"rank {self.rank}"
        self._doing: Callable[[], tuple[str, int | None]] = lambda: ("", None)
        self._overdue: Callable[[], BaseException | None] = lambda: None
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        self._told = ("", -1)
        self._neighbours = self._join_ring(store)
        for neighbour, group, side in self._neighbours:
            self._spawn(self._listen, neighbour, group, side)
        self._spawn(self._poll)

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name=f"failure {target.__name__}", daemon=True).start()

    def _key(self, name: str) -> str:
        return f"{self._scope}/{name}"

    # -- what the engine tells ----------------------------------------------------------------------------------------

    def watch(
        self,
        *,
        name: str,
        doing: Callable[[], tuple[str, int | None]],
        overdue: Callable[[], BaseException | None],
    ) -> None:
        """Learn this rank's name ("rank 2 (stage 2)"), and how to ask what it does and whether a transfer is overdue."""
        self._name, self._doing, self._overdue = name, doing, overdue

    def unwatch(self) -> None:
        self._doing, self._overdue = lambda: ("", None), lambda: None

    # -- threads ------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        failures = 0
        while not self._leaving.wait(POLL):
            try:
                self._look()
                failures = 0
            except Exception as error:
                failures += 1
                if failures == 3 and not self._leaving.is_set():
                    self._end(f"{self._name} lost the job's store ({error}); the process that hosts it is gone")

    def _look(self) -> None:
        story = self._story()
        if story is not None:
            self._end(story)
        doing, waits_for = self._doing()
        if (doing, waits_for) != self._told:
            self._told = doing, waits_for
            self._store.set(self._key(f"doing/{self.rank}"), json.dumps([self._name, doing, waits_for]))
        error = self._overdue()
        if error is not None:
            self.fail(error)

    def _listen(self, neighbour: int, group: Any, side: int) -> None:
        """Blocks until the neighbour says goodbye, or its process is gone."""
        try:
            group.recv([torch.empty(1)], 1 - side, side).wait(_FOREVER)
        except RuntimeError:
            if self._leaving.is_set():
                return
            story = self._wait_for_story(SILENCE_PATIENCE)
            if self._leaving.is_set():
                return
            if story is None:
                name, doing, _ = self._told_by(neighbour)
                last = f"; last seen in {doing}" if doing else ""
                story = self._tell(f"{name} ended without a word (killed, or crashed){last}")
            self._end(story)

    # -- stories ------------------------------------------------------------------------------------------------------

    def _story(self) -> str | None:
        key = self._key("story")
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _wait_for_story(self, patience: float) -> str | None:
        deadline = time.monotonic() + patience
        while True:
            with suppress(Exception):  # the store may be gone with the rank that hosted it
                story = self._story()
                if story is not None:
                    return story
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def _tell(self, story: str) -> str:
        """Make `story` the root cause unless another is there; return the one that counts."""
        with suppress(Exception):
            return self._store.compare_set(self._key("story"), "", story).decode()
        return story

    def _told_by(self, rank: int) -> tuple[str, str, int | None]:
        with suppress(Exception):
            key = self._key(f"doing/{rank}")
            if self._store.check([key]):
                return tuple(json.loads(self._store.get(key)))
        return f"rank {rank}", "", None

    def _own_story(self, error: BaseException) -> str:
        if isinstance(error, TransferError):
            return str(error) + (self._who_waits(error.peer_rank) if error.timed_out else "")
        instruction = getattr(error, "pipeline_instruction", None)
        where = getattr(error, "pipeline_where", self._name)
        during = f" in {instruction}" if instruction is not None else ""
        text = " ".join(str(error).split())
        return f"{where} failed{during}: {type(error).__name__}: {text}"

    def _who_waits(self, rank: int | None) -> str:
        """Follow who waits for whom from `rank` on, as far as the ranks have told."""
        text, seen = "", {self.rank}
        while rank is not None and rank not in seen:
            seen.add(rank)
            name, doing, waits_for = self._told_by(rank)
            if doing:
                text += f"; {name} is in {doing}"
            if waits_for is not None:
                text += f" from rank {waits_for}"
            rank = waits_for
        return text

    # -- the end ------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End the job because of `error` on this rank. Does not return."""
        story = self._wait_for_story(CONSEQUENCE_PATIENCE if is_consequence(error) else 0.0)
        if story is None:
            own = self._own_story(error)
            story = self._tell(own)
            if story == own:
                sys.stderr.write("".join(traceback.format_exception(error)))
        self._end(story)

    def _end(self, story: str) -> None:
        """Print the root cause, let the others read it, and end the process. Only the first caller gets through."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread of this process is ending it
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        sys.stderr.write(f"{self._name} stops: {story}\n")
        sys.stderr.flush()
        deadline = time.monotonic() + LINGER
        with suppress(Exception):
            num_read = self._store.add(self._key("read"), 1)
            told_here = story.startswith(self._name)
            while (told_here or self._hosts_store) and num_read < self.world_size and time.monotonic() < deadline:
                time.sleep(0.05)
                num_read = self._store.add(self._key("read"), 0)
        logging.shutdown()
        os._exit(self._exit_code)

    def leave(self) -> None:
        """Say goodbye: this rank's end is no failure from here on. The rank that hosts the store waits for all others."""
        self._store.add(self._key("left"), 1)
        while self._hosts_store and self._store.add(self._key("left"), 0) < self.world_size:
            time.sleep(0.02)  # the poll thread still ends this process if another rank fails meanwhile
        self._leaving.set()
        for _, group, side in self._neighbours:
            with suppress(RuntimeError):
                group.send([torch.zeros(1)], 1 - side, 1 - side).wait(_GOODBYE)
        self._neighbours = []

    # -- the ring -----------------------------------------------------------------------------------------------------

    def _join_ring(self, store: Store) -> list[tuple[int, Any, int]]:
        """(neighbour, group, own side) of this rank's edges; edge i joins rank i (side 0) and i + 1 (side 1)."""
        size = self.world_size
        edges = [(edge, (edge + 1) % size) for edge in range(size if size > 2 else 1)]

        def order(edge: tuple[int, int]) -> tuple[int, int]:
            closing_of_odd_ring = edge[1] == 0 and size % 2 == 1
            return (2 if closing_of_odd_ring else edge[0] % 2), edge[0]

        joined = []
        for edge in sorted(edges, key=order):
            if self.rank in edge:
                side = edge.index(self.rank)
                name = f"{self._scope}/alive/{edge[0]}-{edge[1]}"
                joined.append((edge[1 - side], gloo_pair(name, store, member=side, timeout=_FOREVER), side))
        return joined
