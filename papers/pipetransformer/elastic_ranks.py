"""The processes of `elastic.py`, which run an arm's phases one after another, each with an engine on emulated stages.

In a transition between two phases every rank closes its engine, destroys the groups, sleeps for the time of moving
state, makes new groups and builds its next engine, including the proof of the program. Ranks without a pipeline wait.
If only the cache has been filled, the stages' times become shorter, and there is no transition.
"""

import gc
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks.common.emulated import TIMEOUT, Job, Rank, busy, prove
from benchmarks.common.paced_links import PacedLink
from benchmarks.common.processes import gathered
from megatron.elastic.pipelines import Layers, PipelineOption, schedule_of, work_of_stages
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.runtime.contract.trace import COMPUTE, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import (
    EmulatedReduction,
    EmulatedStage,
    EmulatedTimes,
    EmulatedUpdate,
    sleep_for,
)
from megatron.pipeline.runtime.stages.module.reduction import ModuleReduction
from megatron.pipeline.runtime.stages.module.update import FrozenUpdate
from megatron.pipeline.runtime.transport.links import LINKS, GlooLink
from papers.pipetransformer.elastic_plan import Phase

EMULATED = "gloo, emulated"
"""The name of this benchmark's backend, whose links depend on the phase's layers."""
NUM_TRIALS, NUM_NORMS, NUM_TRACED = 4, 20, 2
COMPUTATIONS = Kind.FORWARD, Kind.BACKWARD
TRANSFERS = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B


@dataclass(frozen=True, kw_only=True)
class ElasticJob(Job):
    """A job that runs arms in turns, or measures the values that the plan needs.

    Attributes:
        arms: name -> phases; each arm runs `repeats` times. If empty, these values are measured: the latency of a
            transfer, all-reduces of few bytes, transitions between the pipelines of `trial` in which nothing moves, and
            the engine's time around a computation.
        trial: the pipelines for these measurements.
        layers: the layers of these pipelines.
    """

    arms: dict[str, tuple[Phase, ...]]
    trial: tuple[PipelineOption, ...] = ()
    layers: Layers | None = None


class TimedStage(EmulatedStage):
    """A stage whose times may change between batches."""

    @property
    def times(self) -> EmulatedTimes:
        return self._times

    def change(self, times: EmulatedTimes) -> None:
        self._times = times


class ElasticRank(Rank):
    """One process of a job, which runs the phases of all arms, or measures the values for the plan."""

    def run(self) -> dict:
        """Measure everything. Returns the results as plain data, of which rank 0's are used."""
        self._engine_now: PipelineEngine | None = None
        self._tracer: Tracer | None = None
        self._phase_now: Phase | None = None
        self._stages_now: list[TimedStage] = []
        self._groups: list = []
        if not self.job.arms:
            return self._calibrate()
        found: dict[str, list[list[dict]]] = {name: [] for name in self.job.arms}
        for _ in range(self.job.repeats):
            for name, phases in self.job.arms.items():
                found[name].append([self._run_phase(each) for each in phases])
                self._change_to(None)
        return {"arms": found}

    def _calibrate(self) -> dict:
        latencies = [each for scope in range(3) for each in self.latencies(f"latency/{scope}")]
        norm, reduction = self._all_reduce(None), self._reduction()
        transitions, around = [], []
        for number in range(NUM_TRIALS + 1):
            pipeline = self.job.trial[number % len(self.job.trial)]
            self._tracer = Tracer(num_batches=NUM_TRACED)
            transitions.append(self._transition(Phase(self.job.layers, pipeline, 0, 1)))
            self._run_batches(pipeline, 1 + NUM_TRACED)
            around.append(self._around())
        self._change_to(None)
        return {
            "latency": statistics.median(latencies) if latencies else 0.0,  # one rank has no links
            "norm": norm, "reduction": reduction, "transition": statistics.median(transitions[1:]),
            "around": statistics.median(around),
        }  # fmt: skip

    def _reduction(self) -> float:
        """Measure the seconds of an all-reduce within each half of the ranks, in both halves at the same time, as for
        replicas of two stages."""
        world = dist.get_world_size()
        halves = [dist.new_group(list(half)) for half in (range(world // 2), range(world // 2, world)) if half]
        (own,) = [each for each in halves if each is not dist.GroupMember.NON_GROUP_MEMBER]
        found = self._all_reduce(own)
        dist.destroy_process_group(own)
        return found

    def _all_reduce(self, group) -> float:
        """Measure the seconds of an all-reduce over ranks that begin it at the same time."""
        sums, samples = torch.zeros(6, dtype=torch.float64), []
        for _ in range(NUM_NORMS):
            meeting = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
            dist.broadcast(meeting, 0)
            sleep_for(meeting.item() - time.monotonic())
            dist.all_reduce(sums, group=group)
            samples.append(max(gathered(time.monotonic() - meeting.item())))
        return statistics.median(samples)

    def _around(self) -> float:
        """The engine's seconds for a computation in addition to the stage's sleep, including the instructions of its
        transfers, as the mean over all ranks."""
        taken, count = 0.0, 0
        if self._engine_now is not None:
            of_stage = {stage.index: stage.times for stage in self._stages_now}
            for span in self._engine_now.trace().spans:
                if span.track != COMPUTE or span.instruction.kind not in (*COMPUTATIONS, *TRANSFERS):
                    continue
                taken += span.end - span.start
                if span.instruction.kind in COMPUTATIONS:
                    times = of_stage[span.instruction.stage]
                    taken -= times.forward if span.instruction.kind is Kind.FORWARD else times.backward
                    count += 1
        everyone = gathered((taken, count))
        return sum(each for each, _ in everyone) / sum(each for _, each in everyone)

    def _run_phase(self, phase: Phase) -> dict:
        """Run a phase. Returns the seconds of each batch except the first, of the whole run with its drain, and of the
        transition before it; and the used share of the cores."""
        seconds = None
        if self._phase_now is not None and _is_same_place(phase.pipeline, self._phase_now.pipeline):
            for stage, times in zip(self._stages_now, self._times(phase), strict=True):
                stage.change(times)
        else:
            seconds = self._transition(phase)
        cpu = time.process_time()
        batches, run = self._run_batches(phase.pipeline, self.job.batches)
        return {
            "transition": seconds if phase.transition else None,
            "batches": batches,
            "run": run,
            "busy": busy(time.process_time() - cpu, run),
        }

    def _run_batches(self, pipeline: PipelineOption, count: int) -> tuple[list[float], float]:
        """Run `count` batches, from a drained state to a drained state.

        Returns the seconds from the end of each batch to the end of the next, on the slowest replica; and the seconds
        of the whole run, drain included.

        The last rank of a pipeline makes the last step of each batch; ranks with only frozen layers run ahead.
        """
        m = pipeline.num_microbatches
        dist.barrier()
        start = time.perf_counter()
        stamps = []
        if self._engine_now is not None:
            for _ in range(count):
                self._engine_now.run_batch(m, m)
                stamps.append(time.perf_counter())
            self._engine_now.drain()
        run = time.perf_counter() - start
        everyone = gathered([later - one for one, later in pairwise(stamps)])
        p = pipeline.num_ranks
        lasts = everyone[p - 1 : p * pipeline.num_replicas : p]
        return [max(each) for each in zip(*lasts, strict=True)], max(gathered(run))

    def _transition(self, phase: Phase) -> float:
        """Change from a drained pipeline to a new one. Returns the slowest rank's seconds."""
        dist.barrier()
        start = time.perf_counter()
        self._change_to(phase)
        dist.barrier()
        return max(gathered(time.perf_counter() - start))

    def _change_to(self, phase: Phase | None) -> None:
        if self._engine_now is not None:
            self._engine_now.close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._engine_now, self._phase_now, self._stages_now, self._groups = None, phase, [], []
        if phase is None:
            dist.barrier()
            return
        sleep_for(phase.moves)
        self._build(phase)
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as in training; otherwise all ranks would collect garbage at the same batch

    def _build(self, phase: Phase) -> None:
        """Make the groups, in the same order on all ranks, and then the engine of a rank that has a pipeline."""
        pipeline, layers = phase.pipeline, phase.layers
        p, d, rank = pipeline.num_ranks, pipeline.num_replicas, dist.get_rank()
        active = p * d
        job = dist.new_group(list(range(active)))
        replicas = [dist.new_group(list(range(place, active, p))) for place in range(p)] if d > 1 else []
        self._groups = [each for each in (job, *replicas) if each is not dist.GroupMember.NON_GROUP_MEMBER]
        if rank >= active:
            return
        schedule, costs = schedule_of(layers, pipeline)
        place = rank % p
        own = schedule.stages_of(place)
        self._stages_now = [
            TimedStage(index=index, num_stages=schedule.num_stages, times=times, payload_bytes=self.job.payload_bytes)
            for index, times in zip(own, self._times(phase), strict=True)
        ]
        num_trained = sum(each.num_trained for each in work_of_stages(layers, pipeline) if each.rank == place)
        if not num_trained:
            update = FrozenUpdate(job_group=job)
        else:
            if schedule.num_frozen:  # ranks with only frozen stages use the group once when they are built
                ModuleReduction(job_group=job, device=torch.device("cpu")).warm_up()
            grad = EmulatedReduction(4, replicas[place], layers.reduce * num_trained) if d > 1 else None
            update = EmulatedUpdate(grad=grad, job_group=job)
        forward, backward, latency = costs.edges(schedule.num_stages - 1)
        paced = partial(PacedLink, forward=forward, backward=backward, latency=latency)
        LINKS[EMULATED, "cpu"] = paced if layers.occupation else GlooLink
        first = rank - place
        self._engine_now = PipelineEngine(
            schedule, self._stages_now, update, ranks=range(first, first + p), timeout=TIMEOUT, backend=EMULATED,
            tracer=self._tracer,
        )  # fmt: skip
        prove(schedule, [pipeline.num_microbatches] * 2)

    def _times(self, phase: Phase) -> list[EmulatedTimes]:
        """The times of this rank's stages in a phase."""
        pipeline, rank = phase.pipeline, dist.get_rank()
        if rank >= pipeline.num_ranks * pipeline.num_replicas:
            return []
        place = rank % pipeline.num_ranks
        stages = work_of_stages(phase.layers, pipeline)
        return [EmulatedTimes(each.forward, each.backward) for each in stages if each.rank == place]


def _is_same_place(one: PipelineOption, other: PipelineOption) -> bool:
    """Whether two pipelines differ only in the content of the cache, and so in the stages' times."""
    unlike = {"num_stored": 0, "seconds": 0.0, "num_bytes": 0.0}
    return replace(one, **unlike) == replace(other, **unlike)
