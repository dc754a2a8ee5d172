"""The relay on stages and lanes that sleep: measured times beside the simulator, the closed form and the paper's
equation.

There is one process for each rank. Engine, executor, chain and lanes are real, and so are transfers between ranks
(gloo). The emulated stages and lanes and the simulator get the same times; the simulator gets no other value.
"""

import argparse
import statistics
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from benchmarks.common.emulated import TIMEOUT, Job, Rank, run_job, times_of, words_of
from benchmarks.common.tables import Row, show_table, spread
from megatron.pipeline.program.lane_order import DEFERRED, EAGER, Residency
from megatron.pipeline.runtime.contract.trace import Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedRelayUpdate
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Relay:
    """The closed form of a relay on one rank, with the paper's names.

    Attributes:
        N: number of stages.
        u: number of microbatches of a batch.
        update: eager or deferred.
        C: seconds of a forward of one microbatch through a stage.
        X: seconds of a stage's fetch.
        G: seconds of a stage's store of gradients.
        R: seconds of a stage's reduction.
        U: seconds of a stage's update.
    """

    N: int
    u: int
    update: str
    C: float
    X: float = 0.0
    G: float = 0.0
    R: float = 0.0
    U: float = 0.0

    @property
    def computation(self) -> float:
        """The seconds of forwards, recomputes and backwards in a batch. The last stage recomputes nothing."""
        return (self.N - 1) * 4 * self.u * self.C + 3 * self.u * self.C

    @property
    def batch(self) -> float:
        """The seconds of a batch, alone or in a run of many batches.

        The value is exact if `is_exact`, otherwise an upper bound. Batches do not overlap, except that deferred updates
        delay the next batch's forwards; eager updates run beside the backwards. If only fetches are long, they run one
        after another, except for the two stages that stay on the device where the relay turns back.
        """
        N, u, C, X, G, R, U = self.N, self.u, self.C, self.X, self.G, self.R, self.U
        up = max(u * C, X, 0.0 if self.update == EAGER else U)
        if self._fetches_are_longest:
            return X + (N - 1) * up + 6 * u * C + (N - 2) * X + R + G + U
        down = max(self._lanes, X, (3 * u * C + R + G) / 2)
        return X + (N - 1) * up + max(3 * u * C, X) + (N - 1) * down + R + G + U

    @property
    def is_exact(self) -> bool:
        """Whether `batch` is exact: two gradient buffers suffice, and fetches fit beside backwards; or only fetches are
        long."""
        if self._fetches_are_longest:
            return True
        return 3 * self.u * self.C >= self.X and self._lanes >= (3 * self.u * self.C + self.R + self.G) / 2

    @property
    def _lanes(self) -> float:
        """The longest time of a stage on the way back, without fetches."""
        return max(3 * self.u * self.C, self.G, self.R, self.U if self.update == EAGER else 0.0)

    @property
    def _fetches_are_longest(self) -> bool:
        """Whether fetches take longer than backwards, and all other copies fit beside backwards."""
        backwards = 3 * self.u * self.C
        return self.X > backwards >= max(self._lanes, self.R + self.G)

    @property
    def paper(self) -> float:
        """The seconds of a batch by the paper's equation 4, N(4uC + 2X): transfers do not overlap, updates are
        hidden."""
        return self.N * (4 * self.u * self.C + 2 * self.X)


BOTTLENECKS = {
    "compute": (0.5, 0.5, 0.5, 0.5),
    "fetch": (4.0, 0.5, 0.5, 0.5),
    "store": (0.5, 4.0, 0.5, 0.5),
    "update": (0.5, 0.5, 0.5, 4.0),
}
"""Name of the bottleneck -> X, G, R and U of a stage, in forwards of a stage's whole batch (uC)."""
LIMITS = {
    "96 stages, all hidden": (EAGER, (1.0, 1.5, 1.5, 3.0), 1.03),
    "96 stages, all hidden, deferred": (DEFERRED, (1.0, 1.5, 1.5, 1.0), 1.03),
    "96 stages, deferred, U = 3uC": (DEFERRED, (1.0, 1.5, 1.5, 3.0), None),
}
"""Deep relays: name -> time of the host's update; X, G, R and U in forwards of a stage's batch; and the largest allowed
ratio of a batch's time to its computation, or None."""
WITHIN = 0.02
"""The largest allowed difference of measured over simulated time from 1."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A relay to measure.

    Attributes:
        update: eager or deferred.
        forward: seconds of a microbatch's forward through a stage; a backward takes twice as long.
        lanes: X, G, R and U in forwards of a stage's batch.
        most: the largest allowed ratio of the measured time to the computation, or None.
    """

    name: str
    update: str
    num_microbatches: int
    num_virtual_stages: int
    forward: float
    lanes: tuple[float, float, float, float]
    num_ranks: int = 1
    most: float | None = None

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_virtual_stages

    @property
    def schedule(self) -> Schedule:
        return Schedule.preset(
            "l2l", num_stages=self.num_stages, num_virtual_stages=self.num_virtual_stages,
            residency=Residency(2, self.update), data_parallel=True,
        )  # fmt: skip

    @property
    def costs(self) -> Costs:
        fetch, store, reduce, update = (times * self.num_microbatches * self.forward for times in self.lanes)
        return Costs(forward=self.forward, backward=2 * self.forward, fetch=fetch, store=store, reduce_grad=reduce,
                     update=update)  # fmt: skip

    @property
    def ideal(self) -> float:
        """The seconds for which the busiest rank computes in a batch: with several ranks, a rank without the last
        stage."""
        u, v = self.num_microbatches, self.num_virtual_stages
        stages = 4 * v if self.num_ranks > 1 else 4 * (v - 1) + 3
        return stages * u * self.forward

    @property
    def formula(self) -> Relay | None:
        """The closed form for one rank; None with several ranks."""
        if self.num_ranks > 1:
            return None
        costs = self.costs
        return Relay(N=self.num_stages, u=self.num_microbatches, update=self.update, C=self.forward, X=costs.fetch,
                     G=costs.store, R=costs.reduce_grad, U=costs.update)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LaneJob(Job):
    """A job that measures `cases` in their order, all with the same number of ranks. `batches`: timed batches of
    each."""

    cases: tuple[Case, ...]


class LaneRank(Rank):
    """One process of a job, which runs all cases and traces them."""

    def run(self) -> dict:
        """Measure all cases. Returns on rank 0 each case's timeline, of consecutive batches from a drained state."""
        return {"runs": [self._measure(case) for case in self.job.cases]}

    def _measure(self, case: Case) -> dict:
        schedule, seconds = case.schedule, case.costs.seconds(case.num_stages)
        batches = [case.num_microbatches] * (self.job.batches + 2)
        group = self._world if case.num_ranks > 1 else None
        update = EmulatedRelayUpdate(seconds, stages=list(schedule.stages_of(self.stage)), job_group=group)
        stages, tracer = self.stages(schedule, times_of(seconds)), Tracer(num_batches=len(batches))
        engine = PipelineEngine(schedule, stages, update, timeout=TIMEOUT, tracer=tracer)
        found = self.traced_run(engine, schedule, batches)
        dist.barrier()
        engine.close()
        return found


def steady_batches(run: Timeline) -> list[float]:
    """The seconds of each batch except the first, which waits for no update, and the last, which no batch follows."""
    return [after - before for before, after in pairwise(run.batch_starts()[1:])]


def row_of(section: str, case: Case, run: dict) -> Row:
    """A row of the table. Times are seconds of one batch; `measured` has an entry for each batch.

    A steady batch after a late one measures short, but the whole run does not: `least` is its simulated time, `whole`
    its measured time.
    """
    measured = Timeline.from_dict(run["measured"])
    batches = (case.num_microbatches,) * len(measured.batches)
    simulated = simulate(case.schedule.build(batches), case.costs)
    formula = case.formula
    row = {
        "section": section, "case": case.name, "ranks": case.num_ranks, "stages": case.num_stages,
        "microbatches": case.num_microbatches, "update": case.update, "measured": steady_batches(measured),
        "simulated": statistics.fmean(steady_batches(simulated)), "whole": measured.makespan,
        "least": simulated.makespan, "ideal": case.ideal, "formula": formula.batch if formula else None,
        "paper": formula.paper if formula else None, "busy": run["busy"], "most": case.most,
        "executed_is_program": words_of(measured) == words_of(simulated),
    }  # fmt: skip
    middle = statistics.median(row["measured"])
    return {**row, "over_simulated": middle / row["simulated"], "over_ideal": middle / row["ideal"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sections = ("bottlenecks", "deep", "ranks")
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 8, 16], help="u, of `bottlenecks`")
    parser.add_argument("--stages", type=int, default=8, help="N of `bottlenecks`, at least 3")
    parser.add_argument("--deep", type=int, default=96, help="N of `deep`")
    parser.add_argument("--forward", type=float, default=8.0, help="ms of a microbatch; a backward takes two")
    parser.add_argument("--batches", type=int, default=1, help="timed, of each case")


def cases_of(args: argparse.Namespace) -> dict[str, list[Case]]:
    """The cases to measure, by section."""
    forward = args.forward / 1e3
    bottlenecks = [
        Case(name=name, update=update, num_microbatches=u, num_virtual_stages=args.stages, forward=forward,
             lanes=lanes)
        for u in args.microbatches for name, lanes in BOTTLENECKS.items() for update in (EAGER, DEFERRED)
    ]  # fmt: skip
    deep = [
        Case(name=name, update=update, num_microbatches=4, num_virtual_stages=args.deep, forward=forward, lanes=lanes,
             most=most)
        for name, (update, lanes, most) in LIMITS.items()
    ]  # fmt: skip
    ranks = [
        Case(name=f"4 ranks, copies of {share:g}", update=update, num_ranks=4, num_microbatches=8, num_virtual_stages=4,
             forward=forward, lanes=(share,) * 4, most=most)
        for share, most in ((0.125, 1.08), (0.5, None))  # longer copies show at the border of batches
        for update in (EAGER, DEFERRED)
    ]  # fmt: skip
    return {"bottlenecks": bottlenecks, "deep": deep, "ranks": ranks}


def measure(args: argparse.Namespace) -> list[Row]:
    rows = []
    for section, cases in cases_of(args).items():
        if section not in args.only:
            continue
        job = LaneJob(num_stages=cases[0].num_ranks, payload_bytes=1 << 16, batches=args.batches, cases=tuple(cases))
        runs = run_job(job, LaneRank)["runs"]
        rows += [row_of(section, case, run) for case, run in zip(cases, runs, strict=True)]
    return rows


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


COLUMNS = {
    "": lambda row: row["case"],
    "p": lambda row: str(row["ranks"]),
    "N": lambda row: str(row["stages"]),
    "u": lambda row: str(row["microbatches"]),
    "update": lambda row: row["update"],
    "ms a batch": lambda row: spread([1e3 * seconds for seconds in row["measured"]], 0),
    "simulated": lambda row: milliseconds(row["simulated"]),
    "formula": lambda row: milliseconds(row["formula"]),
    "equation 4": lambda row: milliseconds(row["paper"]),
    "over simulated": lambda row: f"{row['over_simulated']:.4f}",
    "over computation": lambda row: f"{row['over_ideal']:.3f}" + (f" <= {row['most']}" if row["most"] else ""),
    "busy %": lambda row: f"{100 * row['busy']:.0f}",
}
TITLE = "emulated lanes: ms a batch (least-greatest) beside the simulator, the closed form and the paper's equation 4"


def show(rows: list[Row]) -> None:
    show_table(TITLE, COLUMNS, rows)


def complaints(rows: list[Row]) -> list[str]:
    """The violated requirements, a sentence each."""
    found = []
    for row in rows:
        what = f"{row['case']}, u={row['microbatches']}, {row['update']}"
        if not row["executed_is_program"]:
            found.append(f"{what}: executed something else than the program")
        if abs(row["over_simulated"] - 1) > WITHIN:
            found.append(f"{what}: {row['over_simulated']:.4f} of the simulated time, more than {WITHIN:.0%} away")
        if row["most"] is not None and row["over_ideal"] > row["most"]:
            found.append(f"{what}: {row['over_ideal']:.3f} of its computation, above {row['most']}")
    return found
