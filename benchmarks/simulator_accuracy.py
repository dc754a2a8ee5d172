"""The simulator's errors against real runs: every schedule, even and uneven stages, fast and slow links.

    python benchmarks/simulator_accuracy.py                              # 80 cases, p = 4 and 8: about 22 minutes
    python benchmarks/simulator_accuracy.py --stages 4 --only 2bw bpipe  # some of them
    python benchmarks/simulator_accuracy.py --pictures DIR               # and each pair of timelines as a picture

The executor runs each schedule on stages that sleep (a rank's mean forward is 40 ms, its backward 80), with a step,
reductions, and moves of saved activations, between real processes. Uneven stages take 0.8 to 1.3 times as long, in
different orders for forwards and backwards. Slow links are occupied for 0.1 to 0.6 forwards by a tensor and deliver it
0.1 to 0.3 forwards later, by edge (`common/paced_links.py`). Fast links are the loopback device, whose latency is
measured between the runs. The simulator gets the same times and this latency, and no other measured value.

The table has for each case the seconds per batch in the steady state, and of the whole run from a drained state to a
drained state, by the same functions of both timelines; the error is simulated over measured, less one. `busy` is the
share of all cores' time that all processes used. If it is above 25%, the cores are too busy for the figures to show the
simulator's errors, so stretch the times (`--stretch 2`). The executed instructions must be those of the simulated
program, in the same order; a difference makes the exit status 1.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from rich.table import Table

from benchmarks.common.emulated import TIMEOUT, Job, Rank, run_batches, run_job, times_of, words_of
from benchmarks.common.paced_links import PacedLink, PacedMoveLink
from benchmarks.common.results import parser_of, save, set_environment, status_of
from benchmarks.common.tables import terminal
from megatron.pipeline.draw import draw_timeline
from megatron.pipeline.program.edges import v
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import (
    EmulatedReduction,
    EmulatedUpdate,
)
from megatron.pipeline.runtime.transport.links import LINKS, GlooLink
from megatron.pipeline.runtime.transport.move_links import MOVE_LINKS
from megatron.pipeline.schedules import PipelineSchedule, ProgramSchedule, Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.timeline import Timeline
from megatron.pipeline.survivors import ReplicaRank, without
from megatron.pipeline.synthesis import Problem, synthesize, synthesize_steady

EMULATED = "gloo, emulated"
"""The name of this benchmark's backend, whose links are registered for each case."""
_ACTIVATION_BYTES = 1 << 12
SYNTHESIZED = {"synthesized": "flush", "synthesized-2bw": "2bw"}
"""Names of programs that are made for their costs, with their weights."""
WITHOUT = "without"
"""The name of programs of the ranks that are left when others are lost."""
_ROUNDS = 6  # of the search for a synthesized program

# Shares of the mean, in turn over the stages or edges.
_FORWARD, _BACKWARD = (0.8, 1.1, 0.9, 1.3, 1.0), (1.1, 0.8, 1.3, 0.9)
_OCCUPATION, _LATENCY = (0.3, 0.6, 0.1), (0.2, 0.1, 0.3)  # of a stage's forward


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule with its costs.

    Attributes:
        forward: seconds of a rank's mean forward; a backward takes twice as long.
        uneven: whether stages take different times.
        slow: whether links take time, by edge; otherwise they are the loopback device.
        program: the text of a program in place of the preset `schedule`.
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
    program: str = ""

    @property
    def name(self) -> str:
        """The case without p and m as text, such as `2bw, balance, uneven, slow links`."""
        words = [self.schedule]
        words += [word for word in ("recompute", "balance") if getattr(self, word)]
        return ", ".join([*words, "uneven" if self.uneven else "even", "slow links" if self.slow else "fast links"])

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_virtual_stages

    @property
    def batches(self) -> tuple[int, ...]:
        return (self.num_microbatches,) * self.num_batches

    def build_schedule(self) -> PipelineSchedule:
        if self.program:
            return ProgramSchedule.of(Program.from_csv(self.program), name=self.schedule)
        return Schedule.preset(
            self.schedule, num_stages=self.num_stages, num_virtual_stages=self.num_virtual_stages,
            recompute=self.recompute, balance=self.balance, data_parallel=True,
            tied_embeddings=self.schedule != "pipedream",
        )  # fmt: skip

    def costs(self, latency: float) -> Costs:
        """The costs of the emulated stages and links, and of the simulation. `latency`: seconds of fast links."""
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


def synthesized(case: Case) -> Case:
    """Return the case with the program that is made for its costs and three quarters of the memory of 1F1B.

    Under 2bw it is one with little memory at the rate of the busiest rank.
    """
    problem = Problem(
        rank_of_stage=v(case.num_ranks, case.num_virtual_stages), num_microbatches=case.num_microbatches,
        costs=case.costs(0.0), saved=1 / case.num_virtual_stages, limits=0.75 * case.num_ranks,
    )  # fmt: skip
    if SYNTHESIZED[case.schedule] == "2bw":
        made = Program.from_csv(synthesize_steady(problem, rounds=_ROUNDS).csv)
    else:
        made = problem.program(synthesize(problem, rounds=_ROUNDS).words)
    return replace(case, program=replace(made, data_parallel=True).to_csv())


def without_ranks(case: Case) -> Case:
    """Return the case with the program of a pipeline of two ranks under flush that has lost one or two ranks.

    It has as many replicas as leave the case's number of ranks. Copies of a stage may take different times.
    """
    num_replicas = (case.num_ranks + 2) // 2
    lost = [ReplicaRank(0, 1), ReplicaRank(1, 0)][: 2 * num_replicas - case.num_ranks]
    size = case.num_microbatches // 2
    schedule = Schedule.preset("flush", num_stages=2, data_parallel=True)
    program = without(schedule, size, num_replicas=num_replicas, lost=lost).schedule.program
    return replace(case, num_microbatches=size * num_replicas, program=program.to_csv())


def _in_turn(shares: tuple[float, ...], count: int) -> list[float]:
    return [shares[index % len(shares)] for index in range(count)]


def _times(seconds: float, shares: list[float] | float) -> list[float] | float:
    return [seconds * share for share in shares] if isinstance(shares, list) else seconds * shares


@dataclass(frozen=True, kw_only=True)
class AccuracyJob(Job):
    """A job that runs `cases` in their order, each `repeats` times."""

    cases: tuple[Case, ...]


class AccuracyRank(Rank):
    """One process of a job, which runs all cases and traces them."""

    def __init__(self, job: AccuracyJob) -> None:
        super().__init__(job)
        self._ends = dist.new_group([0, job.num_stages - 1])

    def run(self) -> dict:
        """Measure everything. Returns on rank 0 the latencies, and the timelines as plain data."""
        runs, latencies = [], []
        for number, case in enumerate(self.job.cases):
            latencies += self.latencies(f"latency/{number}")
            engine = self._engine(case)
            run_batches(
                engine, case.batches[: 1 if case.num_microbatches > 1 else case.num_ranks]
            )  # connections, memory
            engine.drain()
            for _ in range(self.job.repeats):
                runs.append({"case": number, **self.traced_run(engine, case.build_schedule(), case.batches)})
            dist.barrier()
            engine.close()
        return {"latencies": latencies, "runs": runs}

    def _engine(self, case: Case) -> PipelineEngine:
        costs, schedule = case.costs(0.0), case.build_schedule()
        forward, backward, latency = costs.edges(case.num_stages - 1)
        paced = partial(PacedLink, forward=forward, backward=backward, latency=latency)
        LINKS[EMULATED, "cpu"] = paced if case.slow else GlooLink
        seconds = costs.seconds(case.num_stages)
        MOVE_LINKS[EMULATED, "cpu"] = partial(PacedMoveLink, seconds=seconds[Kind.EVICT][0])
        memory = ActivationMemory() if schedule.balance else None
        stages = self.stages(schedule, times_of(seconds), activation_bytes=_ACTIVATION_BYTES, activation_memory=memory)
        step, grad = (
            sum(seconds[kind][stage] for stage in schedule.stages_of(self.stage))
            for kind in (Kind.STEP, Kind.REDUCE_GRAD)
        )
        update = EmulatedUpdate(
            grad=EmulatedReduction(seconds=grad), embed=EmulatedReduction(4, self._ends, costs.reduce_embed),
            job_group=self._world, step_seconds=step,
        )  # fmt: skip
        return PipelineEngine(
            schedule, stages, update, timeout=TIMEOUT, backend=EMULATED, tracer=Tracer(num_batches=case.num_batches),
            activation_memory=memory,
        )  # fmt: skip


SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "flush": {"schedule": "flush"},
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "interleaved": {"schedule": "interleaved", "num_virtual_stages": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h2": {"schedule": "zb-h2"},
    "interleaved-zb": {"schedule": "interleaved-zb", "num_virtual_stages": 2},
    "zbv": {"schedule": "zbv", "num_virtual_stages": 2},
    "v-half": {"schedule": "v-half", "num_virtual_stages": 2},
    "v-min": {"schedule": "v-min", "num_virtual_stages": 2},
    "bpipe": {"schedule": "bpipe"},
    "2bw-balanced": {"schedule": "2bw", "balance": True},
    "interleaved-balanced": {"schedule": "interleaved", "num_virtual_stages": 2, "balance": True},
    "2bw-recompute": {"schedule": "2bw", "recompute": True},
    **{name: {"schedule": name, "num_virtual_stages": 2} for name in SYNTHESIZED},
    WITHOUT: {"schedule": WITHOUT},
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for the figures")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="ranks p, 4 to 16")
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, help="default: all; --smoke: interleaved-balanced")
    parser.add_argument("--batches", type=int, default=4, help="of 2p microbatches; pipedream: times 2p, of one")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--forward", type=float, default=40.0, help="ms")
    parser.add_argument("--stretch", type=float, default=1.0, help="all times are those told above times this")
    parser.add_argument("--payload", type=int, default=1 << 16, help="bytes between stages")
    parser.add_argument(
        "--smoke", action="store_true", help="two cases with small times, seconds: that everything runs"
    )
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="folder for pictures, and timelines as JSON")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.stages, args.batches, args.forward = [4], 3, 4.0
        args.only = args.only or ["interleaved-balanced"]
    args.only = args.only or list(SCHEDULES)
    if not all(4 <= p <= 16 for p in args.stages):
        parser.error(f"--stages is {args.stages}; give 4 to 16, with fewer there is nothing to balance")
    if args.batches < 3 or args.repeats < 1:
        parser.error("--batches: at least 3, else nothing is steady; --repeats: at least 1")
    if min(args.forward, args.stretch) <= 0 or args.payload < 4:
        parser.error("--forward, --stretch: more than 0; --payload: at least 4")
    return args


def cases(args: argparse.Namespace, num_ranks: int) -> tuple:
    """Every schedule with even and uneven stages, on fast and slow links; with --smoke only uneven and slow."""

    made = []
    for name, uneven, slow in product(args.only, (False, True), (False, True)):
        if (slow and name == WITHOUT) or (args.smoke and not (uneven and (slow or name == WITHOUT))):
            continue  # the links of copies are not paced
        m, count = (1, 2 * num_ranks * args.batches) if name == "pipedream" else (2 * num_ranks, args.batches)
        case = Case(
            num_ranks=num_ranks, num_microbatches=m, num_batches=count, forward=args.forward * args.stretch / 1e3,
            uneven=uneven, slow=slow, **SCHEDULES[name],
        )  # fmt: skip
        programs = {WITHOUT: without_ranks} | dict.fromkeys(SYNTHESIZED, synthesized)
        made.append(programs.get(name, lambda case: case)(case))
    return tuple(made)


def rows_of(job, result: dict, pictures: Path | None) -> list[dict]:
    """A row for each run, with simulated and measured times."""
    latency, rows = statistics.median(result["latencies"]), []
    for index, run in enumerate(result["runs"]):
        case, measured = job.cases[run["case"]], Timeline.from_dict(run["measured"])
        first = {name: run[name] for name in ("first_batch", "first_microbatch")}
        simulated = simulate(case.build_schedule().build(case.batches, **first), case.costs(latency))
        if pictures is not None:
            name = f"p{case.num_ranks} {case.name}".replace(",", "").replace(" ", "_")
            draw(case, simulated, measured, pictures / f"{name}_{index % job.repeats}")
        pairs = {
            "batch": (simulated.steady_time_per_batch(), measured.steady_time_per_batch()),
            "run": (simulated.makespan, measured.makespan),
        }
        row = {
            "p": case.num_ranks, "m": case.num_microbatches, "case": case.name,
            "executed_is_program": words_of(measured) == words_of(simulated), "latency": None if case.slow else latency,
            "busy": run["busy"],
        }  # fmt: skip
        for what, (told, found) in pairs.items():
            row |= {f"simulated_{what}": told, f"measured_{what}": found, f"error_{what}": told / found - 1}
        rows.append(row)
    return rows


def draw(case, simulated, measured, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for timeline in (simulated, measured):
        timeline.save(f"{path}_{timeline.name}.json")
    draw_timeline(
        [simulated, measured],
        f"{path}.png",
        title=f"{case.name}: {case.num_ranks} ranks, batches of {case.num_microbatches}",
        time_label="time [ms]",
        time_scale=1e3,
    )


def show(rows: list[dict]) -> None:
    table = Table(title="time per batch and of the whole run, simulated and measured", title_justify="left")
    for heading in ("p", "m", "", "batch ms", "measured", "error %", "run ms", "measured", "error %", "busy %"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for row in rows:
        cells = [str(row["p"]), str(row["m"]), row["case"]]
        for what in ("batch", "run"):
            cells += [f"{1e3 * row[f'simulated_{what}']:.1f}", f"{1e3 * row[f'measured_{what}']:.1f}"]
            cells.append(f"{100 * row[f'error_{what}']:+.2f}")
        table.add_row(*cells, f"{100 * row['busy']:.0f}")
    console = terminal()
    console.print(table)
    for what in ("batch", "run"):
        errors = [abs(row[f"error_{what}"]) for row in rows]
        worst = max(rows, key=lambda row, what=what: abs(row[f"error_{what}"]))
        console.print(
            f"{what}: mean error {statistics.fmean(errors):.2%}, largest {max(errors):.2%} "
            f"(p={worst['p']}, {worst['case']})",
            highlight=False,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    set_environment()
    rows = []
    for p in args.stages:
        job = AccuracyJob(num_stages=p, payload_bytes=args.payload, repeats=args.repeats, cases=cases(args, p))
        print(f"{p} processes, {len(job.cases)} cases", file=sys.stderr, flush=True)
        rows += rows_of(job, run_job(job, AccuracyRank), args.pictures)
    show(rows)
    save(args, rows, unsaved=("pictures",))
    return status_of(rows, lambda row: f"p={row['p']}, {row['case']}")


if __name__ == "__main__":
    sys.exit(main())
