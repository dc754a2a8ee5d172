"""What the processes of `emulated.py` run: contenders on emulated stages, in turns, and the latency of a transfer.

One job is one set of processes, `num_stages * num_replicas` of them. Every contender has an engine of its own there,
and is drained and at rest while another one is measured.
"""

import contextlib
import gc
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.contract.trace import COMPUTE, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated.stage import (
    EmulatedReduction,
    EmulatedStage,
    EmulatedTimes,
    EmulatedUpdate,
    sleep_for,
)
from megatron.pipeline.runtime.transport.links import GlooLink
from megatron.pipeline.schedules import PRESETS, Schedule

TIMEOUT = timedelta(seconds=60)
CHAIN_BYTES = 64 * 1024
"""What a reduction of the chain really sends; the rest of its time it sleeps."""
EMBED_PART = 0.2
"""Part of the chain's time that the tied embeddings take; the data-parallel gradients take the rest."""
NUM_EXCHANGES = 12


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A schedule as it is run: `name`, the preset, how many stages each rank has, and of its chain of reductions how
    many seconds it takes (None: the chain has neither data-parallel nor embedding gradients). STEP, PREDICT and HOLD
    take `update_seconds` each."""

    name: str
    preset: str
    virtual: int = 1
    extra_warmup: bool = False
    chain_seconds: float | None = None
    predict: bool = False
    provisional_microbatches: int | None = None
    update_seconds: float = 0.0
    traced: bool = True

    @property
    def settling_batches(self) -> int:
        """Batches outside of the clock: a pipeline that does not flush fills, and its stream proves a window of two."""
        return 1 if PRESETS[self.preset].policy.drains else 2

    def schedule(self, num_ranks: int) -> Schedule:
        reduces = self.chain_seconds is not None
        return Schedule.preset(
            self.preset,
            num_stages=num_ranks * self.virtual,
            num_virtual_stages=self.virtual,
            extra_warmup=self.extra_warmup,
            predict=self.predict,
            provisional_microbatches=self.provisional_microbatches,
            data_parallel=reduces,
            tied_embeddings=reduces,
        )

    @property
    def grad_seconds(self) -> float:
        return (1 - EMBED_PART) * (self.chain_seconds or 0.0)

    @property
    def embed_seconds(self) -> float:
        return EMBED_PART * (self.chain_seconds or 0.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """`num_stages`: of one on each rank; where a rank has several, they share its `forward` and `backward`, in seconds.
    `entries`: num_microbatches -> who runs it. `batches` are timed, `repeats`
    times over."""

    num_stages: int
    num_replicas: int = 1
    entries: dict[int, tuple[Contender, ...]]
    forward: float
    backward: float
    payload_bytes: int
    batches: int
    repeats: int

    @property
    def world_size(self) -> int:
        return self.num_stages * self.num_replicas

    def timed_batches(self, num_microbatches: int) -> int:
        """Short batches come twice as often."""
        return self.batches * (1 if num_microbatches >= 2 * self.num_stages else 2)


@dataclass
class Measurement:
    """What was measured of one contender at one m. Lists have one entry a repeat.

    `seconds`: per batch on the first stage. `cpu_seconds`: of that, what its main thread computed. `instructions`:
    executed per batch on that rank. `saved_peak`: per stage, saved microbatches counted while it ran.
    `executed_is_program`: on every rank, what was executed is the row that `Schedule.build` gives.
    """

    contender: str
    num_microbatches: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    instructions: float = 0.0
    saved_peak: list[int] = field(default_factory=list)
    executed_is_program: bool = True


class Rank:
    """One process of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.replica, self.stage = divmod(dist.get_rank(), job.num_stages)
        self._spec = TensorSpec((max(1, job.payload_bytes // 4),))
        self._world = dist.new_group()
        p, world = job.num_stages, job.world_size
        self._grad_group = self._embed_group = None
        if job.num_replicas > 1:
            groups = [dist.new_group(list(range(stage, world, p))) for stage in range(p)]
            self._grad_group = groups[self.stage]
            ends = [dist.new_group([first, first + p - 1]) for first in range(0, world, p)]
            self._embed_group = ends[self.replica]

    def run(self) -> dict:
        """Measure everything; the same result on all ranks, as plain data."""
        latencies, measurements = [], []
        for num_microbatches, contenders in self.job.entries.items():
            with self._engines(contenders, num_microbatches) as engines:
                results = {each.name: Measurement(each.name, num_microbatches) for each in contenders}
                for engine in engines.values():  # connections and memory, and batch 0, which has versions like no other
                    engine.run_batch(num_microbatches, num_microbatches)
                    engine.drain()
                order = random.Random(num_microbatches)
                for repeat in range(self.job.repeats):
                    if self.job.num_stages > 1:
                        latencies += self._latencies(f"latency/{num_microbatches}/{repeat}")
                    for contender in order.sample(contenders, len(contenders)):
                        self._measure(contender, engines[contender.name], results[contender.name])
                for name, engine in engines.items():
                    peaks = gathered(engine.saved_microbatches_peak[self.stage])
                    results[name].saved_peak = peaks[: self.job.num_stages]
                measurements += [vars(result) for result in results.values()]
        return {"latencies": latencies, "measurements": measurements}

    @contextlib.contextmanager
    def _engines(self, contenders: Sequence[Contender], num_microbatches: int) -> Iterator[dict[str, PipelineEngine]]:
        engines = {each.name: self._engine(each, num_microbatches) for each in contenders}
        yield engines
        dist.barrier()
        for engine in engines.values():
            engine.close()

    def _engine(self, contender: Contender, num_microbatches: int) -> PipelineEngine:
        job = self.job
        schedule, times = contender.schedule(job.num_stages), (job.forward, job.backward)
        stages = [
            EmulatedStage(
                index=index,
                num_stages=schedule.num_stages,
                times=EmulatedTimes(*(seconds / contender.virtual for seconds in times)),
                payload_bytes=job.payload_bytes,
            )
            for index in schedule.stages_of(self.stage)
        ]
        grad = embed = None
        if contender.chain_seconds is not None:
            grad = EmulatedReduction(CHAIN_BYTES, self._grad_group, contender.grad_seconds)
            embed = EmulatedReduction(CHAIN_BYTES, self._embed_group, contender.embed_seconds)
        num_batches = contender.settling_batches + job.timed_batches(num_microbatches)
        first = self.replica * job.num_stages
        return PipelineEngine(
            schedule,
            stages,
            EmulatedUpdate(
                grad=grad,
                embed=embed,
                job_group=self._world if job.world_size > 1 else None,
                step_seconds=contender.update_seconds,
                predict_seconds=contender.update_seconds,
                hold_seconds=contender.update_seconds,
            ),
            ranks=range(first, first + job.num_stages),
            timeout=TIMEOUT,
            tracer=Tracer(num_batches=num_batches) if contender.traced else None,
        )

    def _measure(self, contender: Contender, engine: PipelineEngine, result: Measurement) -> None:
        """One repeat: from a drained pipeline to a drained pipeline, timed in between."""
        m, job = result.num_microbatches, self.job
        settling, num_batches = contender.settling_batches, job.timed_batches(m)
        first_batch, first_microbatch = engine.next_batch, engine.next_microbatch
        before = engine.num_instructions_executed
        dist.barrier()
        for _ in range(settling):
            engine.run_batch(m, m)
        settled, start, cpu_start = engine.num_instructions_executed, time.perf_counter(), time.thread_time()
        for _ in range(num_batches):
            engine.run_batch(m, m)
        seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
        result.instructions = (engine.num_instructions_executed - settled) / num_batches
        engine.drain()
        result.seconds.append(seconds / num_batches)
        result.cpu_seconds.append(cpu_seconds / num_batches)
        program = contender.schedule(job.num_stages).build(
            (m,) * (settling + num_batches), first_batch=first_batch, first_microbatch=first_microbatch
        )
        row = program.rows[self.stage]
        same = engine.num_instructions_executed - before == len(row)
        if contender.traced:
            executed = [span.instruction for span in engine.trace().spans if span.track == COMPUTE]
            same = same and executed == list(row)
        result.executed_is_program = result.executed_is_program and all(gathered(same))

    def _latencies(self, scope: str) -> list[float]:
        """Seconds from posting a send to its arrival, under the conditions of a run.

        In a steady 1f1b both ends of an edge send at once, at the end of a computation that slept, to a receive posted
        before; with backwards twice as long as forwards every third edge is at that point at the same time.
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
        """(from this stage, to this stage) over one edge."""
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


def gathered(value) -> list:
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def run_rank(rank: int, port: int, job: Job, result: Path, rank_class: type[Rank]) -> None:
    """The process of one rank; rank 0 writes the result as JSON."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, job.world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
    gc.collect()
    gc.freeze()  # as in training: a collection of everything that is imported takes longer than a computation
    found = rank_class(job).run()
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_job(job: Job, directory: Path, rank_class: type[Rank] = Rank) -> dict:
    """Start the processes of a job, wait for them, return what `Rank.run` returned."""
    result = directory / "result.json"
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(run_rank, args=(store.port, job, result, rank_class), nprocs=job.world_size)
    return json.loads(result.read_text())
