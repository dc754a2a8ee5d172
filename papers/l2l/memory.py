"""The device memory of the relay as models become deeper, and its training under a limit that `flush` exceeds.

On a CPU private memory of the process stands for the device's memory, and a shared mapping for the host's. There are
two measurements, neither of which uses the relay's own accounts:

depth   a meter of all private storages that torch's operations make (`DeviceMeter`), over the depth of a model. The
        table has the growth beside the expected growth: m inputs a layer if they are saved on the device, otherwise
        nothing. Counts of bytes do not depend on the machine.
limit   `ulimit -d`: the same model, data and limit for `flush` and the relay, each in a process of its own.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common.processes import environment
from benchmarks.common.tables import Row, show_table
from megatron.pipeline.program.lane_order import HOST
from papers.l2l.model import Flush, Model, Relay, Training
from tests.pipeline.runtime.relay.device_meter import DeviceMeter

CONTENDERS = {
    "flush": Flush,
    "l2l": lambda model: Relay(model, update="deferred"),
    "l2l eager": lambda model: Relay(model, update="eager"),
}


def memory_of_process(name: str) -> int:
    """The bytes in row `name` of /proc/self/status, such as VmData."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[name].split()[0]) * 1024


def train(name: str, model: Model, num_microbatches: int, num_batches: int) -> dict:
    found = {"contender": name, "layers": model.layers, "imported": memory_of_process("VmData"), "losses": []}
    most = found["imported"]
    try:
        contender = CONTENDERS[name](model)
        for _ in range(num_batches):
            found["losses"].append(contender.run(num_microbatches))
            most = max(most, memory_of_process("VmData"))
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" not in str(error) and "start new thread" not in str(error) and str(error):
            raise
        found["died"] = (str(error).splitlines() or [type(error).__name__])[0]
    return {**found, "data": most}


def train_limited() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    for name, default in (
        ("layers", 24), ("hidden", 128), ("sequence", 32), ("microbatches", 4), ("batches", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(layers=args.layers, hidden=args.hidden, sequence=args.sequence)
    print(json.dumps(train(args.contender, model, args.microbatches, args.batches)), flush=True)
    os._exit(0)  # threads of a failed run may wait for ever


MIB = 1 << 20
RELAYS: dict[str, Callable[[Model], Relay]] = {
    "l2l, eager": lambda model: Relay(model, update="eager"),
    "l2l, deferred": lambda model: Relay(model, update="deferred"),
    "l2l, inputs on the host": lambda model: Relay(model, update="deferred", stash=HOST),
}
"""Name of a row of `depth` -> its relay, whose device memory must grow only by the inputs that it saves there."""
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Environment variables for limited processes, with which the C library returns freed memory to the system."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sections = ("depth", "limit")
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 96, 384], help="of `depth`")
    parser.add_argument("--hidden", type=int, default=32, help="of `depth`")
    parser.add_argument("--microbatches", type=int, default=4, help="m")
    parser.add_argument("--limited-layers", type=int, nargs="+", default=[12, 48, 192], help="of `limit`")
    parser.add_argument("--limited-hidden", type=int, default=256, help="of `limit`")
    parser.add_argument("--headroom", type=int, default=256, help="MiB: the limit is what the imports take and this")


def measure(args: argparse.Namespace) -> list[Row]:
    return [row for name in args.only for row in {"depth": depth_rows, "limit": limit_rows}[name](args)]


def depth_rows(args: argparse.Namespace) -> list[Row]:
    """A row for each contender and depth: device and host bytes, and the device's growth since the smaller depth."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, make in {"flush": Flush, **RELAYS}.items():
        before = None
        for layers in sorted(args.layers):
            model = Model(layers=layers, hidden=args.hidden, sequence=16, vocabulary=64)
            device, host = metered(lambda make=make, model=model: make(model), args.microbatches)
            row = {
                "section": "depth",
                "contender": name,
                "layers": layers,
                "parameters": model.num_parameters,
                "device_bytes": device,
                "host_bytes": host,
                "expected_growth": None,
                "growth": None,
            }
            if before is not None:
                more = layers - before["layers"]
                row["growth"] = (device - before["device_bytes"]) / more
                if name in RELAYS:
                    inputs = args.microbatches * model.boundary_bytes
                    row["expected_growth"] = 0 if name == "l2l, inputs on the host" else inputs
            rows.append(row)
            before = row
    return rows


def metered(make: Callable[[], Training], num_microbatches: int) -> tuple[int, int]:
    """Train two batches. Returns (peak of the device, host) in bytes in the second batch, with all memory of the
    contender."""
    gc.collect()
    with DeviceMeter() as meter:
        contender = make()
        contender.run(num_microbatches)  # maps the host's buffers of inputs
        meter.set_host_aside()
        contender.run(num_microbatches)
    host = contender.host_bytes if isinstance(contender, Relay) else 0
    contender.close()
    return meter.peak, host


def limit_rows(args: argparse.Namespace) -> list[Row]:
    """A row for each contender and depth, with the results with and without the limit."""
    imported = limited("flush", args, layers=1)["imported"]
    limit = imported + args.headroom * MIB
    rows = []
    for layers in sorted(args.limited_layers):
        for name in ("flush", "l2l"):
            free, bound = (limited(name, args, layers=layers, limit=each) for each in (None, limit))
            rows.append(
                {
                    "section": "limit",
                    "contender": name,
                    "layers": layers,
                    "parameters": Model(layers=layers, hidden=args.limited_hidden).num_parameters,
                    "limit_bytes": limit,
                    "imported_bytes": imported,
                    "data_bytes": free["data"],
                    "losses": free["losses"],
                    "limited_losses": bound["losses"],
                    "died": bound.get("died"),
                }
            )
    return rows


def limited(name: str, args: argparse.Namespace, *, layers: int, limit: int | None = None) -> dict:
    """Train in a process of its own with at most `limit` bytes of private data. Returns its result."""
    command = f"exec {sys.executable} -m {__spec__.name} '{name}' --layers {layers} --hidden {args.limited_hidden}"
    if limit is not None:
        command = f"ulimit -d {limit // 1024}; {command}"
    variables = environment(**RETURNS_MEMORY)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, env=variables)
    if done.returncode or not done.stdout:
        return {
            "losses": [],
            "data": 0,
            "died": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1],
        }
    return json.loads(done.stdout)


def complaints(rows: list[Row]) -> list[str]:
    """The violated requirements, a sentence each."""
    found = []
    for row in rows:
        what = f"{row['contender']} of {row['layers']} layers"
        if row["section"] == "depth":
            expected = row["expected_growth"]
            if expected is not None and row["growth"] != expected:
                found.append(f"{what}: {row['growth']} bytes more a layer, and {expected} are expected")
        elif row["contender"] == "l2l" and row["died"] is not None:
            found.append(f"{what}: died under the limit: {row['died']}")
        elif row["contender"] == "l2l" and row["limited_losses"] != row["losses"]:
            found.append(f"{what}: the limit changed its losses")
    limits = [row for row in rows if row["section"] == "limit"]
    if limits and not any(row["died"] for row in limits if row["contender"] == "flush"):
        found.append("flush trained every model under the limit, which shows nothing; give less --headroom")
    losses: dict[int, list] = {}
    for row in limits:
        if losses.setdefault(row["layers"], row["losses"]) != row["losses"]:
            found.append(f"{row['layers']} layers: l2l and flush have other losses")
    return found


def shortened(text: str) -> str:
    """torch's error message without the place in its source."""
    return re.sub(r"^\[enforce fail at .*?\] *(err == 0\. *)?", "", text)[:60]


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f}"


DEPTH = {
    "": lambda row: row["contender"],
    "layers": lambda row: str(row["layers"]),
    "parameters": lambda row: f"{row['parameters']:,}",
    "device bytes": lambda row: f"{row['device_bytes']:,}",
    "bytes a layer": lambda row: "" if row["growth"] is None else f"{row['growth']:,.0f}",
    "expected": lambda row: "" if row["expected_growth"] is None else f"{row['expected_growth']:,}",
    "host bytes": lambda row: f"{row['host_bytes']:,}",
}
LIMIT = {
    "": lambda row: row["contender"],
    "layers": lambda row: str(row["layers"]),
    "parameters": lambda row: f"{row['parameters']:,}",
    "private MiB beyond the imports": lambda row: mebibytes(row["data_bytes"] - row["imported_bytes"]),
    "limit": lambda row: mebibytes(row["limit_bytes"] - row["imported_bytes"]),
    "under the limit": lambda row: "trains" if row["died"] is None else f"dies: {shortened(row['died'])}",
}


def show(rows: list[Row]) -> None:
    for section, title, columns in (
        ("depth", "device and host bytes over depth, by a meter from outside", DEPTH),
        ("limit", "`ulimit -d`: private memory limited, the same for both", LIMIT),
    ):
        chosen = [row for row in rows if row["section"] == section]
        if chosen:
            show_table(title, columns, chosen)


if __name__ == "__main__":
    train_limited()
