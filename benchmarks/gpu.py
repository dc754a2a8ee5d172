"""Tokens/s of `flush`, `2bw` and `2bw provisional` on this machine's GPUs.

    python benchmarks/gpu.py                     # a stage on each GPU, over NCCL
    python benchmarks/gpu.py --stages 2          # two stages; on a machine with one GPU, through host memory
    python benchmarks/gpu.py --json result.json  # also every measured time

Each stage is a process with an engine for each schedule, with the same GPT in BF16 and the same data. The schedules
alternate: in each round each schedule runs some batches, in an order that changes from round to round, and the ratio is
the median of the ratios *within* the rounds. A time is the wall time of the timed batches, from an idle device to an
idle device, on the slowest rank. The first batches of a schedule are not timed.

ideal   (m + p - 1) / m: the ratio at p stages and m microbatches if only flushes cost time. Stages are not balanced:
        the last stage has the output layer and the loss in addition to its `--layers` layers.

Two stages that share a GPU do not show speed: they take turns at its multiprocessors, so no bubble is idle time, and
transfers go through host memory. Use this form only to see that everything runs.

The printed environment variables matter, too: NCCL_MAX_CTAS, NCCL_BUFFSIZE, CUDA_DEVICE_MAX_CONNECTIONS and others of
docs/gpu.md. pretrain_gpt.py refuses numbers of hardware queues with which a job may hang. This benchmark accepts them,
so that the hang can be observed: run it under `timeout 600`.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.common.results import parser_of, save
from benchmarks.common.tables import spread
from megatron import backend

SCHEDULES = ("flush", "2bw", "2bw provisional")
RATIOS = (("2bw", "flush"), ("2bw provisional", "2bw"))
PREFIXES = ("CUDA_DEVICE", "NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA")
SHARED = (
    "note: {stages} stages share {gpus} GPU{s} and go through host memory; the figures say nothing of speed, only that "
    "it runs"
)
NO_CUDA = "no CUDA device is there; measure on a machine that has one, or run benchmarks/real_compute.py on this one"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("--stages", type=int, help="p; default: the number of GPUs, 2 where there is one")
    parser.add_argument("--microbatches", type=int, nargs="+", help="m, at least p; default p, 2p and 4p")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=8, help="timed, of each schedule in each round")
    parser.add_argument("--layers", type=int, default=4, help="of each stage")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=8192)
    args = parser.parse_args(arguments)
    sizes = (args.rounds, args.batches, args.layers, args.heads, args.seq_length, args.micro_batch_size)
    if min(sizes) < 1 or args.vocab_size < 2:
        parser.error("all sizes and numbers are at least 1, and --vocab-size at least 2")
    if args.hidden_size % args.heads or args.hidden_size < args.heads:
        parser.error(f"--hidden-size is {args.hidden_size}; give a multiple of the {args.heads} of --heads")
    if args.stages is not None and not 1 <= args.stages <= 64:
        parser.error(f"--stages is {args.stages}; give 1 to 64")
    if args.stages is not None:
        check_microbatches(args, args.stages, parser.error)
    return args


def check_microbatches(args: argparse.Namespace, num_stages: int, refuse) -> None:
    if args.microbatches and min(args.microbatches) < num_stages:
        refuse(f"--microbatches is {args.microbatches}; 2bw takes at least as many as the {num_stages} stages")


def place(args: argparse.Namespace, num_gpus: int) -> tuple[int, str]:
    """(stages, backend) for a machine with `num_gpus` GPUs. Raises ValueError if there is none, or m is too small."""
    if num_gpus == 0:
        raise ValueError(NO_CUDA)
    stages = args.stages or max(2, num_gpus)

    def refuse(reason: str) -> None:
        raise ValueError(reason)

    check_microbatches(args, stages, refuse)
    return stages, "nccl" if stages <= num_gpus else "gloo"


def orders(names: Sequence[str], num_rounds: int) -> list[list[str]]:
    """The order of the contenders in each round: a random order, reversed in every other round."""
    shuffled = random.Random(0).sample(list(names), len(names))
    return [shuffled[:: 1 if number % 2 else -1] for number in range(num_rounds)]


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def rows_of(found: dict, num_stages: int) -> list[dict]:
    """A row for each m: the median tokens/s of each schedule, the speeds of `RATIOS` by round, and the ideal of the
    first."""
    rows = []
    for num_microbatches, seconds in found["seconds"].items():
        m = int(num_microbatches)
        tokens = m * found["tokens_per_microbatch"]
        row = {"microbatches": m, "ideal": (m + num_stages - 1) / m, "ratios": {}}
        row["tokens_per_second"] = {name: tokens / statistics.median(times) for name, times in seconds.items()}
        for name, other in RATIOS:
            if {name, other} <= set(seconds):
                rounds = zip(seconds[other], seconds[name], strict=True)
                row["ratios"][f"{name} over {other}"] = [a / b for a, b in rounds]
        rows.append(row)
    return rows


def show(rows: list[dict], found: dict) -> None:
    print(f"{found['device']}, torch {found['torch']}, {found['backend']}")
    for name, value in found["environment"].items():
        print(f"  {name}={value}")
    peaks = ", ".join(f"{each / 2**30:.1f}" for each in found["peak_bytes"])
    print(f"most that torch handed out, all schedules together, GiB by stage: {peaks}")
    for row in rows:
        speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in row["tokens_per_second"].items())
        line = f"m = {row['microbatches']}: tokens/s {speeds}"
        for name, ratios in row["ratios"].items():
            line += f"; {name} {spread(ratios, 3)}"
        if "2bw over flush" in row["ratios"]:
            line += f", 2bw over flush ideal {row['ideal']:.3f}"
        print(line)
    for name, losses in found["losses"].items():
        print(f"losses of {name}: first {losses[0]:.4f}, last {losses[-1]:.4f}")


def measure(args: argparse.Namespace, num_stages: int, backend: str, device: str = "cuda") -> dict:
    """Run the processes of all stages to their end. Returns their results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "port": port, "device": device, "num_stages": num_stages, "backend": backend,
        "rounds": args.rounds, "batches": args.batches,
        "microbatches": args.microbatches or [num_stages, 2 * num_stages, 4 * num_stages],
        "orders": orders(args.schedules, args.rounds),
        "model": {
            "layers": args.layers, "hidden_size": args.hidden_size, "heads": args.heads, "vocab_size": args.vocab_size,
            "seq_length": args.seq_length, "micro_batch_size": args.micro_batch_size,
        },
    }  # fmt: skip
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = torch.multiprocessing.spawn(run_rank, args=(job, results), nprocs=num_stages, join=False)
    found = None
    while not ranks.join(timeout=0.2):  # raises the error of a failed process
        if not results.empty():
            found = results.get()
    return found if found is not None else results.get()


def run_rank(rank: int, job: dict, results) -> None:
    """Run one process, on a GPU, or on the CPU if `job["device"]` is "cpu". The last rank puts the results into
    `results`."""
    torch.set_num_threads(1)
    backend.install()
    from benchmarks.gpu_ranks import TIMEOUT, compare

    warnings.filterwarnings("ignore", message=".*cuda_graph_scope.*")  # about megatron.core's own default
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    num_stages, device = job["num_stages"], job["device"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_stages), LOCAL_RANK=str(rank))
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    where = {"init_method": f"tcp://127.0.0.1:{job['port']}", "rank": rank, "world_size": num_stages}
    dist.init_process_group(job["backend"], timeout=TIMEOUT, **where)
    found = compare(job, device) | {"environment": environment()}
    if rank == num_stages - 1:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        num_stages, backend = place(args, num_gpus)
    except ValueError as error:
        print(f"gpu.py: error: {error}", file=sys.stderr)
        return 1
    if num_stages > num_gpus:
        print(SHARED.format(stages=num_stages, gpus=num_gpus, s="s" if num_gpus > 1 else ""))
    found = measure(args, num_stages, backend)
    rows = rows_of(found, num_stages)
    show(rows, found)
    if num_stages > num_gpus:
        print(SHARED.format(stages=num_stages, gpus=num_gpus, s="s" if num_gpus > 1 else ""))
    save(argparse.Namespace(**vars(args) | {"stages": num_stages, "gpus": num_gpus}), rows, found=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
