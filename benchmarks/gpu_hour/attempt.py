"""Run one part to its end, to its limit, or to its crash, and say which it was.

Problem: a part may hang in a call of CUDA, crash, fill the memory or leave processes behind, and nothing of that may
reach the parts behind it. Solution: it is a job whose processes are known by a mark (`megatron.processes`), however
they descend from it. At the limit all of them are stopped first, so that none reacts to another's end. Then they go on
one by one, each with SIGABRT, at which Python's faulthandler prints the stacks of all threads. What is left gets
SIGTERM, and then SIGKILL.
"""

import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.gpu_hour.records import ROOT
from megatron.processes import Job

VARIABLES = {
    "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else a process has one for each core, for a few kernels, that outlive it
}  # fmt: skip
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|\bMemoryError\b")
_TO_DUMP, _TO_DUMP_ALL, _TO_TERMINATE = 3.0, 6.0, 3.0  # seconds for the stacks of a process, for all, and to end


@dataclass(frozen=True)
class Ending:
    """How a part ended. `status`: as in records; "interrupted" where `limit` was not its own. `output`: what it
    printed, or for a limit what the stacks are."""

    status: str
    reason: str
    seconds: float
    output: str = ""


def run(
    command: Sequence[str], *, log: Path, folder: Path, limit: float, is_own_limit: bool, environment: dict[str, str]
) -> Ending:
    """Run `python *command` for at most `limit` seconds. `is_own_limit`: the part's, and not the hour's."""
    start = time.monotonic()
    words = [sys.executable, *command]
    with Job(words, log=log, directory=ROOT, folder=folder, environment=VARIABLES | environment) as job:
        status = job.wait(limit)
        if status is None:
            printed = log.stat().st_size
            _end_with_stacks(job)
    seconds = time.monotonic() - start
    text = log.read_bytes()
    if status is None:
        stacks = text[printed:].decode(errors="replace")
        if is_own_limit:
            return Ending("time limit", f"it was ended at its limit of {limit:.0f} s", seconds, stacks)
        return Ending("interrupted", f"the time of this call was over after {limit:.0f} s of it", seconds, stacks)
    output = text.decode(errors="replace")
    return Ending(*_meaning(status, output), seconds, output)


def _meaning(status: int, output: str) -> tuple[str, str]:
    """(the status of the record, the reason)."""
    if status == 0:
        return "done", ""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "it printed nothing"
    if _OUT_OF_MEMORY.search(output):
        said = next((line for line in reversed(lines) if _OUT_OF_MEMORY.search(line)), last)
        return "out of memory", said[:300]
    if status < 0:
        name = signal.Signals(-status).name
        hint = ", maybe for want of main memory" if -status == signal.SIGKILL else ""
        return "crashed", f"it was ended by {name}{hint}; last it said: {last}"
    return "failed", f"exit status {status}; last it said: {last}"


def _processes(job: Job) -> list[psutil.Process]:
    """The processes with the job's mark, and its main process with its children, should a system not show marks."""
    found = {process.pid: process for process in job.processes()}
    if job.process.poll() is None:
        with suppress(psutil.Error):
            main = psutil.Process(job.process.pid)
            found |= {process.pid: process for process in (main, *main.children(recursive=True))}
    return list(found.values())


def _started(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return process.create_time()
    return 0.0


def _end_with_stacks(job: Job) -> None:
    processes = _processes(job)
    for process in processes:
        with suppress(psutil.Error):
            process.suspend()
    processes.sort(key=_started)  # a parent whose child has ended would go on where it waits for it
    deadline = time.monotonic() + _TO_DUMP_ALL
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGABRT)
            process.resume()
            process.wait(min(_TO_DUMP, max(0.1, deadline - time.monotonic())))
    left = _processes(job)
    for process in left:
        with suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(left, timeout=_TO_TERMINATE)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
