"""Jobs of processes whose stages sleep instead of computing: the common part of the benchmarks on emulated stages.

A job is one set of `num_stages * num_replicas` processes. Engine, links and lanes are real; the times of the stages are
given. Programs are proved outside of the timed sections.
"""

import contextlib
import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.common.processes import gathered, run_group
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.contract.trace import COMPUTE, gather_traces, timeline
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedStage, EmulatedTimes, sleep_for
from megatron.pipeline.runtime.transport.links import GlooLink
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.timeline import Timeline

TIMEOUT = timedelta(seconds=60)
NUM_EXCHANGES = 12


@dataclass(frozen=True, kw_only=True)
class Job:
    """The extent of a job: processes of a pipeline, replicas, bytes between stages, timed batches, and repeats."""

    num_stages: int
    num_replicas: int = 1
    payload_bytes: int
    batches: int = 1
    repeats: int = 1

    @property
    def world_size(self) -> int:
        return self.num_stages * self.num_replicas


class Rank(ABC):
    """One process of a job. `run` measures everything and returns plain data, of which rank 0's is used."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.replica, self.stage = divmod(dist.get_rank(), job.num_stages)
        self._spec = TensorSpec((max(1, job.payload_bytes // 4),))
        self._world = dist.new_group()

    @abstractmethod
    def run(self) -> dict:
        """Measure on this rank. Returns the results as plain data."""

    def stages(self, schedule: Schedule, times: Callable[[int], EmulatedTimes], **options: Any) -> list[EmulatedStage]:
        """Make this rank's stages. `times`: number of a stage -> its times. `options`: arguments of `EmulatedStage`.

        Where stages are copies, they have the numbers of the model's stages.
        """
        of_model = [copy.stage for copy in schedule.copies] or range(schedule.num_stages)
        return [
            EmulatedStage(index=of_model[index], num_stages=max(of_model) + 1, times=times(index),
                          payload_bytes=self.job.payload_bytes, **options)
            for index in schedule.stages_of(self.stage)
        ]  # fmt: skip

    def traced_run(self, engine: PipelineEngine, schedule: Schedule, batches: Sequence[int]) -> dict:
        """Run batches from a drained state to a drained state, and trace them.

        `batches`: number of microbatches of each. Returns on rank 0 `measured`, the timeline; `busy`, the used share of
        the cores; and the numbers of the first batch and of its first microbatch.
        """
        first = {"first_batch": engine.next_batch, "first_microbatch": engine.next_microbatch}
        prove(schedule, batches, **first)
        gc.collect()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        run_batches(engine, batches)
        engine.drain()
        share = busy(time.process_time() - cpu, time.perf_counter() - start)
        traces = gather_traces(engine.trace())
        return {} if traces is None else {"busy": share, "measured": timeline(traces).to_dict(), **first}

    def latencies(self, scope: str) -> list[float]:
        """Measure the seconds from posting a send to its arrival, under the conditions of a run.

        In a steady 1f1b both ends of an edge send at the same time, at the end of a computation that slept, to a
        receive that was posted before. With backwards twice as long as forwards, every third edge does so at the same
        time.
        """
        stage, p = self.stage, self.job.num_stages
        samples = []
        for colour in range(3):
            edge = next((e for e in (stage - 1, stage) if 0 <= e < p - 1 and e % 3 == colour), None)
            links = None if edge is None else self._links(edge, scope)
            meeting = torch.tensor([time.perf_counter() + 0.05], dtype=torch.float64)
            dist.broadcast(meeting, 0)  # one clock for all processes of a computer
            if links is not None:
                samples += self._exchange(*links, meeting.item())
            dist.barrier()
            for link in links or ():
                link.close(TIMEOUT.total_seconds())
        return [seconds for each in gathered(samples) for seconds in each]

    def _links(self, edge: int, scope: str) -> tuple[GlooLink, GlooLink]:
        """Make the links of one edge: (from this stage, to this stage)."""
        store = distributed_c10d._get_default_store()
        is_low = self.stage == edge
        links = {}
        for name, sends in (("down", is_low), ("up", not is_low)):
            links[sends] = GlooLink(
                f"{scope}/{self.replica}/{edge}/{name}",
                store,
                sends=sends,
                timeout=TIMEOUT,
                device=torch.device("cpu"),
                on_error=lambda error: None,
            )
        return links[True], links[False]

    def _exchange(self, outgoing: GlooLink, incoming: GlooLink, meeting: float) -> list[float]:
        payload, samples = torch.zeros(self._spec.shape), []
        for number in range(NUM_EXCHANGES):
            receive = incoming.receive(self._spec, number)
            sleep_for(meeting + number * 0.01 - time.perf_counter())
            start = time.perf_counter()
            outgoing.send(payload, number)
            receive.wait(TIMEOUT)
            samples.append(time.perf_counter() - start)
        return samples[2:]  # the first ones touch the memory


@contextlib.contextmanager
def engines(contenders: Collection[Any], make: Callable[[Any], PipelineEngine]) -> Iterator[dict[str, PipelineEngine]]:
    """A block with an engine for each contender, by name. All engines are closed together at its end."""
    made = {each.name: make(each) for each in contenders}
    yield made
    dist.barrier()
    for engine in made.values():
        engine.close()


def times_of(seconds: Mapping[Kind, Sequence[float]]) -> Callable[[int], EmulatedTimes]:
    """A function from the number of a stage to its times. `seconds`: kind of instruction -> seconds by stage."""
    return lambda stage: EmulatedTimes(
        *(seconds[kind][stage] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE))
    )


def prove(schedule: Schedule, batches: Sequence[int], **first: int) -> None:
    """Prove the programs of batches. The proofs are cached, so that no engine proves them again."""
    stream = schedule.stream(**first)
    for num_microbatches in batches:
        stream.start_batch(num_microbatches)
    stream.drain()


def run_batches(engine: PipelineEngine, batches: Sequence[int]) -> None:
    """Run batches with the given numbers of microbatches, of one sample each."""
    for num_microbatches in batches:
        engine.run_batch(num_microbatches, num_microbatches)


def busy(cpu_seconds: float, seconds: float) -> float:
    """The share of all cores' time that all processes have used together."""
    return sum(gathered(cpu_seconds)) / seconds / len(os.sched_getaffinity(0))


def executed(engine: PipelineEngine) -> list[Instruction]:
    """The traced computing instructions of this rank, in their order."""
    return [span.instruction for span in engine.trace().spans if span.track == COMPUTE]


def words_of(timeline: Timeline) -> list[list[str]]:
    """The rows of a timeline's program as text, for comparison."""
    return [list(map(str, row)) for row in timeline.rows]


def run_job(job: Job, rank_class: type[Rank]) -> dict:
    """Start the processes of a job and wait for them. Returns the result of `Rank.run` on rank 0."""
    return run_group(job.world_size, _run, job, rank_class)


def _run(job: Job, rank_class: type[Rank]) -> dict:
    gc.collect()
    gc.freeze()  # as in training: a full garbage collection takes longer than a computation
    return rank_class(job).run()
