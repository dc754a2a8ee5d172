"""Signs of life of a job's processes: heartbeats that other processes watch, and ports that close when a process ends.

Problem: a process that has died, is stopped or is cut off must be distinguished from a process that only computes
slowly. The clocks of hosts differ, and a watcher may itself have been held up.

Solution: a process counts up its heartbeat, and a watcher measures with its own clock how long the count stays the
same. Time in which the watcher itself did not look does not count. Each process also listens at a port, the *door*. The
kernel accepts connections there, however busy the process is, and even if it is stopped. The kernel refuses them as
soon as the process has ended. So a refused connection proves at once that the process has ended. Silence counts as
proof only after the failure timeout, or after the longer silence that the process has announced with its last
heartbeat.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from torch.distributed import Store

LEFT = "left"
"""The heartbeat of a process that has left the job normally."""
HAS_LEFT = "it has left the job"
NUM_SILENT_LOOKS = 1.5
"""Intervals without a heartbeat after which a watcher tries the door of a process."""
_BACKLOG = 64


class Member(NamedTuple):
    """A process of the job.

    Attributes:
        rank: its global rank; a new process in the place of a lost one has the same rank.
        token: a random text that no other process has.
        host: the name of its host.
        address, port: the address and port of its door.
        process: its process id.
        launcher: the run id of its launcher (TORCHELASTIC_RUN_ID); empty without a launcher.
    """

    rank: int
    token: str
    host: str
    address: str
    port: int
    process: int
    launcher: str = ""


class Door:
    """A port at which this process listens as long as it lives. `clear` closes the connections that others have made.

    Args:
        reachable_from: (host, port) that all processes of the job can reach. The door gets the local address of a
            connection to it.
    """

    def __init__(self, reachable_from: tuple[str, int]) -> None:
        with socket.create_connection(reachable_from) as connection:
            self.address = connection.getsockname()[0]
            self._socket = socket.create_server(("", 0), family=connection.family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        # A forked process would keep the door open after the death of this one.
        mine = weakref.ref(self._socket)
        os.register_at_fork(after_in_child=lambda: (mine() is not None) and mine().close())

    def clear(self) -> None:
        """Drop the connections that others have made."""
        with suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


def has_ended(member: Member, *, patience: float) -> bool:
    """Return whether the kernel of the member's host says within `patience` seconds that the process has ended."""
    is_loopback = member.address == "::1" or member.address.startswith("127.")
    if is_loopback and member.host != socket.gethostname():
        return False  # here the address means this host, not the member's
    try:
        socket.create_connection((member.address, member.port), patience).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # the host is busy, down or cut off
        return False
    return False


class Watch:
    """Measures for how long the heartbeats of other processes have stayed the same.

    Args:
        interval: seconds between two heartbeats.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._looked_at = time.monotonic()
        self._seen: dict[str, tuple[str, float, bool]] = {}  # token -> heartbeat, silence, whether it has changed

    def look(self, heartbeats: Mapping[str, str]) -> None:
        """Record the latest heartbeat of each watched token, and forget all other tokens."""
        now = time.monotonic()
        # While this process was stopped, or a call held its interpreter, it could not see the others' heartbeats.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * self._interval), now
        before, self._seen = self._seen, {}
        for token, heartbeat in heartbeats.items():
            last, silence, has_changed = before.get(token, (heartbeat, -elapsed, False))
            if heartbeat == last:
                self._seen[token] = heartbeat, silence + elapsed, has_changed
            else:
                self._seen[token] = heartbeat, 0.0, True

    def silence(self, token: str) -> float:
        """Return for how many seconds the token's heartbeat has stayed the same; 0 if it has left or is not watched."""
        heartbeat, silence, _ = self._seen.get(token, (LEFT, 0.0, False))
        return 0.0 if heartbeat == LEFT else silence

    def announced(self, token: str) -> float:
        """Return the seconds of silence that the token's latest heartbeat announces; 0 if it announces none."""
        return float(self._seen.get(token, ("",))[0].partition(" ")[2] or 0.0)

    def has_left(self, token: str) -> bool:
        return self._seen.get(token, ("",))[0] == LEFT

    def is_heard(self, token: str) -> bool:
        """Return whether the token's heartbeat has changed while watched, and has not fallen silent since."""
        _, silence, has_changed = self._seen.get(token, ("", 0.0, False))
        return has_changed and not self.has_left(token) and silence <= 2 * NUM_SILENT_LOOKS * self._interval


class Lookout:
    """Writes this process's heartbeat, and watches the heartbeats and doors of other processes.

    Args:
        store: holds the heartbeats.
        me: this process.
        timeout: seconds of silence after which a process counts as lost.
        interval: seconds between two heartbeats.

    Attributes:
        announced: seconds of silence that this process announces with its heartbeats from now on; 0: none.
    """

    def __init__(self, store: Store, me: Member, *, timeout: float, interval: float) -> None:
        self._store, self._me, self._timeout, self._interval = store, me, timeout, interval
        self._watch = Watch(interval)
        self._num_beats = 0
        self.announced = 0.0
        self._beats_at = self._looks_at = 0.0
        self._tries_at: dict[str, float] = {}  # token -> when its door may be tried again
        self._ended: set[str] = set()
        self.is_heard = self._watch.is_heard

    def beat(self, *, at_once: bool = False) -> None:
        """Write the next heartbeat, if at least `interval` seconds have passed since the last one, or `at_once`."""
        if at_once or time.monotonic() >= self._beats_at:
            self._beats_at = time.monotonic() + self._interval
            self._num_beats += 1
            announced = f" {self.announced:g}" if self.announced else ""
            self._store.set(f"beat/{self._me.token}", f"{self._num_beats}{announced}")

    def leave(self) -> None:
        """Write as the last heartbeat that this process ends normally."""
        self._store.set(f"beat/{self._me.token}", LEFT)

    def is_due(self) -> bool:
        """Return whether it is time for the next `look_at`."""
        return time.monotonic() >= self._looks_at

    def look_at(self, members: Iterable[Member]) -> None:
        """Read the heartbeats of these processes, and forget all other processes."""
        self._looks_at = time.monotonic() + self._interval / 2
        tokens = list({member.token for member in members})
        texts = self._store.multi_get([f"beat/{token}" for token in tokens]) if tokens else []
        self._watch.look({token: text.decode() for token, text in zip(tokens, texts, strict=True)})

    def why_lost(self, member: Member, *, is_awaited: bool) -> str | None:
        """Return why a watched process counts as lost; None if it does not.

        Args:
            is_awaited: whether others wait for the process. If so, it counts as lost even if it has left the job
                normally.
        """
        silence, now = self._watch.silence(member.token), time.monotonic()
        timeout = max(self._timeout, self._watch.announced(member.token))
        if silence >= timeout:
            return f"no heartbeat for {timeout:g} s"
        if self._watch.has_left(member.token):
            return HAS_LEFT if is_awaited else None
        if silence >= NUM_SILENT_LOOKS * self._interval and now >= self._tries_at.get(member.token, 0.0):
            self._tries_at[member.token] = now + self._interval
            if has_ended(member, patience=self._interval / 2):
                self._ended.add(member.token)
        return "its process has ended" if member.token in self._ended else None
