"""The runtime's times under each schedule, beside the ideal, on 4 and 8 stages that sleep instead of computing.

    python benchmarks/emulated.py                          # about 6 minutes; tables
    python benchmarks/emulated.py --only speedup executor  # some sections
    python benchmarks/emulated.py --json result.json       # also every measured time

Problem: a schedule's bubbles and overlaps show on many stages, but a computer with two cores cannot compute on many.
Solution: emulated stages sleep for 20 ms in a forward and 40 ms in a backward, while engine, transfers (1 MiB each) and
reductions are real, between real processes. So the figures show the schedule and the runtime.

Sections (`--only`):

ideal     time per batch over the ideal, (m+p-1)(f+b) for `flush` and m(f+b) for `2bw` in its steady state; and over the
          ideal plus the transfers that the schedule cannot hide. A microbatch's round trip takes p(f+b) + 2(p-1)L with
          L the one-way latency; with n microbatches in flight at most n are finished in that time.
warmup    `2bw` beside `2bw` with extra warm-up (m >= 2p-1), which has 2p-1 instead of p microbatches in flight and so
          hides L; and its cost: saved microbatches of each stage, counted during the run, beside the checker's numbers.
chain     `2bw` with d=2, tied embeddings and clipping, with reductions that take a share of the slack (m-p+1)(f+b),
          over `2bw` without reductions. A reduction sleeps for its time and all-reduces 64 KiB: payloads that take
          hundreds of milliseconds would keep the two cores busy, as no accelerator's network does. The order, the
          waiting for all members and the wait of STEP are real. 150% is the control: it must stall by the simulated
          time.
predictions
          `2bw` with predicted weights over `2bw` without, at p=2 and the least p: predicted from all microbatches that
          each stage has done, and from one microbatch, whose gradients are kept. A STEP, a PREDICT and a HOLD take 5%
          of a forward each.
speedup   `2bw` over `flush` at m=p: ideally (2p-1)/p.
bubbles   the idle part of a batch under `flush`, `interleaved` (two stages on each rank), `zb-h1`, `zbv`, `zbv` with
          optimistic steps, and `2bw`, beside the simulated part. I and W take half of a backward each; each of two
          stages takes half of its rank's times.
executor  microseconds of an instruction, with stages that take no time and send 4 bytes, with tracing off and on: wall
          time (which includes the waits for transfers at p=2) and the CPU time of the executor's own thread.

The latency L is measured between the turns: both ends of an edge send at the same time, and so does every third edge,
as in a steady 1f1b with b = 2f. Contenders take turns within one run, in an order that changes; each turn starts and
ends drained, and its first batches are not timed. Figures are medians of the repeats with least and greatest in
parentheses; ratios are taken within a repeat. "predicted" is `megatron.pipeline.simulate` of the same program with the
measured L. Every rank compares the executed instructions with the program; a difference makes the exit status 1.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.emulated import run_job
from benchmarks.common.results import parser_of, save, set_environment, status_of
from benchmarks.emulated_ranks import Contender, EmulatedJob, EmulatedRank
from benchmarks.emulated_rows import ROWS, Found, show

SECTIONS = ("ideal", "warmup", "chain", "predictions", "speedup", "bubbles", "executor")
COMPARED = {"flush": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "2bw": 1}  # stages on each rank
CHAIN_SHARES = (0.25, 0.5, 0.9, 1.5)
UPDATE_SHARE = 0.05  # of a forward
EXECUTOR_MICROBATCHES = 64


def stage_jobs(args: argparse.Namespace) -> list[EmulatedJob]:
    """For each p, the job of `ideal`, `warmup` and `speedup`, which share their measurements."""
    flush, two_bw = (Contender(name=name, preset=name) for name in ("flush", "2bw"))
    extra = Contender(name="2bw extra warm-up", preset="2bw", extra_warmup=True)
    jobs = []
    for p in args.stages:
        entries = {}
        for m in args.microbatches or [p, 2 * p, 4 * p]:
            chosen = [two_bw]
            if "ideal" in args.only or ("speedup" in args.only and m == p):
                chosen.append(flush)
            if "warmup" in args.only and m >= 2 * p - 1:
                chosen.append(extra)
            if "ideal" in args.only or len(chosen) > 1:
                entries[m] = tuple(chosen)
        if entries:
            jobs.append(EmulatedJob(num_stages=p, entries=entries, **timing(args)))
    return jobs


def chain_jobs(args: argparse.Namespace) -> list[EmulatedJob]:
    """The jobs of `chain`: 2bw without and with reductions of several sizes, at the least p."""
    p = min(args.stages)
    entries = {}
    for m in args.microbatches or [p, 2 * p]:
        slack = (m - p + 1) * (args.forward + args.backward)
        entries[m] = (
            Contender(name="without", preset="2bw"),
            *(Contender(name=f"{share:.0%}", preset="2bw", chain_seconds=share * slack) for share in CHAIN_SHARES),
        )
    return [EmulatedJob(num_stages=p, num_replicas=2, entries=entries, **timing(args))]


def prediction_jobs(args: argparse.Namespace) -> list[EmulatedJob]:
    """The jobs of `predictions`: 2bw without and with predicted weights."""
    shared = {"preset": "2bw", "update_seconds": UPDATE_SHARE * args.forward}
    contenders = (
        Contender(name="without", **shared),
        Contender(name="from all that is done", predict=True, **shared),
        Contender(name="from one microbatch", predict=True, provisional_microbatches=1, **shared),
    )
    return _jobs(args, sorted({2, min(args.stages)}), (1, 2), contenders)


def bubble_jobs(args: argparse.Namespace) -> list[EmulatedJob]:
    """The jobs of `bubbles`: the schedules that compute the same weights, and 2bw."""
    contenders = (
        *(Contender(name=name, preset=name, virtual=v) for name, v in COMPARED.items()),
        Contender(name="zbv, optimistic", preset="zbv", virtual=2, optimistic=True),
    )
    return _jobs(args, args.stages, (2, 4), contenders)


def _jobs(
    args: argparse.Namespace, stages: Sequence[int], times: Sequence[int], contenders: tuple
) -> list[EmulatedJob]:
    """A job for each p, with the same contenders. `times`: multiples of p that are the default numbers of
    microbatches."""
    return [
        EmulatedJob(
            num_stages=p, entries=dict.fromkeys(args.microbatches or [each * p for each in times], contenders),
            **timing(args),
        )
        for p in stages
    ]  # fmt: skip


def executor_jobs(args: argparse.Namespace) -> list[EmulatedJob]:
    """The jobs of `executor`: stages that take no time, without and with tracing."""
    contenders = tuple(
        Contender(name=f"tracing {'on' if traced else 'off'}", preset="2bw", traced=traced) for traced in (False, True)
    )
    idle = {**timing(args), "forward": 0.0, "backward": 0.0, "payload_bytes": 4}
    return [
        EmulatedJob(
            num_stages=p, entries={EXECUTOR_MICROBATCHES: contenders}, **idle | {"batches": times * args.batches}
        )
        for p, times in ((1, 50), (2, 10))
    ]


JOBS = {
    ("ideal", "warmup", "speedup"): stage_jobs, ("chain",): chain_jobs, ("predictions",): prediction_jobs,
    ("bubbles",): bubble_jobs, ("executor",): executor_jobs,
}  # fmt: skip
"""Sections that share their measurements -> the function that makes their jobs."""


def timing(args: argparse.Namespace) -> dict:
    return {
        "forward": args.forward, "backward": args.backward, "payload_bytes": args.payload, "batches": args.batches,
        "repeats": args.repeats,
    }  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="p, at most 16; chain: 2p processes")
    parser.add_argument(
        "--microbatches",
        type=int,
        nargs="+",
        help="m; default p, 2p and 4p; chain, predictions: p, 2p; bubbles: 2p, 4p",
    )
    parser.add_argument(
        "--batches", type=int, default=2, help="timed, of each contender in each repeat; twice as many at m < 2p"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--forward", type=float, default=20.0, help="ms")
    parser.add_argument("--backward", type=float, default=40.0, help="ms")
    parser.add_argument("--payload", type=int, default=1 << 20, help="bytes")
    args = parser.parse_args(arguments)
    if not all(2 <= p <= 16 for p in args.stages):
        parser.error(f"--stages is {args.stages}; give 2 to 16")
    if "chain" in args.only and min(args.stages) > 8:
        parser.error(f"--stages is {args.stages}; chain doubles the least of them and takes 16 processes at most")
    if args.microbatches and min(args.microbatches) < max(args.stages):
        parser.error(f"--microbatches is {args.microbatches}; 2bw takes at least as many as stages")
    if min(args.batches, args.repeats) < 1 or min(args.forward, args.backward) <= 0 or args.payload < 4:
        parser.error("--batches, --repeats: at least 1; --forward, --backward: more than 0; --payload: at least 4")
    args.forward, args.backward = args.forward / 1e3, args.backward / 1e3
    return args


def measure(args: argparse.Namespace) -> list[dict]:
    """Run the jobs one after another. Returns the rows of all tables."""
    asked = {sections: [each for each in sections if each in args.only] for sections in JOBS}
    plan = [(job, asked[sections]) for sections, jobs in JOBS.items() if asked[sections] for job in jobs(args)]
    rows = []
    for number, (job, sections) in enumerate(plan, 1):
        print(f"{number} of {len(plan)}: {job.world_size} processes", file=sys.stderr, flush=True)
        found = Found(job, run_job(job, EmulatedRank))
        rows += [row for section in sections for row in ROWS[section](found)]
        if found.latencies:
            rows.append(found.latency_row())
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    set_environment()
    rows = measure(args)
    show(rows)
    save(args, rows)
    return status_of(rows, lambda row: f"{row['contender']}, p={row['stages']}")


if __name__ == "__main__":
    sys.exit(main())
