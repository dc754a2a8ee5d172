"""Jobs whose ranks are lost, started with tools/launch.py, and what one process computes without any loss."""

import functools
import json
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
import pytest

from megatron.trainer.report.metrics import read_metrics
from tests.reliability import launch
from tests.trainer.run.run_case import BASE, ROOT, data_flags, train

PROGRAM = Path(__file__).with_name("losing_ranks.py")
TIMEOUT = 5.0
"""--failure-timeout of the jobs, in seconds."""
MARGIN = 60.0
"""Seconds beyond it that a recovery may take with the next batch: other tests use the processors, too."""
MODEL = f"{BASE} --untie-embeddings-and-output-weights"


class Moment(NamedTuple):
    """Something that happened on a rank. Where it began, the process id stands in the place of the iteration."""

    time: float
    rank: int
    what: str
    iteration: int

    @property
    def is_loss(self) -> bool:
        return self.what not in ("began", "reported") and not self.what.endswith(":broken")


class Finished(NamedTuple):
    """A job that has ended."""

    outcome: launch.Outcome
    records: list[dict]
    moments: list[Moment]

    def longest_recovery(self) -> float:
        """Seconds from a loss to the report of the first batch that was not computed before."""
        seconds = [0.0]
        for loss in filter(lambda moment: moment.is_loss, self.moments):
            before = [each for each in self.moments if each.what == "reported" and each.time <= loss.time]
            known = max((each.iteration for each in before), default=0)
            after = [each for each in self.moments if each.what == "reported" and each.iteration > known]
            seconds += [min(each.time for each in after if each.time > loss.time) - loss.time] if after else []
        return max(seconds)


def command(num_ranks: int, flags: str, *, program: Path = PROGRAM) -> list[str]:
    """The job as a user starts it."""
    launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "--nproc-per-node", str(num_ranks)]
    words = (
        f"{MODEL} {data_flags()} --metrics-file metrics.jsonl --go-on-without-lost-ranks --failure-timeout {TIMEOUT}"
    )
    return [*launcher, str(program), *words.split(), *flags.split()]


def moments_of(folder: Path) -> list[Moment]:
    lines = (folder / "moments.txt").read_text().splitlines() if (folder / "moments.txt").exists() else []
    words = [line.split() for line in lines]
    return [Moment(float(time), int(rank), what, int(iteration)) for time, rank, what, iteration in words]


def processes_of(folder: Path) -> dict[int, int]:
    """Rank -> process id."""
    return {moment.rank: moment.iteration for moment in moments_of(folder) if moment.what == "began"}


def environment(folder: Path, losses: list) -> dict[str, str]:
    return {"LOSSES": json.dumps(losses), "MOMENTS": str(folder / "moments.txt")}


def finished(folder: Path, outcome: launch.Outcome) -> Finished:
    path = folder / "metrics.jsonl"
    left = [pid for pid in processes_of(folder).values() if psutil.pid_exists(pid)]
    assert not left, f"processes {left} are left\n{outcome.output}"
    return Finished(outcome, read_metrics(str(path)) if path.exists() else [], moments_of(folder))


def run(folder: Path, num_ranks: int, flags: str, losses: list, *, timeout: float = 240.0) -> Finished:
    """Run the job to its end. `losses`: as losing_ranks.py has them."""
    with launch.Job(command(num_ranks, flags), directory=folder, **environment(folder, losses)) as job:
        return finished(folder, job.wait(timeout=timeout))


def _num_copies(alive: set[int], stage: int, replicas: int) -> int:
    return sum(rank // replicas == stage for rank in alive)


def lose_at_random(
    folder: Path, depth: int, replicas: int, flags: str, *, seed: int, timeout: float = 900.0
) -> tuple[Finished, list[tuple[int, str]]]:
    """Run the job, and kill or stop ranks at random moments until each stage has one left; returns whom, and how."""
    random, alive = Random(f"{seed} {flags}"), set(range(depth * replicas))
    lost: list[tuple[int, str]] = []
    with launch.Job(command(depth * replicas, flags), directory=folder, **environment(folder, [])) as job:
        launch.wait_for_iteration(job, folder / "metrics.jsonl", 1)
        processes = processes_of(folder)
        while choice := sorted(rank for rank in alive if _num_copies(alive, rank // replicas, replicas) > 1):
            known = max(launch.losses(folder / "metrics.jsonl"))
            launch.wait_for_iteration(job, folder / "metrics.jsonl", known + random.choice([0, 0, 1, 2, 3]))
            time.sleep(random.uniform(0.0, random.choice([0.05, 1.0])))
            rank, how = random.choice(choice), random.choice(["SIGKILL", "SIGKILL", "SIGSTOP"])
            alive.discard(rank)
            lost.append((rank, how))
            with open(folder / "moments.txt", "a", encoding="utf-8") as stream:
                stream.write(f"{time.time()} {rank} random:{how} {known}\n")
            launch.kill(processes[rank], signal.Signals[how])
        return finished(folder, job.wait(timeout=timeout)), lost


@functools.cache
def undisturbed(flags: str) -> list[dict]:
    """The records of one process with the same flags."""
    return train(1, flags, base=MODEL)[-1]["records"]


def values(records: list[dict], name: str) -> dict[int, float]:
    """Iteration -> value, where there is one (an overflow has no norm). What is recorded twice has to be the same."""
    found: dict[int, float] = {}
    for record in records:
        if record.get(name) is not None:
            assert found.setdefault(record["iteration"], record[name]) == pytest.approx(record[name], rel=1e-6)
    return found


def assert_nothing_lost(job: Finished, flags: str) -> None:
    """It ended well, and all that it records is as in one process that nothing disturbs."""
    job.outcome.assert_succeeded()
    whole = undisturbed(flags)
    for name in ("lm_loss", "consumed_samples", "grad_norm", "learning_rate", "validation_loss", "test_loss"):
        expected = values(whole, name)
        assert values(job.records, name) == pytest.approx(expected, rel=2e-6), (name, job.outcome.output)
    assert values(whole, "lm_loss"), "nothing was compared"
    longest = job.longest_recovery()
    assert longest < TIMEOUT + MARGIN, f"{longest:.1f} s until the next batch\n{job.outcome.output}"
