"""Real computation of the relay on a CPU, beside `flush` with full recompute and other systems that offload.

Every contender has a process of its own and is idle while another contender trains. Contenders take turns, in an order
that changes, on the same cores. Model, data, kernels of the optimizer and the number of microbatches are the same, and
the losses must be equal. A second core could serve the relay's lanes, or computations of `flush`. So there are two
figures: with one core and one computing thread, and with two cores and two computing threads.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.common.processes import environment
from benchmarks.common.tables import Row, show_table, spread
from benchmarks.common.thread_times import thread_times
from papers.l2l.model import Flush, Model, Relay
from papers.l2l.peers import FullyShard, Zero
from tests.pipeline.runtime.relay.device_meter import DeviceMeter

CONTENDERS = {
    "flush": Flush,
    "l2l eager": lambda model: Relay(model, update="eager"),
    "l2l deferred": lambda model: Relay(model, update="deferred"),
    "FSDP2, CPUOffloadPolicy": FullyShard,
    "ZeRO-Offload": lambda model: Zero(model, 2),
    "ZeRO-3, all offloaded": lambda model: Zero(model, 3),
}
"""Name -> the function that makes the contender, in the order of the table."""


def train(contender, num_microbatches: int, num_batches: int) -> dict:
    before, start = thread_times(), time.perf_counter()
    losses = [contender.run(num_microbatches) for _ in range(num_batches)]
    seconds = (time.perf_counter() - start) / num_batches
    threads = thread_times().since(before, per=num_batches)
    return {"seconds": seconds, "losses": losses, "ran": threads.ran, "waited": threads.waited}


class BatchMeter(DeviceMeter):
    """A meter of the storages that a batch makes; earlier storages do not count."""

    def __init__(self) -> None:
        super().__init__()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        plain = [each for each in tensors if type(each) in (torch.Tensor, torch.nn.Parameter)]
        self._before = {each.untyped_storage().data_ptr() for each in plain}

    def _is_shared(self, address: int) -> bool:
        return address in self._before or super()._is_shared(address)


def metered(contender, num_microbatches: int) -> dict:
    """Run a batch, and count bytes.

    Returns `made`, the most device bytes that the batch makes in addition to existing memory; `state`, the bytes that
    are always on the device; and `moved`, the bytes moved between host and device, or None if they are not counted.
    """
    gc.collect()
    before = contender.num_bytes_moved
    with BatchMeter() as meter:
        contender.run(num_microbatches)
    moved = None if before is None else contender.num_bytes_moved - before
    return {"made": meter.peak, "state": contender.device_state_bytes, "moved": moved}


def work(contenders: Mapping[str, Callable], make_model: Callable) -> None:
    """Train one contender by commands on standard input, `MICROBATCHES BATCHES` or `meter MICROBATCHES`.

    Each line is answered with one line of JSON. Before that, one line says that the contender is ready, or why it
    cannot run here. The arguments of the process are the contender's name and the keywords of `make_model`, as JSON.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error

    def answer(**found: object) -> None:
        print(json.dumps(found), file=answers, flush=True)

    name, extent = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        contender = contenders[name](make_model(**extent))
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    answer(ready=name)
    for line in sys.stdin:
        first, second = line.split()
        answer(**(metered(contender, int(second)) if first == "meter" else train(contender, int(first), int(second))))
    os._exit(0)


NAMES = tuple(CONTENDERS)
AT_ONCE = ("l2l eager", "FSDP2, CPUOffloadPolicy", "ZeRO-Offload", "ZeRO-3, all offloaded")
"""Contenders that also run with the batch as one microbatch, which moves the least bytes if weights are brought to the
device for each microbatch."""
GOAL = 0.95
"""The required share of the speed of `flush`, with one core and eight microbatches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES), help="flush is always one")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--microbatches", type=int, default=8, help="m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=1, help="of each contender in a round")
    for name, default in (("layers", 12), ("hidden", 256), ("sequence", 128), ("microbatch-size", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)


class Worker:
    """The process of one contender. `failed`: the reason why it cannot run here, or None.

    Args:
        program: the module that the process runs, which calls `work`.
    """

    def __init__(
        self, name: str, extent: dict, cores: int, num_microbatches: int, program: str = __spec__.name
    ) -> None:
        self.num_microbatches = num_microbatches
        chosen = set(sorted(os.sched_getaffinity(0))[:cores])
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, name, json.dumps(extent)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(OMP_NUM_THREADS=str(cores)),
            preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        )  # fmt: skip
        self.failed = self._answer().get("failed")

    def ask(self, *words: object) -> dict:
        print(*words, file=self._process.stdin, flush=True)
        return self._answer()

    def train(self, num_batches: int) -> dict:
        return self.ask(self.num_microbatches, num_batches)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"failed": f"the process ended with {self._process.wait(60)}"}


def measure(args: argparse.Namespace) -> list[Row]:
    extent = {name: getattr(args, name) for name in ("layers", "hidden", "sequence", "microbatch_size")}
    names = [name for name in NAMES if name in {"flush", *args.contenders}]
    return [row for cores in args.cores for row in compare(names, extent, cores, args)]


def started(names: list[str], extent: dict, cores: int, m: int) -> dict[str, Worker]:
    """Start the processes of all contenders. Returns name in the table -> process."""
    at_once = {**extent, "microbatch_size": m * extent["microbatch_size"], "drawn_together": m}
    return {name: Worker(name, extent, cores, m) for name in names} | {
        f"{name}, one microbatch": Worker(name, at_once, cores, 1) for name in names if name in AT_ONCE
    }


def compare(names: list[str], extent: dict, cores: int, args: argparse.Namespace) -> list[Row]:
    workers = started(names, extent, cores, args.microbatches)
    return take_turns(workers, cores, rounds=args.rounds, batches=args.batches)


def take_turns(workers: Mapping[str, Worker], cores: int, *, rounds: int, batches: int = 1) -> list[Row]:
    """Run all rounds. Returns a row for each contender; `over_flush`: for each round, its speed over flush's."""
    running = {name: worker for name, worker in workers.items() if worker.failed is None}
    trained = {name: [] for name in running}
    first = {name: worker.train(1)["losses"] for name, worker in running.items()}  # memory, moments
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(running), len(running)):
            trained[name].append(running[name].train(batches))
    metered = {name: worker.ask("meter", worker.num_microbatches) for name, worker in running.items()}
    rows: list[Row] = []
    for name, worker in workers.items():
        row = {"contender": name, "cores": cores, "microbatches": worker.num_microbatches, "failed": worker.failed}
        if worker.failed is None:
            seconds = [each["seconds"] for each in trained[name]]
            flush = [each["seconds"] for each in trained["flush"]]
            row |= {
                "seconds": seconds,
                "over_flush": [theirs / own for theirs, own in zip(flush, seconds, strict=True)],
                "losses": first[name] + [loss for each in trained[name] for loss in each["losses"]],
                "threads": {key: [each[key] for each in trained[name]] for key in ("ran", "waited")},
                **metered[name],
            }
            worker.end()
        rows.append(row)
    return rows


def complaints(rows: list[Row]) -> list[str]:
    """The violated requirements, a sentence each."""
    found = []
    for row in rows:
        what = f"{row['contender']} on {row['cores']} cores"
        if row["failed"] is not None:
            continue  # a row of its own in the table
        flush = next(each for each in rows if each["contender"] == "flush" and each["cores"] == row["cores"])
        if not all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(row["losses"], flush["losses"], strict=True)):
            found.append(f"{what}: its losses are not those of flush")
        if row["contender"] in ("l2l eager", "l2l deferred") and row["losses"] != flush["losses"]:
            found.append(f"{what}: its losses are not those of flush to the last bit")
        if row["contender"] == "l2l eager" and row["cores"] == 1 and statistics.median(row["over_flush"]) < GOAL:
            found.append(f"{what}: {statistics.median(row['over_flush']):.3f} of the speed of flush, below {GOAL}")
    return found


def shown_threads(row: Row) -> str:
    """The milliseconds for which each thread ran in a batch, the longest first, as medians of the rounds."""
    names = {name for each in row["threads"]["ran"] for name in each}
    times = {name: 1e3 * statistics.median(each.get(name, 0.0) for each in row["threads"]["ran"]) for name in names}
    chosen = sorted((name for name in times if times[name] >= 1), key=lambda name: -times[name])
    return ", ".join(f"{name.removeprefix('pipeline ')} {times[name]:.0f}" for name in chosen[:4])


def _measured(cell):
    return lambda row: "" if row["failed"] is not None else cell(row)


COLUMNS = {
    "": lambda row: row["contender"],
    "cores": lambda row: str(row["cores"]),
    "m": lambda row: str(row["microbatches"]),
    "seconds a batch": _measured(lambda row: f"{statistics.median(row['seconds']):.3f}"),
    "over flush": _measured(lambda row: spread(row["over_flush"], 3)),
    "device MiB": _measured(lambda row: f"{(row['state'] + row['made']) / 2**20:.1f}"),
    "of it state": _measured(lambda row: f"{row['state'] / 2**20:.1f}"),
    "MiB moved": _measured(lambda row: "" if row["moved"] is None else f"{row['moved'] / 2**20:.0f}"),
    "ms of threads": _measured(shown_threads),
    "last loss": lambda row: f"{row['losses'][-1]:.9f}" if row["failed"] is None else row["failed"][:40],
}


def show(rows: list[Row]) -> None:
    show_table("real computation: flush with full recompute, the relay, and others that offload", COLUMNS, rows)


if __name__ == "__main__":
    work(CONTENDERS, Model)
