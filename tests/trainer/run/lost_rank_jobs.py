"""Jobs whose ranks are lost, started with tools/launch.py, and what one process computes without any loss."""

import functools
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
import pytest

from megatron.documents import counted
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.simulate.timeline import Timeline
from megatron.trainer.report.metrics import read_metrics
from tests.reliability import launch
from tests.trainer.run.run_case import BASE, ROOT, data_flags, train

PROGRAM = Path(__file__).with_name("losing_ranks.py")
TIMEOUT = 5.0
"""--failure-timeout of the jobs, in seconds."""
MARGIN = 60.0
"""Seconds beyond it that a recovery may take with the next batch: other tests use the processors, too."""
COMPARED = (
    "lm_loss", "loss", "sop_loss", "consumed_samples", "grad_norm", "learning_rate", "validation_loss",
    "validation_sop_loss", "validation_accuracy", "test_loss", "load_balancing_loss", "seq_load_balancing_loss",
    "z_loss", "expert_load_imbalance", "mtp_1_loss", "mtp_2_loss",
)  # fmt: skip
"""What records of a job say as those of one process do."""
SUMS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
MODEL = f"{BASE} --untie-embeddings-and-output-weights"


class Trained(NamedTuple):
    """A program of megatron/trainer/programs, the flags of a small model, and those of its data.

    `engine`: its layers are those of Transformer Engine's stand-in.
    """

    program: str
    base: str
    data: str
    engine: bool = False


def gpt(model: str | None = None) -> Trained:
    """`model`: its flags; None: `MODEL`."""
    return Trained("pretrain_gpt", MODEL if model is None else model, data_flags())


class Moment(NamedTuple):
    """Something that happened on a rank. Where it began, the process id stands in the place of the iteration."""

    time: float
    rank: int
    what: str
    iteration: int

    @property
    def is_loss(self) -> bool:
        return self.what not in ("began", "met", "reported") and not self.what.endswith(
            (":broken", ":newcomer", ":alarm", ":sleep", ":hold")
        )


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


def command(
    num_ranks: int,
    flags: str,
    *,
    program: Path = PROGRAM,
    forks: bool = True,
    max_restarts: int = 0,
    model: str | None = None,
    trained: Trained | None = None,
) -> list[str]:
    """The job as a user starts it, but for ranks that are forked from a launcher that has imported torch (`forks`)."""
    launcher = launch.FORKING_LAUNCHER if forks else ROOT / "tools" / "launch.py"
    launcher = [sys.executable, str(launcher), "--nproc-per-node", str(num_ranks)]
    if max_restarts:
        launcher += ["--max-restarts", str(max_restarts)]
    return [*launcher, *program_of(flags, program=program, model=model, trained=trained)]


def program_of(
    flags: str, *, program: Path = PROGRAM, model: str | None = None, trained: Trained | None = None
) -> list[str]:
    """The program that a launcher starts, and its arguments."""
    _, base, data, _ = trained or gpt(model)
    words = f"{base} {data} --metrics-file metrics.jsonl --go-on-without-lost-ranks --failure-timeout {TIMEOUT}"
    return [str(program), *words.split(), *flags.split()]


def on_nodes(num_nodes: int, num_local: int, launcher: list[str], flags: str) -> list[str]:
    """The job over several nodes, as one command whose status is that of the last launcher that fails.

    `launcher`: without the flags that say which node this is.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = shlex.join([
        sys.executable, *launcher, "--nnodes", str(num_nodes), "--nproc-per-node", str(num_local),
        "--master-addr", "127.0.0.1", "--master-port", str(port),
    ])  # fmt: skip
    program = shlex.join(program_of(flags))
    starts = "".join(
        f"PIPELINE_HOST_NAME=node{node} {start} --node-rank {node} {program} & launchers+=($!); "
        for node in range(num_nodes)
    )
    return ["bash", "-c", f"{starts} for each in ${{launchers[@]}}; do wait $each || status=$?; done; exit $status"]


def moments_of(folder: Path) -> list[Moment]:
    lines = (folder / "moments.txt").read_text().splitlines() if (folder / "moments.txt").exists() else []
    words = [line.split() for line in lines]
    return [Moment(float(time), int(rank), what, int(iteration)) for time, rank, what, iteration in words]


def processes_of(folder: Path) -> dict[int, int]:
    """Rank -> process id."""
    return {moment.rank: moment.iteration for moment in moments_of(folder) if moment.what == "began"}


def environment(folder: Path, losses: list, trained: Trained | None = None) -> dict[str, str]:
    trained = trained or gpt()
    variables = {"LOSSES": json.dumps(losses), "MOMENTS": str(folder / "moments.txt"), "PROGRAM": trained.program}
    if trained.engine:
        variables |= {"ENGINE": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "stand_ins")))}
    return variables


def finished(folder: Path, outcome: launch.Outcome) -> Finished:
    path = folder / "metrics.jsonl"
    left = [pid for pid in processes_of(folder).values() if psutil.pid_exists(pid)]
    assert not left, f"processes {left} are left\n{outcome.output}"
    return Finished(outcome, read_metrics(str(path)) if path.exists() else [], moments_of(folder))


def run(
    folder: Path,
    num_ranks: int,
    flags: str,
    losses: list,
    *,
    timeout: float = 240.0,
    forks: bool = True,
    max_restarts: int = 0,
    model: str | None = None,
    trained: Trained | None = None,
) -> Finished:
    """Run the job to its end.

    Args:
        losses: as losing_ranks.py has them.
        forks: as `command` has it; not with Transformer Engine's stand-in, which has to be imported first.
        max_restarts: new processes for a lost rank.
        model, trained: the flags of a GPT; None: that GPT.
    """
    forks = forks and not (trained is not None and trained.engine)
    started = command(num_ranks, flags, forks=forks, max_restarts=max_restarts, model=model, trained=trained)
    return run_command(folder, started, losses, timeout=timeout, trained=trained)


def run_command(
    folder: Path, started: list[str], losses: list, *, timeout: float = 240.0, trained: Trained | None = None
) -> Finished:
    """As `run`, with the command that starts the job."""
    with launch.Job(started, directory=folder, **environment(folder, losses, trained)) as job:
        return finished(folder, job.wait(timeout=timeout))


def _may_be_lost(alive: set[int], replicas: int, together: int) -> list[int]:
    """The ranks whose loss leaves each stage a rank. `together`: how many ranks are lost with each."""
    counts = Counter(rank // (replicas * together) for rank in alive)
    return sorted(rank for rank in alive if counts[rank // (replicas * together)] > together)


def _with(rank: int, together: int) -> set[int]:
    first = rank - rank % together
    return {*range(first, first + together)}


def lose_at_random(
    folder: Path,
    depth: int,
    replicas: int,
    flags: str,
    *,
    seed: int,
    together: int = 1,
    building: float | None = None,
    max_restarts: int = 0,
    timeout: float = 900.0,
) -> tuple[Finished, list[tuple[int, str]]]:
    """Run the job, and kill or stop ranks at random moments until each stage has one left; returns whom, and how.

    Args:
        together: the tensor parallel degree, with which the number of ranks grows.
        building: the ranks are lost within so many seconds from each other and from the beginning of the job, while
            ranks prove programs and build their parts; None: the first one when a batch is done.
    """
    num_ranks = depth * replicas * together
    random, alive = Random(f"{seed} {flags}"), set(range(num_ranks))
    lost: list[tuple[int, str]] = []
    started, known = command(num_ranks, flags, max_restarts=max_restarts), 0
    with launch.Job(started, directory=folder, **environment(folder, [])) as job:
        if building is None:
            launch.wait_for_iteration(job, folder / "metrics.jsonl", 1)
        else:
            job.wait_until(lambda: {each.rank for each in moments_of(folder) if each.what == "met"} == alive)
        processes = processes_of(folder)
        while choice := _may_be_lost(alive, replicas, together):
            if building is None:
                known = max(launch.losses(folder / "metrics.jsonl"))
                launch.wait_for_iteration(job, folder / "metrics.jsonl", known + random.choice([0, 0, 1, 2, 3]))
            time.sleep(random.uniform(0.0, building or random.choice([0.05, 1.0])))
            rank, how = random.choice(choice), random.choice(["SIGKILL", "SIGKILL", "SIGSTOP"])
            alive -= _with(rank, together)
            lost.append((rank, how))
            with open(folder / "moments.txt", "a", encoding="utf-8") as stream:
                stream.write(f"{time.time()} {rank} random:{how} {known}\n")
            launch.kill(processes[rank], signal.Signals[how])
        return finished(folder, job.wait(timeout=timeout)), lost


def lose_and_return_at_random(
    folder: Path,
    depth: int,
    replicas: int,
    flags: str,
    *,
    num_losses: int,
    seed: int,
    together: int = 1,
    timeout: float = 900.0,
) -> tuple[Finished, list[tuple[int, str]]]:
    """Run a job whose lost ranks come back, and kill or stop ranks at random moments; returns whom, and how.

    Each stage keeps a rank. After the last loss, when all ranks are back, the job is asked to stop. `together`: as for
    `lose_at_random`.
    """
    random, ranks = Random(f"{seed} {flags}"), range(depth * replicas * together)
    lost: list[tuple[int, str]] = []
    started = command(len(ranks), flags, max_restarts=num_losses)
    with launch.Job(started, directory=folder, **environment(folder, [])) as job:
        launch.wait_for_iteration(job, folder / "metrics.jsonl", 1)

        def away() -> set[int]:
            backs = Counter(int(rank) for rank in re.findall(r"rank (\d+) is back", job.output))
            return {rank for rank in ranks if backs[rank] < sum(rank in _with(each, together) for each, _ in lost)}

        def choice() -> list[int]:
            return _may_be_lost(set(ranks) - away(), replicas, together)

        for _ in range(num_losses):
            job.wait_until(lambda: bool(choice()), timeout=60)
            time.sleep(random.uniform(0.0, random.choice([0.05, 1.0, 6.0])))
            rank, how = random.choice(choice()), random.choice(["SIGKILL", "SIGKILL", "SIGSTOP"])
            lost.append((rank, how))
            with open(folder / "moments.txt", "a", encoding="utf-8") as stream:
                known = max(launch.losses(folder / "metrics.jsonl"))
                stream.write(f"{time.time()} {rank} random:{how} {known}\n")
            launch.kill(processes_of(folder)[rank], signal.Signals[how])
        job.wait_until(lambda: not away(), timeout=60)
        job.process.terminate()
        return finished(folder, job.wait(timeout=timeout)), lost


@functools.cache
def undisturbed(flags: str, num_ranks: int = 1, model: str | None = None, trained: Trained | None = None) -> list[dict]:
    """The records of one process, or so many, with the same flags."""
    program, base, data, engine = trained or gpt(model)
    options = {"device": "engine", "function": "tests.trainer.run.test_engine:engine_case"} if engine else {}
    return train(num_ranks, f"{data} {flags}", base=base, program=program, timeout=600.0, **options)[-1]["records"]


def values(records: list[dict], name: str) -> dict[int, float]:
    """Iteration -> value, where there is one: an overflow has no norm. What is recorded twice has to be the same."""
    found: dict[int, float] = {}
    for record in records:
        if record.get(name) is not None:
            assert found.setdefault(record["iteration"], record[name]) == pytest.approx(record[name], rel=1e-6)
    return found


def assert_nothing_lost(
    job: Finished,
    flags: str,
    *,
    num_ranks: int = 1,
    model: str | None = None,
    trained: Trained | None = None,
    is_stopped: bool = False,
) -> None:
    """It ended well, or by SIGTERM, and all that it records is as in one process, or so many, that nothing disturbs.

    In FP16 gradients are divided by the number of microbatches of a replica before they are rounded, and summed in 16
    bits: norms of jobs that nothing disturbs differ by 5e-4 from those of one process. Sums in FP32, of losses that are
    scaled until no gradient loses bits, differ no more than without FP16.
    """
    tolerance = 1e-3 if "--fp16" in flags and SUMS_IN_FP32 not in flags else 2e-6
    if is_stopped:
        assert job.outcome.status == 128 + signal.SIGTERM and not job.outcome.leftovers, job.outcome.output
    else:
        job.outcome.assert_succeeded()
    whole = undisturbed(flags, num_ranks, model, trained)
    for name in COMPARED:
        expected = values(whole, name)
        assert values(job.records, name) == pytest.approx(expected, rel=tolerance), (name, job.outcome.output)
    counts = [{each["iteration"]: each["tokens_per_expert"] for each in records if "tokens_per_expert" in each}
              for records in (job.records, whole)]  # fmt: skip
    assert counts[0] == counts[1], job.outcome.output
    assert values(whole, "lm_loss") or values(whole, "loss"), "nothing was compared"
    longest = job.longest_recovery()
    assert longest < TIMEOUT + MARGIN, f"{longest:.1f} s until the next batch\n{job.outcome.output}"


def changes_recorded(job: Finished, *, world_size: int) -> list[dict]:
    """The records of losses and returns, which are what the log says.

    A new writer may have recorded the last change before it again, with the seconds of its own recovery.
    """
    records: dict[tuple, dict] = {}
    for each in job.records:
        if "lost_ranks" in each:
            records.setdefault((each["iteration"], *each["lost_ranks"], *each["joined_ranks"]), each)
    told = []
    for each in records.values():
        changes = [f"lost rank {rank} ({why})" for rank, why in each["lost_ranks"].items()]
        changes += [f"rank {rank} is back" for rank in each["joined_ranks"]]
        speed = (
            f"{each['slowdown']:.2f} times as long as with all ranks, as simulated (at least "
            f"{each['least_slowdown']:.2f}); program {each['program']}"
            if "program" in each
            else "as long as before any loss"
        )
        told.append(
            f"{', '.join(changes) or 'no rank is lost or back'}: {counted(each['ranks'], 'rank')} of {world_size} "
            f"go on from iteration {each['iteration']} after {each['recovery_seconds']:.1f} s; a batch takes {speed}"
        )
    lines = [line for line in job.outcome.output.splitlines() if " go on from iteration " in line]
    lines = [re.sub(", made (now|before the run began)$", "", line) for line in lines]
    assert lines == told, job.outcome.output
    return list(records.values())


def assert_drawn(folder: Path, *, first: int, last: int, size: int, lanes: list[str], is_whole: bool = False) -> None:
    """The files of --pipeline-timeline have the batches behind iteration `first`, of `size` microbatches each.

    `is_whole`: all ranks are there, and the pipeline of a replica is shown.
    """
    measured = Timeline.load(folder / "measured.json")
    assert (measured.first_batch, measured.batches) == (first, (size,) * (last - first))
    assert measured.num_ranks == len(lanes) and bool(measured.copies) is not is_whole
    computed = {each.microbatch for row in measured.rows for each in row if each.kind is Kind.FORWARD}
    assert computed == set(range(size * first, size * last))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == lanes
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
