"""The cost of an UPDATE: nanoseconds a parameter of AdamW on the host, beside the limit by the memory's bandwidth.

A step reads weight, gradient and two moments and writes all but the gradient in place: 28 bytes a parameter in FP32.
The limit is the time of 28 bytes at the bandwidth of an addition in place, `a.add_(b)`, which moves three bytes for
each byte of a buffer. (A copy would not do: its target is read from memory before it is written, and such reads would
not be counted.) Each thread count runs in a process of its own; kernels take turns, and figures are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.common.tables import Row, show_table, spread

KERNELS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
BYTES_A_PARAMETER = 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hidden", type=int, default=1024, help="parameters: those of a transformer layer so wide")
    parser.add_argument("--repeats", type=int, default=9)


def measure(args: argparse.Namespace) -> list[Row]:
    rows = []
    for threads in args.threads:
        command = [sys.executable, __file__, str(threads), str(args.hidden), str(args.repeats)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        rows += rows_of(json.loads(done.stdout), threads)
    return rows


def rows_of(found: dict, threads: int) -> list[Row]:
    """A row for each kernel, and a row for the limit: nanoseconds a parameter for each repeat."""
    streams = [3 * found["stream_bytes"] / seconds for seconds in found["stream"]]
    limit = 1e9 * BYTES_A_PARAMETER / statistics.median(streams)
    rows = []
    for name in KERNELS:
        nanoseconds = [1e9 * seconds / found["parameters"] for seconds in found[name]]
        over = statistics.median(nanoseconds) / limit
        rows.append({"kernel": name, "threads": threads, "nanoseconds": nanoseconds, "over_limit": over})
    limits = [1e9 * BYTES_A_PARAMETER / each for each in streams]
    return [*rows, {"kernel": "limit", "threads": threads, "nanoseconds": limits, "bandwidth": streams}]


def timed(threads: int, hidden: int, repeats: int) -> dict:
    """Measure the seconds of each kernel's steps and of additions in place, in turns, on a layer's tensors."""
    torch.set_num_threads(threads)
    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden), *[(hidden,)] * 13]
    optimizers = {}
    for name, flags in KERNELS.items():
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for each in parameters:
            each.grad = torch.randn_like(each)
        optimizers[name] = torch.optim.AdamW(parameters, **flags)
        optimizers[name].step()  # makes the moments
    count = sum(each.numel() for each in parameters)
    source, target = torch.randn(4 * count), torch.zeros(4 * count)  # far beyond the caches
    found = {"parameters": count, "stream_bytes": source.nbytes, "stream": [], **{name: [] for name in KERNELS}}
    for _ in range(repeats):
        for name, call in {**{name: each.step for name, each in optimizers.items()}, "stream": None}.items():
            start = time.perf_counter()
            target.add_(source) if call is None else call()
            found[name].append(time.perf_counter() - start)
    return found


COLUMNS = {
    "": lambda row: row["kernel"],
    "threads": lambda row: str(row["threads"]),
    "ns a parameter": lambda row: spread(row["nanoseconds"], 2),
    "over the limit": lambda row: f"{row['over_limit']:.2f}" if "over_limit" in row else "",
    "GB/s of an addition": lambda row: f"{statistics.median(row['bandwidth']) / 1e9:.1f}" if "bandwidth" in row else "",
}


def show(rows: list[Row]) -> None:
    show_table("the host's AdamW, FP32: ns a parameter, median (least-greatest)", COLUMNS, rows)


def complaints(rows: list[Row]) -> list[str]:
    """The violated requirements: none, since this part has no requirements."""
    return []


if __name__ == "__main__":
    print(json.dumps(timed(*map(int, sys.argv[1:4]))))
