"""What the processes of `balance_cost.py` run: `flush` and `bpipe` in turns, on emulated stages and paced links."""

import os
import time
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch.distributed as dist
from emulated_ranks import TIMEOUT, Contender, Job, Rank, gathered
from paced_links import PacedMoveLink

from megatron.pipeline.program.instruction import COMPUTATIONS, OWN_MOVES, Instruction
from megatron.pipeline.program.move_order import MoveOrder
from megatron.pipeline.runtime.activations.activation_memory import ActivationMemory
from megatron.pipeline.runtime.contract.trace import COMPUTE, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated.stage import EmulatedStage, EmulatedTimes, EmulatedUpdate
from megatron.pipeline.runtime.transport.links import LINKS, GlooLink
from megatron.pipeline.runtime.transport.move_links import MOVE_LINKS

PACED = "gloo, paced"
"""A backend of this benchmark: `PacedMoveLink` between pairs, gloo elsewhere."""


class SynchronousMoves(MoveOrder):
    """Computations of the evictor wait for every EVICT and LOAD before them."""

    _num_to_own = 0  # moves up to and with the last of these

    def awaited(self, instruction: Instruction) -> int:
        needed = super().awaited(instruction)
        if instruction.kind in OWN_MOVES:
            self._num_to_own = self._num_moves
        return self._num_to_own if instruction.kind in COMPUTATIONS else needed


@dataclass(frozen=True, kw_only=True)
class BalanceContender(Contender):
    """`moves`: what waits for which; engine and simulator are given it in the place of their own."""

    moves: type[MoveOrder] = MoveOrder


WITHOUT = BalanceContender(name="without", preset="flush")
ASYNCHRONOUS = BalanceContender(name="asynchronous", preset="bpipe")
SYNCHRONOUS = BalanceContender(name="synchronous", preset="bpipe", moves=SynchronousMoves)
CONTENDERS = (WITHOUT, ASYNCHRONOUS, SYNCHRONOUS)


@dataclass(frozen=True, kw_only=True)
class BalanceJob(Job):
    """`transfer`: seconds that a move of `activation_bytes` holds its connection. Each repeat is a pair; the first
    `synchronous_repeats` have a turn with synchronous moves, too.
    """

    transfer: float
    activation_bytes: int
    synchronous_repeats: int


@dataclass
class Turns:
    """One contender's times at one m; one entry a turn. `busy`: share of all cores' time that all processes took."""

    contender: str
    num_microbatches: int
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    saved_peak: list[int] = field(default_factory=list)
    executed_is_program: bool = True


class BalanceRank(Rank):
    """One process of a job."""

    def run(self) -> dict:
        """Measure everything; the same result on all ranks, as plain data."""
        LINKS[PACED, "cpu"] = GlooLink
        MOVE_LINKS[PACED, "cpu"] = partial(PacedMoveLink, seconds=self.job.transfer)
        found = []
        for num_microbatches, contenders in self.job.entries.items():
            with self._engines(contenders, num_microbatches) as engines:
                turns = {each.name: Turns(each.name, num_microbatches) for each in contenders}
                for each in contenders:  # connections and memory
                    self._turn(each, engines[each.name], Turns(each.name, self.job.num_stages))
                for repeat in range(self.job.repeats):
                    order = [WITHOUT, ASYNCHRONOUS] if repeat % 2 == 0 else [ASYNCHRONOUS, WITHOUT]
                    order += [SYNCHRONOUS] * (repeat < self.job.synchronous_repeats)
                    for each in order:
                        self._turn(each, engines[each.name], turns[each.name])
                for name, engine in engines.items():
                    turns[name].saved_peak = gathered(engine.saved_microbatches_peak[self.stage])
                found += [vars(each) for each in turns.values() if each.seconds]
        return {"turns": found}

    def _engine(self, contender: BalanceContender, num_microbatches: int) -> PipelineEngine:
        job = self.job
        memory = ActivationMemory() if contender.preset == "bpipe" else None
        stage = EmulatedStage(
            index=self.stage,
            num_stages=job.num_stages,
            times=EmulatedTimes(job.forward, job.backward),
            payload_bytes=job.payload_bytes,
            activation_bytes=job.activation_bytes,
            activation_memory=memory,
        )
        with patch("megatron.pipeline.runtime.engine.MoveOrder", contender.moves):
            return PipelineEngine(
                contender.schedule(job.num_stages),
                stage,
                EmulatedUpdate(job_group=self._world),
                timeout=TIMEOUT,
                backend=PACED,
                tracer=Tracer(num_batches=1),
                activation_memory=memory,
            )

    def _turn(self, contender: BalanceContender, engine: PipelineEngine, turns: Turns) -> None:
        """One batch, from a drained pipeline to a drained pipeline."""
        m, first_batch, first_microbatch = turns.num_microbatches, engine.next_batch, engine.next_microbatch
        contender.schedule(self.job.num_stages).stream(first_batch=1).start_batch(m)  # proved outside of the clock
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        engine.run_batch(m, m)
        engine.drain()
        end, cpu = time.perf_counter(), time.process_time() - cpu
        starts, ends, cpus = zip(*gathered((start, end, cpu)), strict=True)  # one clock for all on a computer
        seconds = max(ends) - min(starts)
        turns.seconds.append(seconds)
        turns.busy.append(sum(cpus) / seconds / len(os.sched_getaffinity(0)))
        program = contender.schedule(self.job.num_stages).build(
            (m,), first_batch=first_batch, first_microbatch=first_microbatch
        )
        executed = [span.instruction for span in engine.trace().spans if span.track == COMPUTE]
        turns.executed_is_program &= all(gathered(executed == list(program.rows[self.stage])))
