"""The processor time of this process's threads, which a benchmark's wall time does not show.

If there are only as many cores as computing threads, every other thread takes time from the computing threads. Linux
counts for each thread the time for which it ran, and the time for which it was ready and waited for a core.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_TASKS = Path("/proc/self/task")
MAIN = "main"


@dataclass
class ThreadTimes:
    """Seconds by name of thread; threads with equal names are added up."""

    ran: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)  # ready to run, without a core

    def since(self, earlier: ThreadTimes, *, per: int = 1) -> ThreadTimes:
        """The seconds since `earlier`, divided by `per` batches."""

        def added(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
            return {name: max(0.0, seconds - before.get(name, 0.0)) / per for name, seconds in now.items()}

        return ThreadTimes(added(self.ran, earlier.ran), added(self.waited, earlier.waited))


def thread_times() -> ThreadTimes:
    """The times of all threads that are alive; empty without Linux's counters."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().native_id
    ran: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        try:
            number = int(task.name)
            nanoseconds = (task / "schedstat").read_text().split()
            name = MAIN if number == main else python.get(number) or (task / "comm").read_text().strip()
        except OSError:  # the thread has just ended, or the kernel does not count
            continue
        ran[name] += int(nanoseconds[0]) / 1e9
        waited[name] += int(nanoseconds[1]) / 1e9
    return ThreadTimes(dict(ran), dict(waited))
