"""The cost of moving saved activations: `bpipe` beside `flush` on stages that sleep instead of computing.

    python -m papers.bpipe.balance_cost                          # 10 pairs at m = 8 to 128: about 27 minutes
    python -m papers.bpipe.balance_cost --microbatches 8 32      # a short form: about 6 minutes
    python -m papers.bpipe.balance_cost --microbatches 8 32 --pairs 3 --scopes none
    python -m papers.bpipe.balance_cost --smoke                  # a few seconds; only a test that everything runs

Problem: BPipe (section 4.4, Figure 9) pays little for its moves because they run at the same time as forwards and
backwards. A computer with two cores cannot compute on eight stages, so it cannot show this overlap.

Solution: emulated stages sleep for the paper's times of GPT-3 13B on 8 stages (Table 4, milliseconds per microbatch),

    recompute scope    transfer   forward   backward
    none                  22.48     36.32      74.12
    attention              7.63     36.32      83.57

while engine, queues, transfers between stages (1 MiB) and moves (4 MiB) are real, between real processes. A move holds
the pair's connection for the table's time: it sends its bytes at the beginning and sleeps for the rest, since sending
for the whole time would keep the two cores busy. `busy` is the share of all cores' time that all processes used
together. If it is above 25%, the cores are too busy for the figures to show the schedule, so stretch the times
(`--stretch 2`).

The contenders take turns of one batch, `flush` and `bpipe` in an order that alternates; two such turns are a pair.
"added" is the additional time of `bpipe` over the `flush` of its pair: the median over the pairs, with least and
greatest. "synchronous" is `bpipe` with evictors whose computations wait for each of their moves; it runs with the first
`--synchronous-pairs` pairs. A turn lasts from the first rank's start to the last rank's end. "predicted" is
`megatron.pipeline.simulate` of the same programs with the table's times and no measured value; it is printed before the
processes start. Every rank compares the executed instructions with the program; a difference makes the exit status 1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.common.emulated import TIMEOUT, Job, Rank, busy, engines, executed, run_batches, run_job
from benchmarks.common.paced_links import PacedMoveLink
from benchmarks.common.processes import gathered
from benchmarks.common.results import parser_of, save, set_environment, status_of
from benchmarks.common.tables import Row, show_table, spread
from megatron.pipeline.program.instruction import COMPUTATIONS, OWN_MOVES, Instruction
from megatron.pipeline.program.lane_order import MoveOrder
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedTimes, EmulatedUpdate
from megatron.pipeline.runtime.transport.links import LINKS, GlooLink
from megatron.pipeline.runtime.transport.move_links import MOVE_LINKS
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate

PACED = "gloo, paced"
"""The name of this benchmark's backend: `PacedMoveLink` between pairs, gloo between other ranks."""


class SynchronousMoves(MoveOrder):
    """The order of moves in which an evictor's computations wait for every earlier EVICT and LOAD."""

    _num_to_own = 0  # number of moves up to the last EVICT or LOAD

    def awaited(self, instruction: Instruction) -> int:
        needed = super().awaited(instruction)
        if instruction.kind in OWN_MOVES:
            self._num_to_own = self._num_moves
        return self._num_to_own if instruction.kind in COMPUTATIONS else needed


@dataclass(frozen=True)
class Contender:
    """A schedule to compare. `moves`: the order of moves, which replaces the one of engine and simulator."""

    name: str
    preset: str
    moves: type[MoveOrder] = MoveOrder

    def schedule(self, num_stages: int) -> Schedule:
        return Schedule.preset(self.preset, num_stages=num_stages)


WITHOUT = Contender("without", "flush")
ASYNCHRONOUS = Contender("asynchronous", "bpipe")
SYNCHRONOUS = Contender("synchronous", "bpipe", SynchronousMoves)
CONTENDERS = (WITHOUT, ASYNCHRONOUS, SYNCHRONOUS)


@dataclass(frozen=True, kw_only=True)
class BalanceJob(Job):
    """A job in which each repeat is a pair of turns.

    Attributes:
        microbatches: the numbers of microbatches of a batch.
        forward, backward: seconds of a stage.
        transfer: seconds for which a move of `activation_bytes` holds its connection.
        synchronous_repeats: number of first repeats that have a turn with synchronous moves, too.
    """

    microbatches: tuple[int, ...]
    forward: float
    backward: float
    transfer: float
    activation_bytes: int
    synchronous_repeats: int


@dataclass
class Turns:
    """The results of one contender at one number of microbatches, with an entry for each turn.

    `busy`: share of all cores' time that all processes used.
    """

    contender: str
    num_microbatches: int
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    saved_peak: list[int] = field(default_factory=list)
    executed_is_program: bool = True


class BalanceRank(Rank):
    """One process of a job, which measures the turns of all contenders."""

    def run(self) -> dict:
        """Measure everything. Returns the same result on all ranks."""
        LINKS[PACED, "cpu"] = GlooLink
        MOVE_LINKS[PACED, "cpu"] = partial(PacedMoveLink, seconds=self.job.transfer)
        found = []
        for m in self.job.microbatches:
            with engines(CONTENDERS, self._engine) as made:
                turns = {each.name: Turns(each.name, m) for each in CONTENDERS}
                for each in CONTENDERS:  # connections and memory
                    self._turn(each, made[each.name], Turns(each.name, self.job.num_stages))
                for repeat in range(self.job.repeats):
                    order = [WITHOUT, ASYNCHRONOUS] if repeat % 2 == 0 else [ASYNCHRONOUS, WITHOUT]
                    for each in order + [SYNCHRONOUS] * (repeat < self.job.synchronous_repeats):
                        self._turn(each, made[each.name], turns[each.name])
                for name, engine in made.items():
                    turns[name].saved_peak = gathered(engine.saved.peaks[self.stage])
                found += [vars(each) for each in turns.values() if each.seconds]
        return {"turns": found}

    def _engine(self, contender: Contender) -> PipelineEngine:
        job, schedule = self.job, contender.schedule(self.job.num_stages)
        memory, times = ActivationMemory() if schedule.balance else None, EmulatedTimes(job.forward, job.backward)
        stages = self.stages(schedule, lambda _: times, activation_bytes=job.activation_bytes, activation_memory=memory)
        with patch("megatron.pipeline.runtime.engine.MoveOrder", contender.moves):
            return PipelineEngine(
                schedule, stages, EmulatedUpdate(job_group=self._world), timeout=TIMEOUT, backend=PACED,
                tracer=Tracer(num_batches=1), activation_memory=memory,
            )  # fmt: skip

    def _turn(self, contender: Contender, engine: PipelineEngine, turns: Turns) -> None:
        """Run and time one batch, from a drained pipeline to a drained pipeline."""
        m, schedule = turns.num_microbatches, contender.schedule(self.job.num_stages)
        first = {"first_batch": engine.next_batch, "first_microbatch": engine.next_microbatch}
        schedule.stream(first_batch=1).start_batch(m)  # proved outside of the clock
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        run_batches(engine, [m])
        engine.drain()
        end, cpu = time.perf_counter(), time.process_time() - cpu
        starts, ends = zip(*gathered((start, end)), strict=True)  # all processes of a computer read one clock
        turns.seconds.append(max(ends) - min(starts))
        turns.busy.append(busy(cpu, turns.seconds[-1]))
        row = schedule.build((m,), **first).rows[self.stage]
        turns.executed_is_program &= all(gathered(executed(engine) == list(row)))


def predicted_seconds(job: BalanceJob, contender: Contender, num_microbatches: int) -> float:
    """The simulated seconds of a batch."""
    program = contender.schedule(job.num_stages).build((num_microbatches,))
    costs = Costs(forward=job.forward, backward=job.backward, evict=job.transfer)
    with patch("megatron.pipeline.program.lane_order.MoveOrder", contender.moves):
        return simulate(program, costs).makespan


def predicted_rows(scope: str, job: BalanceJob) -> list[Row]:
    rows = []
    for m in job.microbatches:
        seconds = {each.name: predicted_seconds(job, each, m) for each in CONTENDERS}
        rows += [
            {
                "scope": scope, "stages": job.num_stages, "microbatches": m, "contender": name,
                "transfer_over_forward": job.transfer / job.forward, "predicted": predicted,
                "predicted_added": predicted / seconds[WITHOUT.name] - 1,
            }
            for name, predicted in seconds.items()
        ]  # fmt: skip
    return rows


def rows_of(predicted: list[Row], result: dict) -> list[Row]:
    """The rows of predictions, with the measurements added."""
    turns = {(each["num_microbatches"], each["contender"]): each for each in result["turns"]}
    rows = []
    for row in predicted:
        found = turns.get((row["microbatches"], row["contender"]))
        if found is None:
            continue
        reference = turns[row["microbatches"], WITHOUT.name]["seconds"]
        added = [own / other - 1 for own, other in zip(found["seconds"], reference, strict=False)]
        rows.append(row | {
            "measured": found["seconds"], "reference": reference[: len(added)], "added": added,
            "apart": statistics.median(added) - row["predicted_added"], "busy": statistics.median(found["busy"]),
            "saved": found["saved_peak"], "executed_is_program": found["executed_is_program"],
        })  # fmt: skip
    return rows


def is_reference(row: Row) -> bool:
    return row["contender"] == WITHOUT.name


PREDICTED = {
    "scope": lambda row: row["scope"],
    "transfer/f": lambda row: f"{row['transfer_over_forward']:.2f}",
    "p": lambda row: str(row["stages"]),
    "m": lambda row: str(row["microbatches"]),
    "": lambda row: row["contender"],
    "predicted ms": lambda row: f"{1e3 * row['predicted']:.0f}",
    "predicted %": lambda row: "" if is_reference(row) else f"{100 * row['predicted_added']:.2f}",
}
COLUMNS = PREDICTED | {
    "ms a batch": lambda row: spread([1e3 * seconds for seconds in row["measured"]], 0),
    "added %": lambda row: "" if is_reference(row) else spread([100 * each for each in row["added"]], 2),
    "points apart": lambda row: "" if is_reference(row) else f"{100 * row['apart']:.2f}",
    "busy %": lambda row: f"{100 * row['busy']:.0f}",
    "saved microbatches": lambda row: " ".join(map(str, row["saved"])),
}


TIMES = {"none": (0.02248, 0.03632, 0.07412), "attention": (0.00763, 0.03632, 0.08357)}
"""Recompute scope -> seconds of a transfer, a forward and a backward (BPipe, Table 4)."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("--stages", type=int, default=8, help="p, 4 to 16")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="m")
    parser.add_argument("--scopes", nargs="+", choices=list(TIMES), default=list(TIMES))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--synchronous-pairs", type=int, default=3, help="pairs with synchronous moves beside; 0: none")
    parser.add_argument("--stretch", type=float, default=1.0, help="all times are the table's times this")
    parser.add_argument("--payload", type=int, default=1 << 20, help="bytes between stages")
    parser.add_argument("--activations", type=int, default=1 << 22, help="bytes of a move")
    parser.add_argument("--smoke", action="store_true", help="4 stages, 8 microbatches, 2 pairs, small times and bytes")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.stages, args.microbatches, args.pairs, args.synchronous_pairs = 4, [8], 2, 1
        args.stretch, args.payload, args.activations = 0.1, 1 << 12, 1 << 14
    if not 4 <= args.stages <= 16:
        parser.error(f"--stages is {args.stages}; give 4 to 16, with fewer there is nothing to balance")
    if min(args.microbatches) < args.stages:
        parser.error(f"--microbatches is {args.microbatches}; give at least p each, so that the pipeline is full")
    if args.pairs < 1 or not 0 <= args.synchronous_pairs <= args.pairs:
        parser.error("--pairs: at least 1; --synchronous-pairs: 0 to as many")
    if args.stretch <= 0 or args.payload < 4 or args.activations < 8:
        parser.error("--stretch: more than 0; --payload: at least 4; --activations: at least 8")
    return args


def job_of(scope: str, args: argparse.Namespace) -> BalanceJob:
    transfer, forward, backward = (args.stretch * seconds for seconds in TIMES[scope])
    return BalanceJob(
        num_stages=args.stages, microbatches=tuple(args.microbatches), forward=forward, backward=backward,
        transfer=transfer, payload_bytes=args.payload, activation_bytes=args.activations, repeats=args.pairs,
        synchronous_repeats=args.synchronous_pairs,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    set_environment()
    plan = {scope: job_of(scope, args) for scope in args.scopes}
    predicted = {scope: predicted_rows(scope, job) for scope, job in plan.items()}
    left = ("", "scope")
    show_table("predicted by the simulator", PREDICTED, [row for rows in predicted.values() for row in rows], left=left)
    rows = []
    for number, (scope, job) in enumerate(plan.items(), 1):
        print(f"{number} of {len(plan)}: scope {scope}, {job.world_size} processes", file=sys.stderr, flush=True)
        rows += rows_of(predicted[scope], run_job(job, BalanceRank))
    show_table("what moving saved activations adds to flush", COLUMNS, rows, left=left)
    save(args, rows)
    return status_of(rows, lambda row: f"{row['contender']}, m={row['microbatches']}")


if __name__ == "__main__":
    sys.exit(main())
