"""How far the simulator is from real runs: every schedule, even and uneven stages, fast and slow links.

    python benchmarks/simulator_accuracy.py                              # 72 cases, p = 4 and 8: about 20 minutes
    python benchmarks/simulator_accuracy.py --stages 4 --only 2bw bpipe  # some of them
    python benchmarks/simulator_accuracy.py --pictures DIR               # and each pair of timelines as a picture

The executor runs each schedule on stages that sleep (a rank's forward 40 ms on the mean, its backward 80), with a step,
reductions, and moves of saved activations, between real processes. Uneven stages are 0.8 to 1.3 times as long, in an
order in which forward and backward differ. Slow links take 0.1 to 0.6 forwards for a tensor and deliver it 0.1 to 0.3
forwards later, by edge (`paced_links`); fast ones are the loopback device, whose latency is measured between the runs.
The simulator is told the same times, and that latency, and nothing else that was measured.

For each case: seconds per batch in the steady state, and of the whole run from a drained state to a drained one, by the
same functions of both timelines; the error is simulated over measured, less one. `busy` is the share of all cores' time
that all processes took; above 25% the figures say more about the cores than about the simulator, so stretch the times
then (`--stretch 2`). What ran has to be the program that was simulated, instruction by instruction and in its order; a
difference makes the exit status 1.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.results import parser_of, save, set_environment, status_of

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "flush": {"schedule": "flush"},
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "interleaved": {"schedule": "interleaved", "num_virtual_stages": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zbv": {"schedule": "zbv", "num_virtual_stages": 2},
    "bpipe": {"schedule": "bpipe"},
    "2bw-balanced": {"schedule": "2bw", "balance": True},
    "interleaved-balanced": {"schedule": "interleaved", "num_virtual_stages": 2, "balance": True},
    "2bw-recompute": {"schedule": "2bw", "recompute": True},
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
    """Every schedule with even and uneven stages, on fast and slow links; the quick form: uneven and slow."""
    from simulator_accuracy_ranks import Case

    made = []
    for name, uneven, slow in product(args.only, (False, True), (False, True)):
        if args.smoke and not (uneven and slow):
            continue
        m, count = (1, 2 * num_ranks * args.batches) if name == "pipedream" else (2 * num_ranks, args.batches)
        made.append(
            Case(num_ranks=num_ranks, num_microbatches=m, num_batches=count, forward=args.forward * args.stretch / 1e3,
                 uneven=uneven, slow=slow, **SCHEDULES[name])
        )  # fmt: skip
    return tuple(made)


def rows_of(job, result: dict, pictures: Path | None) -> list[dict]:
    """A row for each run: simulated beside measured."""
    from megatron.pipeline.simulate import simulate
    from megatron.pipeline.simulate.timeline import Timeline

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
            "p": case.num_ranks,
            "m": case.num_microbatches,
            "case": case.name,
            "executed_is_program": words(measured) == words(simulated),
            "latency": None if case.slow else latency,
            "busy": run["busy"],
        }
        for what, (told, found) in pairs.items():
            row |= {f"simulated_{what}": told, f"measured_{what}": found, f"error_{what}": told / found - 1}
        rows.append(row)
    return rows


def words(timeline) -> list[list[str]]:
    return [list(map(str, row)) for row in timeline.rows]


def draw(case, simulated, measured, path: Path) -> None:
    from megatron.pipeline.draw import draw_timeline

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
    from rich.table import Table

    from benchmarks.common.tables import terminal

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
    from emulated_ranks import run_job
    from simulator_accuracy_ranks import AccuracyJob, AccuracyRank

    rows = []
    with tempfile.TemporaryDirectory(prefix="simulator-accuracy-") as directory:
        for p in args.stages:
            job = AccuracyJob(num_stages=p, entries={}, forward=0.0, backward=0.0, payload_bytes=args.payload,
                              batches=args.batches, repeats=args.repeats, cases=cases(args, p))  # fmt: skip
            print(f"{p} processes, {len(job.cases)} cases", file=sys.stderr, flush=True)
            rows += rows_of(job, run_job(job, Path(directory), AccuracyRank), args.pictures)
    show(rows)
    save(args, rows, unsaved=("pictures",))
    return status_of(rows, lambda row: f"p={row['p']}, {row['case']}")


if __name__ == "__main__":
    sys.exit(main())
