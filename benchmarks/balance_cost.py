"""What moving saved activations costs: `bpipe` against `flush` on stages that sleep instead of computing.

    python benchmarks/balance_cost.py                                  # 10 pairs at m = 8 to 128: about 27 minutes
    python benchmarks/balance_cost.py --microbatches 8 32              # a short form: about 6 minutes
    python benchmarks/balance_cost.py --microbatches 8 32 --pairs 3 --scopes none
    python benchmarks/balance_cost.py --smoke                          # seconds: that everything runs, no figures

Problem: BPipe (section 4.4, Figure 9) pays little for its moves because they run while forwards and backwards do. Two
cores cannot compute on eight stages, so nobody could see that here.

Solution: emulated stages sleep for the paper's times of GPT-3 13B on 8 stages (Table 4, milliseconds per microbatch),

    recompute scope    transfer   forward   backward
    none                  22.48     36.32      74.12
    attention              7.63     36.32      83.57

while engine, queues, transfers between stages (1 MiB) and moves (4 MiB) are real, between real processes. A move holds
the pair's connection for the table's time: it sends its bytes at the beginning and sleeps for the rest, as they would
fill the two cores otherwise. `busy` is the share of all cores' time that all processes took together; above 25% the
figures say more about the cores than about the schedule, so stretch the times then (`--stretch 2`).

The contenders take turns of one batch, `flush` and `bpipe` in an order that alternates: a pair. "added" is what
`bpipe` takes more than the `flush` of its pair: the median over the pairs, with least and greatest. "synchronous" is
`bpipe` where the evictor's computations wait for each of its moves, beside the first `--synchronous-pairs` pairs. A
turn lasts from the first rank's start to the last rank's end. "predicted" is `megatron.pipeline.simulate` of the same
programs with the table's times and nothing that was measured; it is printed before the processes start. Every rank
compares what it executed with the program; a difference makes the exit status 1.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.results import parser_of, save, set_environment, status_of

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


def jobs(args: argparse.Namespace) -> dict:
    """A job for each recompute scope."""
    from balance_cost_ranks import CONTENDERS, BalanceJob

    made = {}
    for scope in args.scopes:
        transfer, forward, backward = (args.stretch * seconds for seconds in TIMES[scope])
        made[scope] = BalanceJob(
            num_stages=args.stages,
            entries=dict.fromkeys(args.microbatches, CONTENDERS),
            forward=forward,
            backward=backward,
            transfer=transfer,
            payload_bytes=args.payload,
            activation_bytes=args.activations,
            batches=1,
            repeats=args.pairs,
            synchronous_repeats=args.synchronous_pairs,
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    set_environment()
    from balance_cost_ranks import BalanceRank
    from balance_cost_rows import predicted_rows, rows_of, show, show_predicted
    from emulated_ranks import run_job

    plan = jobs(args)
    predicted = {scope: predicted_rows(scope, job) for scope, job in plan.items()}
    show_predicted([row for rows in predicted.values() for row in rows])
    rows = []
    with tempfile.TemporaryDirectory(prefix="balance-cost-") as directory:
        for number, (scope, job) in enumerate(plan.items(), 1):
            print(f"{number} of {len(plan)}: scope {scope}, {job.world_size} processes", file=sys.stderr, flush=True)
            rows += rows_of(predicted[scope], run_job(job, Path(directory), BalanceRank))
    show(rows)
    save(args, rows)
    return status_of(rows, lambda row: f"{row['contender']}, m={row['microbatches']}")


if __name__ == "__main__":
    sys.exit(main())
