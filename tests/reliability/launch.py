"""Training jobs as a user starts them: a launcher, worker processes, an exit status, and nothing left behind.

A job runs in a session of its own and carries a mark in its environment, so that every process that descends from it is
found in /proc, whoever its parent is by then, and no other process is ever touched.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_MARK = "TEST_JOB_MARK"

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


class Job:
    """A running command; use as a context manager, which ends what is left of it."""

    def __init__(self, command: list[str], *, directory: Path, **environment: str):
        self.mark = uuid.uuid4().hex
        self._log_path = directory / f"log-{self.mark[:8]}.txt"
        self.started = time.monotonic()
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            variables.pop(name, None)
        with open(self._log_path, "w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={**variables, **environment, _MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_leftovers()
        self.process.wait()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self._log_path.read_text(errors="replace")

    def workers(self) -> dict[int, int]:
        """Rank -> process id of the processes that the launcher has started."""
        found = {}
        for pid, environment in _marked(self.mark):
            if "RANK" in environment and _parent(pid) == self.process.pid:
                found[int(environment["RANK"])] = pid
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
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._end_leftovers()
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None
        seconds = time.monotonic() - self.started
        deadline = time.monotonic() + 3.0
        while (left := _marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return Outcome(status, self.output, seconds, tuple(_describe(pid) for pid, _ in left))

    def _end_leftovers(self) -> None:
        for pid, _ in _marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def training_command(
    world_size: int,
    *flags: object,
    model: Sequence[str] = (*TINY, *SYNTHETIC),
    program: Path = REPOSITORY / "pretrain_gpt.py",
    has_launcher: bool = True,
) -> list[str]:
    """torchrun with that many ranks, all of them pipeline stages unless the flags say otherwise; or the program itself,
    as one rank."""
    degrees = [] if "--pipeline-model-parallel-size" in flags else ["--pipeline-model-parallel-size", str(world_size)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
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


def _marked(mark: str) -> list[tuple[int, dict[str, str]]]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            content = (entry / "environ").read_bytes()
            if f"{_MARK}={mark}".encode() in content and not _is_zombie(entry):
                pairs = [item.split("=", 1) for item in content.decode(errors="replace").split("\0") if "=" in item]
                found.append((int(entry.name), {name: value for name, value in pairs}))
    return found


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
    return None


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: " + (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return str(pid)
