"""How close the runtime comes to the ideal of a schedule, measured with stages that sleep instead of computing.

    python benchmarks/emulated.py
    python benchmarks/emulated.py --stages 8 --multiples 1 --repeats 5 --json emulated.json

Forwards and backwards sleep (20 and 40 ms), every microbatch moves real bytes between real processes, and reductions are
real collectives, so many stages fit on few cores and what remains is the schedule and the runtime. Four tables:

1. Time per batch of flush and 2bw over their ideals, (m+p-1)(f+b) and m(f+b), in steady state. What a schedule cannot hide
   is a microbatch's round trip, 2(p-1) transfers, divided by the p microbatches in flight; it is measured (one-way latency
   of the payload), shown as `latency`, and taken out in `beyond`. `--pipeline-extra-warmup` puts 2p-1 in flight and so hides it.
2. Time per batch of 2bw with a reduction chain (d=2, tied embedding, norm) that takes 25, 50 and 90% of the slack of
   stage 0, (m-p+1)(f+b), over the time without. Each reduction is an all-reduce of some bytes, then sleeps for what a slower
   network would take.
3. 2bw over flush at m=p.
4. CPU microseconds that the executor's thread takes per instruction, when stages compute nothing.

Settings are alternated within a repetition, and the medians over repetitions are shown with their spread.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron.pipeline.runtime.emulated_stage import EmulatedReduction, EmulatedStage, EmulatedTimes, EmulatedUpdate
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.trace import Tracer
from megatron.pipeline.schedules import Schedule

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Setting:
    """One thing to measure. `chain`: share of stage 0's slack that the reductions take, 0 for none."""

    preset: str
    num_stages: int
    num_microbatches: int
    extra_warmup: bool = False
    chain: float = 0.0
    num_replicas: int = 1


@dataclass(frozen=True)
class Load:
    """What the emulated stages do: seconds and bytes per microbatch, bytes per reduction, batches per measurement."""

    forward: float
    backward: float
    payload_bytes: int
    chain_bytes: int
    num_batches: int

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Groups:
    """The process groups of a job of `num_replicas` pipelines, made once; replicas are blocks of successive ranks."""

    def __init__(self, num_stages: int, num_replicas: int) -> None:
        world = num_stages * num_replicas
        self.replica, self.stage = divmod(dist.get_rank(), num_stages)
        self.ranks = range(self.replica * num_stages, (self.replica + 1) * num_stages)
        self.job = dist.new_group(list(range(world)))
        replicas = [dist.new_group(list(range(stage, world, num_stages))) for stage in range(num_stages)]
        ties = [
            dist.new_group([first, first + num_stages - 1]) if num_stages > 1 else None
            for first in range(0, world, num_stages)
        ]
        self.same_stage = replicas[self.stage]
        self.tied = ties[self.replica]


def make_engine(setting: Setting, load: Load, groups: Groups, tracer: Tracer | None = None) -> PipelineEngine:
    p = setting.num_stages
    has_chain = setting.chain > 0
    schedule = Schedule.preset(
        setting.preset,
        num_stages=p,
        extra_warmup=setting.extra_warmup,
        data_parallel=has_chain,
        tied_embeddings=has_chain and p > 1,
    )
    grad = embed = None
    if has_chain:
        seconds = setting.chain * (setting.num_microbatches - p + 1) * load.both
        shares = (0.8, 0.2) if p > 1 else (1.0, 0.0)
        grad = EmulatedReduction(load.chain_bytes, groups.same_stage, seconds=seconds * shares[0])
        if groups.stage in (0, p - 1) and p > 1:
            embed = EmulatedReduction(load.chain_bytes, groups.tied, seconds=seconds * shares[1])
    stage = EmulatedStage(
        index=groups.stage,
        num_stages=p,
        times=EmulatedTimes(load.forward, load.backward),
        payload_bytes=load.payload_bytes,
    )
    update = EmulatedUpdate(grad=grad, embed=embed, job_group=groups.job)
    return PipelineEngine(schedule, stage, update, ranks=groups.ranks, timeout=TIMEOUT, tracer=tracer)


def time_per_batch(setting: Setting, load: Load, groups: Groups) -> tuple[float, int]:
    """(seconds per batch in steady state as stage 0 sees it, its most saved microbatches)."""
    engine = make_engine(setting, load, groups)
    dist.barrier()
    m, warmup, starts = setting.num_microbatches, 2, []
    for _ in range(warmup + load.num_batches + 1):
        starts.append(time.monotonic())
        engine.run_batch(m, m)
    engine.drain()
    peak = max(engine.saved_microbatches_peak.values())
    dist.barrier()
    engine.close()
    return (starts[-1] - starts[warmup]) / load.num_batches, peak


def one_way_latency(setting: Setting, load: Load, groups: Groups) -> float:
    """Seconds that a payload takes from one stage to the next when nothing else moves: half a round trip, median."""
    p = setting.num_stages
    engine = make_engine(Setting("flush", p, 1), Load(0.0, 0.0, load.payload_bytes, 0, 1), groups)
    seconds = []
    for _ in range(30):
        dist.barrier()
        start = time.monotonic()
        engine.run_batch(1, 1)
        seconds.append((time.monotonic() - start) / (2 * (p - 1)) if p > 1 else 0.0)
    engine.close()
    return statistics.median(seconds)


def microseconds_per_instruction(setting: Setting, groups: Groups, *, tracing: bool) -> float:
    """CPU time of this rank's main thread, when stages do nothing and payloads are 4 bytes; waiting for others not counted."""
    engine = make_engine(setting, Load(0.0, 0.0, 4, 0, 1), groups, Tracer(num_batches=2) if tracing else None)
    m = setting.num_microbatches
    for _ in range(5):
        engine.run_batch(m, m)
    before, start = engine.num_instructions_executed, time.thread_time()
    for _ in range(50):
        engine.run_batch(m, m)
    seconds = time.thread_time() - start
    executed = engine.num_instructions_executed - before
    engine.drain()
    dist.barrier()
    engine.close()
    return seconds / executed * 1e6


def worker(rank: int, world: int, directory: str, settings: list[Setting], load: Load, repeats: int) -> None:
    """Measure all settings of one job size; rank 0 writes the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    first = settings[0]
    groups = Groups(first.num_stages, first.num_replicas)
    seconds, peaks = defaultdict(list), {}
    latency = [one_way_latency(first, load, groups)]
    for repeat in range(repeats):
        for setting in settings if repeat % 2 == 0 else settings[::-1]:
            measured, peaks[setting] = time_per_batch(setting, load, groups)
            seconds[setting].append(measured)
        latency.append(one_way_latency(first, load, groups))
    if rank == 0:
        rows = [asdict(setting) | {"seconds": seconds[setting], "peak_saved": peaks[setting]} for setting in settings]
        text = json.dumps({"latency": statistics.median(latency), "rows": rows})
        (Path(directory) / "result.json").write_text(text)
    dist.barrier()
    os._exit(0)


def overhead_worker(rank: int, world: int, directory: str, repeats: int) -> None:
    """Measure the executor's own cost."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    groups = Groups(world, 1)
    setting = Setting("2bw", world, 64)
    results = {
        ("traced" if tracing else "plain"): [
            microseconds_per_instruction(setting, groups, tracing=tracing) for _ in range(repeats)
        ]
        for tracing in (False, True)
    }
    if rank == 0:
        (Path(directory) / "result.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)


def run_job(target, world: int, *arguments) -> dict:
    """Start `world` processes and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory(prefix="emulated-") as directory:
        context = torch.multiprocessing.spawn(
            target, args=(world, directory, *arguments), nprocs=world, join=False, start_method="spawn"
        )
        while not context.join():
            pass
        return json.loads((Path(directory) / "result.json").read_text())


def ideal(row: dict, load: Load) -> float:
    """Seconds per batch without any latency."""
    m, p = row["num_microbatches"], row["num_stages"]
    return (m + p - 1 if row["preset"] == "flush" else m) * load.both


def unavoidable(row: dict, load: Load, latency: float) -> float:
    """Seconds per batch of transfer latency that the schedule cannot hide: m round trips shared by those in flight."""
    m, p = row["num_microbatches"], row["num_stages"]
    round_trip = 2 * (p - 1) * latency
    if row["extra_warmup"]:
        return max(0.0, m * (p * load.both + round_trip) / (2 * p - 1) - m * load.both)
    return m * round_trip / p


def schedule_table(rows: list[dict], load: Load, latencies: dict[int, float]) -> Table:
    table = Table(title=f"Time per batch over the ideal (f = {load.forward * 1e3:g} ms, b = {load.backward * 1e3:g} ms)")
    for column in ("schedule", "p", "m", "ideal ms", "measured ms", "over ideal", "latency", "beyond", "spread", "peak saved"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        p = row["num_stages"]
        best, seconds = ideal(row, load), statistics.median(row["seconds"])
        share = unavoidable(row, load, latencies[p]) / best
        row |= {"ideal": best, "over_ideal": seconds / best, "latency_share": share, "beyond": seconds / best - share}
        name = row["preset"] + (" +warm-up" if row["extra_warmup"] else "")
        table.add_row(
            name, str(p), str(row["num_microbatches"]), f"{best * 1e3:.0f}", f"{seconds * 1e3:.1f}", f"{seconds / best:.4f}",
            f"{share:.2%}", f"{row['beyond'] - 1:+.2%}", spread(row["seconds"]), str(row["peak_saved"]),
        )  # fmt: skip
    return table


def chain_table(rows: list[dict], load: Load) -> Table:
    table = Table(title="2bw with gradient, embedding and norm reductions (d = 2) over 2bw without")
    for column in ("p", "m", "share of slack", "chain ms", "measured ms", "over no chain", "spread"):
        table.add_column(column, justify="right")
    without = {
        (row["num_stages"], row["num_microbatches"]): statistics.median(row["seconds"]) for row in rows if not row["chain"]
    }
    for row in rows:
        m, p, seconds = row["num_microbatches"], row["num_stages"], statistics.median(row["seconds"])
        row["over_no_chain"] = seconds / without[p, m]
        table.add_row(
            str(p), str(m), f"{row['chain']:.0%}", f"{row['chain'] * (m - p + 1) * load.both * 1e3:.0f}",
            f"{seconds * 1e3:.1f}", f"{row['over_no_chain']:.4f}", spread(row["seconds"]),
        )  # fmt: skip
    return table


def ratio_table(rows: list[dict]) -> Table:
    table = Table(title="2bw over flush: time of a flush batch by that of a 2bw batch")
    for column in ("p", "m", "measured", "ideal (m+p-1)/m"):
        table.add_column(column, justify="right")
    seconds = {
        (row["preset"], row["num_stages"], row["num_microbatches"]): statistics.median(row["seconds"])
        for row in rows
        if not row["extra_warmup"]
    }
    for (preset, p, m), flush in seconds.items():
        if preset == "flush":
            table.add_row(str(p), str(m), f"{flush / seconds['2bw', p, m]:.3f}", f"{(m + p - 1) / m:.3f}")
    return table


def overhead_table(overheads: dict[int, dict]) -> Table:
    table = Table(title="Executor: CPU microseconds per instruction when stages do nothing (2bw, m = 64)")
    for column in ("p", "what an instruction includes", "plain", "traced"):
        table.add_column(column, justify="left" if "what" in column else "right")
    for p, row in overheads.items():
        what = "no transfers" if p == 1 else "gloo sends and receives of 4 bytes"
        table.add_row(str(p), what, *(f"{statistics.median(row[kind]):.1f}" for kind in ("plain", "traced")))
    return table


def spread(seconds: list[float]) -> str:
    return f"{(max(seconds) - min(seconds)) / statistics.median(seconds):.2%}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="pipeline sizes p")
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 2, 4], help="m = p times each of these")
    parser.add_argument("--chain-shares", type=float, nargs="+", default=[0.25, 0.5, 0.9], help="of stage 0's slack")
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--backward-ms", type=float, default=40.0)
    parser.add_argument("--payload-bytes", type=int, default=1 << 20, help="per microbatch and direction")
    parser.add_argument("--chain-bytes", type=int, default=1 << 18, help="per all-reduce of the chain")
    parser.add_argument("--batches", type=int, default=4, help="batches per measurement, after two to settle")
    parser.add_argument("--repeats", type=int, default=3, help="alternated repetitions; medians are shown")
    parser.add_argument("--skip", nargs="*", default=[], choices=["schedules", "chain", "overhead"])
    parser.add_argument("--json", type=Path, help="write all measurements here as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    load = Load(
        arguments.forward_ms / 1e3,
        arguments.backward_ms / 1e3,
        arguments.payload_bytes,
        arguments.chain_bytes,
        arguments.batches,
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    report: dict = {"load": asdict(load), "num_cpus": os.cpu_count()}
    if "schedules" not in arguments.skip:
        rows, latencies = [], {}
        for p in arguments.stages:
            settings = []
            for m in (p * multiple for multiple in arguments.multiples):
                settings += [Setting("flush", p, m), Setting("2bw", p, m)]
                if m >= 2 * p - 1:
                    settings.append(Setting("2bw", p, m, extra_warmup=True))
            result = run_job(worker, p, settings, load, arguments.repeats)
            rows += result["rows"]
            latencies[p] = result["latency"]
        console.print(schedule_table(rows, load, latencies))
        console.print("one-way latency of the payload:", ", ".join(f"p={p}: {s * 1e3:.2f} ms" for p, s in latencies.items()))
        console.print(ratio_table(rows))
        report |= {"schedules": rows, "latencies": latencies}
    if "chain" not in arguments.skip:
        rows = []
        for p in arguments.stages:
            settings = [Setting("2bw", p, p, chain=share, num_replicas=2) for share in (0.0, *arguments.chain_shares)]
            rows += run_job(worker, 2 * p, settings, load, arguments.repeats)["rows"]
        console.print(chain_table(rows, load))
        report["chain"] = rows
    if "overhead" not in arguments.skip:
        overheads = {p: run_job(overhead_worker, p, arguments.repeats) for p in (1, 2)}
        console.print(overhead_table(overheads))
        report["overhead_microseconds"] = overheads
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
