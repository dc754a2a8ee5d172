"""What the threads of this process took of the cores: what a benchmark's clock does not tell.

On as many cores as there are computing threads, every other thread takes its time from them. Linux counts for each
thread how long it ran, and how long it was ready and waited for a core.
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
    """Seconds by the name of a thread; threads of one name are added up."""

    ran: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)  # for a core

    def since(self, earlier: ThreadTimes, *, per: int = 1) -> ThreadTimes:
        """What has been added since `earlier`, of each of `per` batches."""

        def added(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
            return {name: max(0.0, seconds - before.get(name, 0.0)) / per for name, seconds in now.items()}

        return ThreadTimes(added(self.ran, earlier.ran), added(self.waited, earlier.waited))


def thread_times() -> ThreadTimes:
    """The times of all threads that live now. Without Linux's counters: nothing."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().native_id
    ran: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        try:
            number = int(task.name)
            nanoseconds = (task / "schedstat").read_text().split()
            name = MAIN if number == main else python.get(number) or (task / "comm").read_text().strip()
        except OSError:  # it has just ended, or the kernel does not count
            continue
        ran[name] += int(nanoseconds[0]) / 1e9
        waited[name] += int(nanoseconds[1]) / 1e9
    return ThreadTimes(dict(ran), dict(waited))
