"""The processes of `emulated.py`, which run contenders on emulated stages in turns, and measure a transfer's latency.

Every contender has an engine of its own, and is drained and at rest while another one is measured.
"""

import random
import time
from dataclasses import dataclass, field

import torch.distributed as dist

from benchmarks.common.emulated import TIMEOUT, Job, Rank, engines, executed, run_batches
from benchmarks.common.processes import gathered
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedReduction, EmulatedTimes, EmulatedUpdate
from megatron.pipeline.schedules import PRESETS, Schedule

CHAIN_BYTES = 64 * 1024
"""The bytes that a reduction of the chain really sends; it sleeps for the rest of its time."""
EMBED_PART = 0.2
"""The part of the chain's time for the tied embeddings; the data-parallel gradients take the rest."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A schedule with its choices and costs.

    Attributes:
        virtual: number of stages on each rank.
        chain_seconds: seconds of the chain of reductions; None: the chain has neither data-parallel nor embedding
            gradients.
        update_seconds: seconds of each STEP, PREDICT and HOLD.
    """

    name: str
    preset: str
    virtual: int = 1
    extra_warmup: bool = False
    chain_seconds: float | None = None
    predict: bool = False
    provisional_microbatches: int | None = None
    update_seconds: float = 0.0
    optimistic: bool = False
    traced: bool = True

    @property
    def settling_batches(self) -> int:
        """The number of batches before the timed ones, while a pipeline fills and its stream proves its programs."""
        return 1 if PRESETS[self.preset].policy.drains and not self.optimistic else 2

    def schedule(self, num_ranks: int) -> Schedule:
        reduces = self.chain_seconds is not None
        return Schedule.preset(
            self.preset, num_stages=num_ranks * self.virtual, num_virtual_stages=self.virtual,
            extra_warmup=self.extra_warmup, predict=self.predict,
            provisional_microbatches=self.provisional_microbatches, data_parallel=reduces, tied_embeddings=reduces,
            optimistic=self.optimistic,
        )  # fmt: skip

    @property
    def grad_seconds(self) -> float:
        return (1 - EMBED_PART) * (self.chain_seconds or 0.0)

    @property
    def embed_seconds(self) -> float:
        return EMBED_PART * (self.chain_seconds or 0.0)


@dataclass(frozen=True, kw_only=True)
class EmulatedJob(Job):
    """A job with its contenders.

    Attributes:
        entries: number of microbatches -> the contenders that run it.
        forward, backward: seconds of a rank for a microbatch, divided among the rank's stages.
    """

    entries: dict[int, tuple[Contender, ...]]
    forward: float
    backward: float

    def timed_batches(self, num_microbatches: int) -> int:
        """The number of timed batches in a repeat; twice as many if batches are short."""
        return self.batches * (1 if num_microbatches >= 2 * self.num_stages else 2)


@dataclass
class Measurement:
    """The measurements of one contender at one number of microbatches.

    Attributes:
        seconds: for each repeat, seconds per batch on the first stage.
        cpu_seconds: for each repeat, CPU seconds per batch of the first stage's main thread.
        instructions: instructions per batch on the first stage's rank.
        saved_peak: for each stage, the most microbatches saved at a time, counted during the run.
        executed_is_program: whether every rank has executed exactly its row of `Schedule.build`.
    """

    contender: str
    num_microbatches: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    instructions: float = 0.0
    saved_peak: list[int] = field(default_factory=list)
    executed_is_program: bool = True


class EmulatedRank(Rank):
    """One process of a job, which measures all contenders and the latency."""

    def __init__(self, job: EmulatedJob) -> None:
        super().__init__(job)
        p, world = job.num_stages, job.world_size
        self._grad_group = self._embed_group = None
        if job.num_replicas > 1:
            self._grad_group = [dist.new_group(list(range(stage, world, p))) for stage in range(p)][self.stage]
            ends = [dist.new_group([first, first + p - 1]) for first in range(0, world, p)]
            self._embed_group = ends[self.replica]

    def run(self) -> dict:
        """Measure everything. Returns the same result on all ranks."""
        latencies, measurements = [], []
        for m, contenders in self.job.entries.items():
            with engines(contenders, lambda each, m=m: self._engine(each, m)) as made:
                results = {each.name: Measurement(each.name, m) for each in contenders}
                for engine in made.values():  # makes connections and memory; batch 0 has unusual weight versions
                    run_batches(engine, [m])
                    engine.drain()
                order = random.Random(m)
                for repeat in range(self.job.repeats):
                    if self.job.num_stages > 1:
                        latencies += self.latencies(f"latency/{m}/{repeat}")
                    for contender in order.sample(contenders, len(contenders)):
                        self._measure(contender, made[contender.name], results[contender.name])
                for name, engine in made.items():
                    peaks = gathered(engine.saved.peaks[self.stage])
                    results[name].saved_peak = peaks[: self.job.num_stages]
                measurements += [vars(result) for result in results.values()]
        return {"latencies": latencies, "measurements": measurements}

    def _engine(self, contender: Contender, num_microbatches: int) -> PipelineEngine:
        job, schedule = self.job, contender.schedule(self.job.num_stages)
        times = EmulatedTimes(job.forward / contender.virtual, job.backward / contender.virtual)
        grad = embed = None
        if contender.chain_seconds is not None:
            grad = EmulatedReduction(CHAIN_BYTES, self._grad_group, contender.grad_seconds)
            embed = EmulatedReduction(CHAIN_BYTES, self._embed_group, contender.embed_seconds)
        seconds = dict.fromkeys(("step_seconds", "predict_seconds", "hold_seconds"), contender.update_seconds)
        world = self._world if job.world_size > 1 else None
        num_batches = contender.settling_batches + job.timed_batches(num_microbatches)
        first = self.replica * job.num_stages
        return PipelineEngine(
            schedule, self.stages(schedule, lambda _: times),
            EmulatedUpdate(grad=grad, embed=embed, job_group=world, **seconds),
            ranks=range(first, first + job.num_stages), timeout=TIMEOUT,
            tracer=Tracer(num_batches=num_batches) if contender.traced else None,
        )  # fmt: skip

    def _measure(self, contender: Contender, engine: PipelineEngine, result: Measurement) -> None:
        """Measure one repeat, from a drained pipeline to a drained pipeline."""
        m, settling = result.num_microbatches, contender.settling_batches
        num_batches, before = self.job.timed_batches(m), engine.num_instructions_executed
        first = {"first_batch": engine.next_batch, "first_microbatch": engine.next_microbatch}
        dist.barrier()
        run_batches(engine, [m] * settling)
        settled, start, cpu_start = engine.num_instructions_executed, time.perf_counter(), time.thread_time()
        run_batches(engine, [m] * num_batches)
        seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
        result.instructions = (engine.num_instructions_executed - settled) / num_batches
        engine.drain()
        result.seconds.append(seconds / num_batches)
        result.cpu_seconds.append(cpu_seconds / num_batches)
        program = contender.schedule(self.job.num_stages).build((m,) * (settling + num_batches), **first)
        row = program.rows[self.stage]
        same = engine.num_instructions_executed - before == len(row)
        same = same and (not contender.traced or executed(engine) == list(row))
        result.executed_is_program = result.executed_is_program and all(gathered(same))
