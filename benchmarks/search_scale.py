"""The time of a planner's search, and its growth with the number of choices.

    python benchmarks/search_scale.py
    python benchmarks/search_scale.py --models 13B 134B --repeat 3

The searches are for GPT-3s of growing size on A100 80 GB, over all schedules and choices, as in `tools/grid_search.py
search`. The table has one line for each model: its choices (kept and rejected), the stages of all configurations whose
memory or time was estimated, the CPU seconds to explore and microseconds for each of those stages, and the seconds to
prove and simulate the best choices. CPU seconds are used since one thread works without waiting, so the figures hold on
a busy machine, too. "command" is the wall time of the whole command, interpreter and imports included. The last line
fits exploring seconds = c * stages ** e over all models; e = 1 is linear growth. If the output is not a terminal, it is
one JSON object.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.program_scale import exponent
from megatron.planner import Architecture, Cluster, Configuration, RankMemory, load_cluster
from megatron.planner.job.cluster import CLUSTERS
from megatron.planner.planner import Planner
from megatron.planner.search import Outcome, Space, Training, search
from megatron.planner.time.calibration import default_constants
from megatron.planner.time.first_principles import FirstPrinciples

ROOT = Path(__file__).resolve().parent.parent
MODELS = {  # layers, hidden size, heads, nodes of 8 GPUs, sequences in a batch
    "13B": (40, 5120, 40, 1, 32),
    "96B": (80, 9984, 104, 4, 128),
    "134B": (84, 11520, 120, 6, 192),
    "175B": (96, 12288, 96, 128, 1536),
    "530B": (105, 20480, 128, 280, 1920),
    "1T": (128, 25600, 160, 384, 3072),
}
"""The models and GPUs of BPipe's table 1, of Brown et al. 2020, Smith et al. 2022, and Narayanan et al. 2021b."""


@dataclass(frozen=True)
class Measurement:
    """The measurement of one model: the least CPU seconds over the repetitions, and the wall time of the command."""

    model: str
    num_gpus: int
    num_kept: int
    num_rejected: int
    num_stages: int
    num_simulated: int
    explore_seconds: float
    simulate_seconds: float
    command_seconds: float | None

    @property
    def num_choices(self) -> int:
        return self.num_kept + self.num_rejected


def measure(name: str, repeat: int, *, command: bool) -> Measurement:
    layers, hidden, heads, nodes, batch = MODELS[name]
    shape = Architecture.gpt3(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, sequence_length=2048, vocabulary_size=51200
    )
    file = load_cluster(CLUSTERS / "A100-80.yaml")
    cluster = Cluster(**{**file.model_dump(exclude_none=True), "nodes": nodes})
    space = Space(num_gpus=cluster.num_gpus, gpus_per_node=8, global_batch_size=batch)
    explore, simulate = [], []
    for _ in range(repeat):
        explored, _, num_stages = _search(shape, cluster, space, num_simulated=0)
        total, outcome, _ = _search(shape, cluster, space, num_simulated=None)
        explore.append(explored)
        simulate.append(max(0.0, total - explored))
    return Measurement(
        name, cluster.num_gpus, len(outcome.kept), len(outcome.rejected), num_stages,
        sum(each.is_simulated for each in outcome.kept), min(explore), min(simulate),
        _command_seconds(name) if command else None,
    )  # fmt: skip


class _Counting(Planner):
    """A planner that counts the stages that it estimates."""

    num_stages = 0

    def memory(self, configuration: Configuration, *args: object, **choices: object) -> tuple[RankMemory, ...]:
        self.num_stages += configuration.num_stages
        return super().memory(configuration, *args, **choices)


def _search(
    shape: Architecture, cluster: Cluster, space: Space, *, num_simulated: int | None
) -> tuple[float, Outcome, int]:
    """Run a search. Returns its CPU seconds, its outcome, and the number of stages that it estimated."""
    _clear()
    planner = _Counting(shape, cluster, FirstPrinciples(shape, cluster, constants=default_constants()))
    gc.collect()
    start = time.process_time()
    outcome = search(space, lambda _: planner, Training(), num_simulated=num_simulated)
    return time.process_time() - start, outcome, planner.num_stages


def _clear() -> None:
    """Clear the caches of all functions, since values of an earlier search would make the next one faster."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _command_seconds(name: str) -> float:
    layers, hidden, heads, nodes, batch = MODELS[name]
    argv = [
        sys.executable, str(ROOT / "tools" / "grid_search.py"), "search", "--cluster", "A100-80", "--nodes", nodes,
        "--num-layers", layers, "--hidden-size", hidden, "--num-attention-heads", heads, "--seq-length", 2048,
        "--vocab-size", 51200, "--global-batch-size", batch, "--transformer-impl", "local", "--json",
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run([str(word) for word in argv], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - start


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="which")
    parser.add_argument("--repeat", type=int, default=1, help="the least time of so many is taken")
    parser.add_argument("--no-command", action="store_true", help="only in this process")
    return parser.parse_args(arguments)


def show(measurements: list[Measurement], slope: float | None) -> None:
    """Print the table, and the fit below it."""
    table = Table(title="searches on A100 80 GB")
    for column in (
        "GPT-3",
        "GPUs",
        "choices",
        "kept",
        "stages",
        "explore s",
        "us each",
        "simulated",
        "simulate s",
        "command s",
    ):
        table.add_column(column, justify="right")
    for each in measurements:
        table.add_row(
            each.model, str(each.num_gpus), f"{each.num_choices:,}", f"{each.num_kept:,}", f"{each.num_stages:,}",
            f"{each.explore_seconds:.2f}", f"{1e6 * each.explore_seconds / each.num_stages:.0f}",
            str(each.num_simulated), f"{each.simulate_seconds:.2f}",
            "" if each.command_seconds is None else f"{each.command_seconds:.1f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    if slope is not None:
        console.print(f"exploring seconds ~ stages ** {slope:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    measurements = [measure(name, args.repeat, command=not args.no_command) for name in args.models]
    sizes, seconds = zip(*((each.num_stages, each.explore_seconds) for each in measurements), strict=True)
    slope = exponent(sizes, seconds) if len(set(sizes)) > 1 else None
    if sys.stdout.isatty():
        show(measurements, slope)
    else:
        models = [asdict(each) | {"num_choices": each.num_choices} for each in measurements]
        json.dump({"exponent": slope, "models": models}, sys.stdout, indent=2)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
