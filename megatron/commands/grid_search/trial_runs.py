"""Runs of configurations, one after another: each in a directory with its command, its log and its metrics.

A run that fails has a kind and one sentence, from its exit status and its log: the failing rank's where it left one.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.commands.grid_search.trial_results import (
    Result,
    ResultsFile,
    Settings,
    Status,
    TrialEntry,
    configuration_fields,
)
from megatron.documents.files import write_whole
from megatron.planner.time.profile import Spread
from megatron.processes import End, end_left, run_job

METRICS, LOG, SCRIPT = "metrics.jsonl", "log.txt", "run.sh"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """How configurations are run.

    Attributes:
        program: path of the training program.
        argv: the flags of the program, without those that a configuration decides.
        output: directory for all runs.
        iterations, warmup: the number of trained iterations, and how many of them are not measured.
        timeout: the most seconds of a run, from its start to its end.
        threads: the threads of each rank in the operators of a CPU.
        topology: file with the nodes and their bandwidths, for optimized rank mappings.
    """

    program: Path
    argv: tuple[str, ...]
    output: Path
    iterations: int = 10
    warmup: int = 3
    timeout: float = 600.0
    threads: int = 1
    topology: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.iterations:
            raise ValueError(
                f"of {self.iterations} iterations {self.warmup} are warm-up; give 0 or more, and fewer than all"
            )

    @property
    def settings(self) -> Settings:
        return Settings(flags=self.argv, iterations=self.iterations, warmup=self.warmup, threads=self.threads)

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}

    @property
    def _exports(self) -> str:
        return "export " + " ".join(f"{name}={value}" for name, value in self.environment.items())

    @property
    def folder(self) -> Path:
        return self.output.absolute()

    def directory(self, entry: TrialEntry) -> Path:
        return self.folder / entry.name

    def training_argv(self, entry: TrialEntry) -> list[str]:
        """The program and its flags. The timeout of a transfer is half of the run's, so that a rank can still report
        it."""
        flags = {
            "--train-iters": self.iterations,
            "--eval-iters": 0,
            "--log-interval": 1,
            "--distributed-timeout-minutes": f"{self.timeout / 120:g}",
            "--metrics-file": self.directory(entry) / METRICS,
        }
        if entry.configuration.rank_mapping == "optimized":
            if self.topology is None:
                raise ValueError(f"{entry.name} needs the cluster's nodes; give --rank-topology FILE")
            flags["--rank-topology"] = self.topology.absolute()
        own = [str(part) for pair in flags.items() for part in pair]
        return [str(self.program), *self.argv, *entry.configuration.argv(), *own]

    def run(self, entry: TrialEntry) -> Result:
        """Train and return the result. No process of the run is left when this returns, also after an exception."""
        directory = self.directory(entry)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / METRICS).unlink(missing_ok=True)  # of a run that was killed with the process that measured it
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(entry.configuration.num_gpus)]
        command = [sys.executable, *launch, *self.training_argv(entry)]
        _write_script(
            directory / SCRIPT, f"cd {shlex.quote(str(Path.cwd()))}", self._exports,
            f"rm -f {shlex.quote(str(directory / METRICS))}", shlex.join(command),
        )  # fmt: skip
        end = run_job(
            command, log=directory / LOG, timeout=self.timeout, directory=Path.cwd(), folder=self.folder,
            environment=self.environment,
        )  # fmt: skip
        return self.result(entry, end)

    def result(self, entry: TrialEntry, end: End) -> Result:
        """The result of a run that has ended, from its metrics and its log."""
        directory = self.directory(entry)
        times = iteration_seconds(directory / METRICS)
        common = {
            "name": entry.name,
            "configuration": configuration_fields(entry.configuration),
            "settings": self.settings,
            "predicted_seconds": entry.predicted_seconds,
            "directory": str(directory),
        }
        if end.status == 0 and len(times) >= self.iterations:
            spread = Spread.of(times[self.warmup :])
            return Result(
                **common, status=Status.DONE, seconds=spread.median, low=spread.low, high=spread.high,
                num_iterations=spread.count,
            )  # fmt: skip
        log = (directory / LOG).read_text(encoding="utf-8", errors="replace") if (directory / LOG).exists() else ""
        status, sentence = classify(end, log, progress=f"{len(times)} of {self.iterations} iterations were done")
        return Result(**common, status=status, sentence=sentence)

    def write_script(self, entry: TrialEntry, gpus_per_node: int) -> Path:
        """Write the script to start on every node of a cluster, which reads `NNODES`, `NODE_RANK` and `MASTER_ADDR`."""
        num_gpus = entry.configuration.num_gpus
        if num_gpus > gpus_per_node and num_gpus % gpus_per_node:
            raise ValueError(
                f"{num_gpus} GPUs do not fill nodes of {gpus_per_node}; give another number to --write-scripts"
            )
        directory = self.directory(entry)
        directory.mkdir(parents=True, exist_ok=True)
        launch = (
            f'torchrun --nnodes "${{NNODES:-{max(num_gpus // gpus_per_node, 1)}}}" '
            f'--node-rank "${{NODE_RANK:-${{SLURM_NODEID:-0}}}}" --nproc-per-node {min(num_gpus, gpus_per_node)} '
            '--master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"'
        )
        script = directory / SCRIPT
        if (directory / METRICS).exists() and not self._is_of(script, entry):
            raise ValueError(f"{directory} holds a run with other flags; give another --output, or remove it")
        _write_script(
            script,
            "# Start it on every node at the same time, for example with srun; then: grid_search.py measure --collect",
            f"cd {shlex.quote(str(Path.cwd()))}",
            self._exports,
            f"{launch} \\\n    {shlex.join(self.training_argv(entry))} >>{shlex.quote(str(directory / LOG))} 2>&1",
        )
        return script

    def _is_of(self, script: Path, entry: TrialEntry) -> bool:
        """Whether a script that was written before trains the same."""
        return script.exists() and shlex.join(self.training_argv(entry)) in script.read_text(encoding="utf-8")

    def collected(self, entry: TrialEntry) -> Result | None:
        """The result of a run that its script started; None before its end. Raises ValueError if the script was written
        for other flags."""
        directory = self.directory(entry)
        if len(iteration_seconds(directory / METRICS)) < self.iterations:
            return None
        if not self._is_of(directory / SCRIPT, entry):
            raise ValueError(f"{directory / SCRIPT} was written with other flags; collect with those, or write it anew "
                             "into another --output")  # fmt: skip
        return self.result(entry, End(0, 0.0))


def measure(
    runs: Runs,
    entries: Sequence[TrialEntry],
    results: ResultsFile,
    *,
    again: frozenset[Status] = frozenset(),
    said: Callable[[int, TrialEntry, Result | None], None] = lambda number, entry, result: None,
) -> None:
    """Run the entries without a result, or with a status in `again`; each result is written at once.

    `said(number, entry, result)` is called before each run, with None, and after it. Raises ValueError if another
    process measures in the same folder.
    """
    end_left(runs.folder)
    for number, entry in enumerate(entries):
        known = results.get(entry.name)
        if known is not None and known.status not in again:
            if known.predicted_seconds != entry.predicted_seconds:
                results.add(known.model_copy(update={"predicted_seconds": entry.predicted_seconds}))
            continue
        said(number, entry, None)
        result = runs.run(entry)
        results.add(result)
        said(number, entry, result)


def collect(runs: Runs, entries: Sequence[TrialEntry], results: ResultsFile) -> list[TrialEntry]:
    """Add the results of runs that their scripts started and that have ended; return the other entries."""
    waiting = []
    for entry in entries:
        result = runs.collected(entry)
        if result is None:
            waiting.append(entry)
        else:
            results.add(result)
    return waiting


def iteration_seconds(path: Path) -> list[float]:
    """The seconds of iterations in a metrics file, in order. Of repeated iterations the last one counts; an incomplete
    line is left out."""
    seconds: dict[int, float] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "iteration_time_ms" in record:
                seconds[record["iteration"]] = record["iteration_time_ms"] / 1000
    return [seconds[iteration] for iteration in sorted(seconds)]


def _write_script(path: Path, *lines: str) -> None:
    write_whole(path, "#!/usr/bin/env bash\nset -euo pipefail\n" + "\n".join(lines) + "\n")
    os.chmod(path, 0o755)


_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|cannot allocate memory|not enough memory"
    r"|bad_alloc|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
# A rank, or a process that loads its data, was killed by the system, not by the launcher itself.
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|exit code -9\b|killed by signal: Killed")
_TIMED_OUT = re.compile(
    r"TimeoutError|timed out|has not ended after|did not come within|has not answered for", re.IGNORECASE
)
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout")  # NCCL's, which then ends the process
_NO_MESSAGE = "ended without an error message"  # the failure guard's words for a rank that gave no reason
_STORY = re.compile(r"^rank \d+.*? stops: (?P<sentence>.+)$", re.MULTILINE)  # of the failure guard, on every rank alike
_REFUSAL = re.compile(r"^\S+\.py: error: (?P<sentence>.+)$", re.MULTILINE)
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: )?(?P<sentence>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt): .+)$", re.MULTILINE
)


def classify(end: End, log: str, *, progress: str) -> tuple[Status, str]:
    """The status and the sentence of a run that did not end well.

    Args:
        log: everything that the run printed.
        progress: how far the run came, in words.
    """
    if end.status is None:
        return Status.HANG, f"not at its end after {end.seconds:.0f} s: {progress}"
    sentence = _sentence(log)
    is_told = sentence is not None and _NO_MESSAGE not in sentence
    if _OUT_OF_MEMORY.search(sentence if is_told else log):
        return Status.OUT_OF_MEMORY, sentence if is_told else _line(_OUT_OF_MEMORY, log)
    if _KILLED.search(log) or end.status == -9:
        told = f" ({sentence})" if sentence else ""
        return Status.OUT_OF_MEMORY, f"a rank was killed (signal 9), as the system does when memory ends{told}"
    if is_told and _TIMED_OUT.search(sentence):
        return Status.HANG, sentence
    if not is_told and _WATCHDOG.search(log):
        return Status.HANG, _line(_WATCHDOG, log)
    return Status.ERROR, sentence or f"ended with status {end.status} without an error message: {progress}"


def _sentence(log: str) -> str | None:
    """The sentence of the failure guard, a refusal, or an exception: of several the one about memory, or the last."""
    for pattern in (_STORY, _REFUSAL):
        found = pattern.search(log)
        if found:
            return found["sentence"].strip()
    exceptions = [each.strip() for each in _EXCEPTION.findall(log) if "ChildFailedError" not in each]
    return next(filter(_OUT_OF_MEMORY.search, exceptions), exceptions[-1] if exceptions else None)


def _line(pattern: re.Pattern, log: str) -> str:
    return next(line.strip() for line in log.splitlines() if pattern.search(line))
