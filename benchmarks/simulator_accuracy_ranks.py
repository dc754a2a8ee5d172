"""What the processes of `simulator_accuracy.py` run: cases, each traced from a drained state to a drained state."""

import gc
import os
import time
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from emulated_ranks import TIMEOUT, Job, Rank, gathered
from paced_links import PacedLink, PacedMoveLink

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.runtime.activations.activation_memory import ActivationMemory
from megatron.pipeline.runtime.contract.trace import Tracer, gather_traces, timeline
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated.stage import (
    EmulatedReduction,
    EmulatedStage,
    EmulatedTimes,
    EmulatedUpdate,
)
from megatron.pipeline.runtime.transport.links import LINKS, GlooLink
from megatron.pipeline.runtime.transport.move_links import MOVE_LINKS
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs

EMULATED = "gloo, emulated"
"""A backend of this benchmark: a case says what its links are."""
_ACTIVATION_BYTES = 1 << 12

# Shares of the mean, in turn over the stages or edges.
_FORWARD, _BACKWARD = (0.8, 1.1, 0.9, 1.3, 1.0), (1.1, 0.8, 1.3, 0.9)
_OCCUPATION, _LATENCY = (0.3, 0.6, 0.1), (0.2, 0.1, 0.3)  # of a stage's forward


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule with its costs. `forward`: seconds of a rank's mean forward; a backward takes twice as long.

    `uneven`: stages differ. `slow`: links take time, by edge; otherwise they are the loopback device.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    num_batches: int
    forward: float
    num_virtual_stages: int = 1
    recompute: bool = False
    balance: bool = False
    uneven: bool = False
    slow: bool = False

    @property
    def name(self) -> str:
        """`2bw, balance, uneven, slow links`, without p and m."""
        words = [self.schedule]
        words += [word for word in ("recompute", "balance") if getattr(self, word)]
        return ", ".join([*words, "uneven" if self.uneven else "even", "slow links" if self.slow else "fast links"])

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_virtual_stages

    @property
    def batches(self) -> tuple[int, ...]:
        return (self.num_microbatches,) * self.num_batches

    def build_schedule(self) -> Schedule:
        return Schedule.preset(
            self.schedule, num_stages=self.num_stages, num_virtual_stages=self.num_virtual_stages,
            recompute=self.recompute, balance=self.balance, data_parallel=True,
            tied_embeddings=self.schedule != "pipedream",
        )  # fmt: skip

    def costs(self, latency: float) -> Costs:
        """What the stages and links are told to take, and the simulator with them; `latency`: of fast links."""
        forward = self.forward / self.num_virtual_stages
        shares = [(_in_turn(each, self.num_stages) if self.uneven else 1.0) for each in (_FORWARD, _BACKWARD)]
        forwards, backwards = (_times(mean, share) for mean, share in zip((forward, 2 * forward), shares, strict=True))
        links = {"latency": latency}
        if self.slow:
            occupation, late = (
                _times(forward, _in_turn(each, self.num_stages - 1)) for each in (_OCCUPATION, _LATENCY)
            )
            links = {"latency": late, "forward_bytes": occupation, "bandwidth": 1.0}
        return Costs(
            forward=forwards, backward=backwards, step=0.25 * forward, evict=0.5 * forward,
            reduce_grad=0.5 * forward, reduce_embed=0.25 * forward, **links,
        )  # fmt: skip


def _in_turn(shares: tuple[float, ...], count: int) -> list[float]:
    return [shares[index % len(shares)] for index in range(count)]


def _times(seconds: float, shares: list[float] | float) -> list[float] | float:
    return [seconds * share for share in shares] if isinstance(shares, list) else seconds * shares


@dataclass(frozen=True, kw_only=True)
class AccuracyJob(Job):
    """`cases` in their order, each `repeats` times."""

    cases: tuple[Case, ...]


class AccuracyRank(Rank):
    """One process of a job."""

    def __init__(self, job: AccuracyJob) -> None:
        super().__init__(job)
        self._ends = dist.new_group([0, job.num_stages - 1])

    def run(self) -> dict:
        """Measure everything; on rank 0 the timelines as plain data."""
        runs, latencies = [], []
        for number, case in enumerate(self.job.cases):
            latencies += self._latencies(f"latency/{number}")
            engine = self._engine(case)
            self._run_batches(engine, case, 1 if case.num_microbatches > 1 else case.num_ranks)  # connections, memory
            for _ in range(self.job.repeats):
                runs.append({"case": number, **self._measure(engine, case)})
            dist.barrier()
            engine.close()
        return {"latencies": latencies, "runs": runs}

    def _engine(self, case: Case) -> PipelineEngine:
        costs, job = case.costs(0.0), self.job
        forward, backward, latency = costs.edges(case.num_stages - 1)
        paced = partial(PacedLink, forward=forward, backward=backward, latency=latency)
        LINKS[EMULATED, "cpu"] = paced if case.slow else GlooLink
        seconds, schedule = costs.seconds(case.num_stages), case.build_schedule()
        MOVE_LINKS[EMULATED, "cpu"] = partial(PacedMoveLink, seconds=seconds[Kind.EVICT][0])
        memory = ActivationMemory() if schedule.balance else None
        own = [stage for stage, rank in enumerate(schedule.rank_of_stage) if rank == self.stage]
        stages = [
            EmulatedStage(
                index=stage,
                num_stages=case.num_stages,
                times=EmulatedTimes(*(seconds[kind][stage] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE))),
                payload_bytes=job.payload_bytes,
                activation_bytes=_ACTIVATION_BYTES,
                activation_memory=memory,
            )
            for stage in own
        ]
        of_rank = {kind: sum(seconds[kind][stage] for stage in own) for kind in (Kind.STEP, Kind.REDUCE_GRAD)}
        update = EmulatedUpdate(
            grad=EmulatedReduction(seconds=of_rank[Kind.REDUCE_GRAD]),
            embed=EmulatedReduction(4, self._ends, costs.reduce_embed),
            job_group=self._world,
            step_seconds=of_rank[Kind.STEP],
        )
        return PipelineEngine(
            schedule, stages, update, timeout=TIMEOUT, backend=EMULATED, tracer=Tracer(num_batches=case.num_batches),
            activation_memory=memory,
        )  # fmt: skip

    def _measure(self, engine: PipelineEngine, case: Case) -> dict:
        """The measured timeline, and how busy the cores were."""
        first = {"first_batch": engine.next_batch, "first_microbatch": engine.next_microbatch}
        stream = case.build_schedule().stream(**first)  # all programs are proved outside of the clock, and kept
        for num_microbatches in case.batches:
            stream.start_batch(num_microbatches)
        stream.drain()
        gc.collect()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self._run_batches(engine, case, case.num_batches)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        busy = sum(gathered(cpu)) / seconds / len(os.sched_getaffinity(0))
        traces = gather_traces(engine.trace())
        return {} if traces is None else {"busy": busy, "measured": timeline(traces).to_dict(), **first}

    def _run_batches(self, engine: PipelineEngine, case: Case, count: int) -> None:
        for _ in range(count):
            engine.run_batch(case.num_microbatches, case.num_microbatches)
        engine.drain()
