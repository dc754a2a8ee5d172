"""The models on which mixed stages beat sequential ones, and where their gain ends.

    python -m papers.ftpipe.mixed_cuts                            # tables; far longer than the one of docs/partition.md
    python -m papers.ftpipe.mixed_cuts "Whisper-small" --devices 4 --rooms 1.5 --units layers --measure 0.08
    python -m papers.ftpipe.mixed_cuts "T5-base, 512 to 4 tokens" --devices 4 --rooms 1.1 1.2 1.4 2 none

The models are captured without their weights, and a roofline of an RTX 3090 prices their operators in single precision
(partition_units_graphs.py; 12 GB/s between devices, AdamW's 16 bytes a parameter). The best sequential partition is
exact for its order of computation; the best mixed one has at most two stages on a device, or is the sequential one,
where none is faster. Both have the same limit of memory.

With `--measure` both partitions also run, in turns, on a process for each device, with the real engine. Their stages
sleep for the estimated times and their transfers arrive after the estimated times, all scaled by one factor.

room       the limit of memory over an even share of all that the model needs, or over its largest unit where that is
           more; `none`: no limit
gain       the objective of sequential over that of mixed (docs/partition.md), which counts a transfer only where it
           takes longer than all that its device computes; in brackets as simulated, with a batch of one microbatch,
           where a transfer also costs what the few microbatches in flight cannot hide
grain      the largest layer's time over an even share of all layers' time: what a sequential cut of layers can lose
spread     memory for each millisecond in the second half of the model's time, in its order, over that in the first
           half, or the inverse: what a tight limit can make it lose
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from megatron.partition import Graph
from megatron.partition.units import Units, compiled
from papers.ftpipe.asynchronous import Contender, Job, contender_of, measured, of_busiest_rank, simulated
from papers.ftpipe.mixed_models import MODELS
from papers.ftpipe.partition_units import LIMITLESS, METHODS, measure
from papers.ftpipe.partition_units_graphs import Case, Estimated, estimated

UNITS = ("operators", "layers")


@dataclass(frozen=True)
class Gain:
    """Sequential against mixed stages.

    Attributes:
        objective_ms, simulated_ms: by method, milliseconds of a microbatch. A method of which no partition fits is
            missing.
        stages: the device of each mixed stage.
        measured_ms: by method, the same of each round; empty: nothing ran.
    """

    model: str
    devices: int
    room: float | None
    units: str
    objective_ms: dict[str, float]
    simulated_ms: dict[str, float]
    stages: tuple[int, ...] = ()
    measured_ms: dict[str, list[float]] = field(default_factory=dict)

    def text(self) -> str:
        """The gain as a cell of the table."""
        if len(self.objective_ms) < len(METHODS):
            return "mixed only" if self.objective_ms else "nothing fits"
        by_objective, by_simulation = (
            times["sequential"] / times["mixed"] for times in (self.objective_ms, self.simulated_ms)
        )
        return f"{by_objective:.2f} ({by_simulation:.2f})"


def limited(model: Estimated, num_devices: int, room: float | None) -> Estimated:
    """The model for a number of devices with a limit of memory; see `room` above."""
    content = model.content | {"num_devices": num_devices, "memory_limit_bytes": LIMITLESS}
    if room is not None:
        units = compiled(replace(model, content=content).graph("layers"))
        shared = [num_bytes for num_bytes, _ in units.shared]
        even = (sum(units.memory) + sum(shared)) / num_devices
        content["memory_limit_bytes"] = room * max(even, *(each + sum(shared) for each in units.memory if each), 0.0)
    return replace(model, content=content)


def shape_of(graph: Graph, num_devices: int) -> tuple[float, float]:
    """The grain and the spread of a graph of layers; see above."""
    units = compiled(graph)
    grain = max(units.time) * num_devices / sum(units.time)
    halves = [0.0, 0.0]
    done = 0.0
    for unit in range(len(units)):
        first = (
            min(1.0, max(0.0, (sum(units.time) / 2 - done) / units.time[unit]))
            if units.time[unit]
            else float(done < sum(units.time) / 2)
        )
        halves[0] += first * _memory(units, unit)
        halves[1] += (1 - first) * _memory(units, unit)
        done += units.time[unit]
    return grain, max(halves) / min(halves)


def _memory(units: Units, unit: int) -> float:
    return units.memory[unit] + sum(num_bytes for num_bytes, users in units.shared if users[0] == unit)


def gains(
    name: str, model: Estimated, case: Case, num_devices: int, room: float | None, *, effort: float,
    units: Sequence[str] = UNITS, run: Callable[[Mapping[str, Contender]], dict[str, list[float]]] | None = None,
) -> Iterator[Gain]:  # fmt: skip
    """Cut a model by layers and by operators, simulate the results, and `run` both partitions, where they fit."""
    model = limited(model, num_devices, room)
    found = measure(model, case, units=units, effort=effort).results
    for kind in units:
        contenders: dict[str, Contender] = {}
        for method in METHODS:
            if (kind, method) in found:
                contenders[method] = contender_of(method, model.graph(kind), found[kind, method].partition)
        objective = {method: found[kind, method].value.objective_ms for method in contenders}
        times = {method: 1000 * simulated(each) for method, each in contenders.items()}
        if len(contenders) == 2 and objective["sequential"] <= objective["mixed"]:
            for each in (contenders, objective, times):
                each["mixed"] = each["sequential"]
        stages = contenders["mixed"].schedule.rank_of_stage if contenders else ()
        ran = run(contenders) if run and len(contenders) == len(METHODS) else {}
        yield Gain(name, num_devices, room, kind, objective, times, stages, ran)


PAYLOAD = 1 << 16
"""The bytes that really travel over an edge."""


def rounds_of(contenders: Mapping[str, Contender], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Run the partitions on real ranks whose stages sleep, in turns.

    `seconds`: what the busiest rank of the mixed partition sleeps for a microbatch. Returns method -> the milliseconds
    of a microbatch in each round, scaled back to the estimates.
    """
    factor = seconds / of_busiest_rank(contenders["mixed"])
    arms = tuple(replace(each.scaled(factor), name=method) for method, each in contenders.items())
    times = measured(Job(arms, PAYLOAD, rounds))
    return {method: [1000 * each / factor for each in times[method]] for method in contenders}


def show_measured(found: Sequence[Gain], console: Console) -> None:
    """Print what ran: milliseconds of a microbatch, and the ratios of each round's."""
    table = Table("measured", "devices", "room", "units", "sequential", "mixed", "gain (least to most)", "simulated")
    for each in found:
        times = each.measured_ms
        ratios = [a / b for a, b in zip(times["sequential"], times["mixed"], strict=True)]
        table.add_row(
            each.model, str(each.devices), "none" if each.room is None else f"{each.room:g}", each.units,
            *(f"{median(times[method]):.2f}" for method in METHODS),
            f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            f"{each.simulated_ms['sequential'] / each.simulated_ms['mixed']:.3f}",
        )  # fmt: skip
    console.print(table)


def show(found: Sequence[Gain], shapes: dict[str, dict[int, tuple[float, float]]], console: Console) -> None:
    """Print the tables of the docs, one for each kind of units."""
    settings = list(dict.fromkeys((each.devices, each.room) for each in found))
    for units in dict.fromkeys(each.units for each in found):
        table = Table(f"gain by {units}", "grain", "spread")
        for devices, room in settings:
            table.add_column(f"{devices} devices\n{'no limit' if room is None else f'room {room:g}'}", justify="right")
        for name, shape in shapes.items():
            of = {(each.devices, each.room): each for each in found if (each.model, each.units) == (name, units)}
            grain = " ".join(f"{shape[devices][0]:.2f}" for devices in sorted(shape))
            spread = next(iter(shape.values()))[1]
            table.add_row(name, grain, f"{spread:.1f}", *(of[each].text() for each in settings))
        console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, json="also write every gain")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of mixed_models.py (default: all)")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8], help="default: 2 4 8")
    parser.add_argument("--rooms", type=_room, nargs="+", default=[None, 1.2], help="default: none 1.2")
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS), help="default: both")
    parser.add_argument("--effort", type=float, default=0.05, help="of the mixed search, in proportion (default: 0.05)")
    parser.add_argument(
        "--measure", type=float, metavar="SECONDS",
        help="run both partitions with sleeping stages, so that a microbatch takes mixed stages so long (such as 0.08)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="of --measure, both partitions in each (default: 5)")
    options = parser.parse_args(argv)
    if options.measure is not None and options.measure <= 0:
        parser.error(f"--measure is {options.measure:g}; give more than 0 seconds")
    run = options.measure and partial(rounds_of, seconds=options.measure, rounds=options.rounds)
    for name in options.models:
        if name not in MODELS:
            parser.error(f"'{name}' is no model; choose of {'; '.join(MODELS)}")
    found: list[Gain] = []
    shapes: dict[str, dict[int, tuple[float, float]]] = {}
    for name in options.models or MODELS:
        case = MODELS[name]
        model = estimated(name, case)
        shapes[name] = {devices: shape_of(model.graph("layers"), devices) for devices in options.devices}
        for devices in options.devices:
            for room in options.rooms:
                for gain in gains(
                    name, model, case, devices, room, effort=options.effort,
                    units=options.units, run=run,
                ):  # fmt: skip
                    found.append(gain)
                    print(f"{name}, {devices} devices, room {room}, {gain.units}: {gain.text()}", file=sys.stderr)
    show(found, shapes, terminal(200))
    if ran := [each for each in found if each.measured_ms]:
        show_measured(ran, terminal(200))
    write(options.json, {"gains": [asdict(each) for each in found], "shapes": shapes})
    return 0


def _room(text: str) -> float | None:
    return None if text == "none" else float(text)


if __name__ == "__main__":
    sys.exit(main())
