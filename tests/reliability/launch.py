"""Training jobs as a user starts them: a launcher, worker processes, an exit status, and nothing left behind.

A job is the project's own (`megatron.processes`): what descends from it is found by its mark, whoever its parent is by
then, and no other process is ever touched.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron.processes import Job as MarkedJob
from megatron.processes import end_with_parent
from tests import workers
from tests.trainer.run import forking_launcher
from tests.trainer.run.forking_launcher import Forked

REPOSITORY = Path(__file__).resolve().parent.parent.parent

FORKING_LAUNCHER = REPOSITORY / "tests" / "trainer" / "run" / "forking_launcher.py"

# 4 layers of width 32: an iteration takes milliseconds. The learning rate does not depend on the number of iterations.
TINY = [
    word
    for line in (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64",
        "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant --hidden-dropout 0.1",
        "--attention-dropout 0.1 --log-interval 1 --eval-iters 0 --num-workers 0 --make-vocab-size-divisible-by 16",
    )
    for word in line.split()
]
SYNTHETIC = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "60"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended: exit status, all it printed, seconds from start to end, processes that outlived it."""

    status: int
    output: str
    seconds: float
    leftovers: tuple[str, ...]

    def assert_failed_clearly(self, *words: str, within: float = 120.0) -> None:
        """Non-zero status in time, an error with all these words in one line, no process left."""
        assert self.status != 0, self.output
        assert self.seconds < within, f"took {self.seconds:.0f} s\n{self.output}"
        lines = [line for line in self.output.splitlines() if all(word in line for word in words)]
        assert lines, f"no line with {words} in:\n{self.output}"
        assert not self.leftovers, self.leftovers

    @property
    def root_cause(self) -> str:
        """What stands last on the screen: behind the headline of torchrun's summary."""
        return self.output.rpartition("Root Cause (first observed failure):")[2]

    def assert_succeeded(self) -> None:
        """Status 0 and no process left."""
        assert self.status == 0, self.output
        assert not self.leftovers, self.leftovers


class ForkedJob(MarkedJob):
    """A forking launcher that is forked itself, from the server of the workers: it need not import torch."""

    def _start(self, command: Sequence[str], environment: dict[str, str], log: Path, directory: Path) -> Forked:
        log.touch()
        return Forked(
            list(command),
            workers.fork(forking_launcher.begin, command[2:], environment, log, directory, end_with_parent),
        )


class Job:
    """A running command; use as a context manager, which ends what is left of it."""

    def __init__(self, command: list[str], *, directory: Path, **environment: str):
        self._log_path = directory / f"log-{uuid.uuid4().hex[:8]}.txt"
        self.started = time.monotonic()
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environment}
        forks = command[1] == str(FORKING_LAUNCHER) and sys.platform == "linux"
        kind = ForkedJob if forks else MarkedJob
        self._job = kind(command, log=self._log_path, directory=directory, folder=self._log_path, environment=variables)
        self.process = self._job.process

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        self._job.__exit__(*exception)

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self._log_path.read_text(errors="replace")

    def workers(self) -> dict[int, int]:
        """Rank -> process id of the processes that the launcher has started."""
        found = {}
        for process in self._job.processes():
            with contextlib.suppress(psutil.Error):
                if process.ppid() == self.process.pid and (rank := process.environ().get("RANK")) is not None:
                    found[int(rank)] = process.pid
        return found

    @contextlib.contextmanager
    def standing_still(self):
        """Its workers keep all they have, and leave the processor to another job meanwhile."""
        pids = list(self.workers().values())
        try:
            for pid in pids:
                kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                kill(pid, signal.SIGCONT)

    def wait_until(self, condition: Callable[[], bool], *, timeout: float = 150.0) -> None:
        """Poll until `condition()`; fails with the output where the job ends before, or the time is up."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} too early:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {timeout} s in vain:\n{self.output}"
            time.sleep(0.02)

    def wait(self, *, timeout: float = 180.0) -> Outcome:
        """The job's end; one that outlives `timeout` seconds fails the test with what it printed."""
        status = self._job.wait(timeout)
        if status is None:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}")
        seconds = time.monotonic() - self.started
        deadline = time.monotonic() + 3.0
        while (left := self._job.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return Outcome(status, self.output, seconds, tuple(map(_described, left)))


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)


def training_command(
    world_size: int,
    *flags: object,
    model: Sequence[str] = (*TINY, *SYNTHETIC),
    program: Path = REPOSITORY / "pretrain_gpt.py",
    has_launcher: bool = True,
    forks: bool = False,
) -> list[str]:
    """torchrun with that many ranks, all of them pipeline stages unless the flags say otherwise; or the program itself,
    as one rank. `forks`: tools/launch.py instead, which forks them (forking_launcher.py)."""
    degrees = [] if "--pipeline-model-parallel-size" in flags else ["--pipeline-model-parallel-size", str(world_size)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    if forks:
        launcher = [str(FORKING_LAUNCHER), "--nproc-per-node", str(world_size)]
    launcher = launcher if has_launcher else []
    return [
        sys.executable, *launcher, str(program), *model, *degrees, *map(str, flags),
    ]  # fmt: skip


def train(world_size: int, *flags: object, directory: Path, timeout: float = 180.0, **options) -> Outcome:
    """Run a job to its end."""
    with Job(training_command(world_size, *flags, **options), directory=directory) as job:
        return job.wait(timeout=timeout)


def metrics(path: Path) -> dict[int, dict]:
    """Iteration -> record of a metrics file; of an iteration that stands there twice, the last."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    if lines and not path.read_text().endswith("\n"):
        lines.pop()  # being written
    records = [json.loads(line) for line in lines]
    return {record["iteration"]: record for record in records if "lm_loss" in record}


def losses(path: Path) -> dict[int, float]:
    """Iteration -> lm loss, in full precision."""
    return {iteration: record["lm_loss"] for iteration, record in metrics(path).items()}


def wait_for_iteration(job: Job, path: Path, iteration: int) -> None:
    """Until the job has reported that iteration in its metrics file."""
    job.wait_until(lambda: max(metrics(path), default=0) >= iteration)


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process of a job, which may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def now() -> float:
    """The clock of `Job.started`."""
    return time.monotonic()


def random_delay(seconds: float) -> float:
    """Sleep for a random time up to `seconds`, and return it for the test's message."""
    delay = random.SystemRandom().uniform(0, seconds)
    time.sleep(delay)
    return delay
