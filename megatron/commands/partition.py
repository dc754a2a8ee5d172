"""Cut a model's graph into pipeline stages: several methods compete, and the best partition is shown and written.

    python tools/partition.py MODEL --task sequence-classification --train_file F --devices 4 --memory 11GiB \\
        --output P.json
    python tools/partition.py --graph graph.json
    python tools/partition.py --graph graph.json --max-stages-per-device 2 --output P.json --picture P.png
    python tools/partition.py --graph graph.json --milp 60 --json

docs/partition.md describes the graph file, the methods and the objective. With --json the last line is one JSON object:
method, objective_ms, device_of_node, stage_of_node.

Exit status: 0; 1 if a file is wrong or no partition fits; 2 if the command line is wrong or a file cannot be opened;
130 after Ctrl-C.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from megatron.documents import GIB, command_line
from megatron.documents.command_line import add_flags
from megatron.documents.files import write_whole
from megatron.documents.flag_types import count, positive, usual_threads
from megatron.documents.picture import new_figure, require_picture, save
from megatron.documents.tables import console, lined_table
from megatron.finetuning.adapter_arguments import add_adapters, validate_adapter
from megatron.finetuning.arguments import add_data, add_microbatch, changed, settle_precision
from megatron.finetuning.row_arguments import validate_rows
from megatron.partition import METHODS, CompeteResult, Competition, Graph, compete, read_graph


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser_of(__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder with a model of transformers")
    methods = {"nargs": "+", "choices": METHODS, "default": ["sequential", "mixed"]}
    add_flags(
        parser,
        ("--graph", Path, "FILE", "a graph instead of a model, JSON"),
        ("--methods", str, None, "default: sequential mixed", methods),
        ("--max-stages-per-device", count, "N", "mixed tries L = P, 2P, ... NP stages; more stages balance better and "
         "are staler (default: %(default)s)", {"default": 3}),
        ("--milp", positive, "SECONDS", "improve the best by a mixed integer program"),
        ("--seconds", positive, "N", "mixed ends after so many with its best so far (default: a tenth of the time that "
         "it could save in three epochs of a MODEL at most)"),
        ("--seed", int, None, "of the search (default: %(default)s)", {"default": 0}),
        ("--json", None, "", "end with the partition as one JSON line"),
        ("--output", Path, "FILE", "write the partition, JSON"),
        ("--picture", Path, "FILE", "draw the graph by device, memory and utilisation"),
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("the machine of a MODEL"),
        ("--devices", count, "P", "how many"),
        ("--memory", str, None, "of each (default: 16GiB)"),
        ("--bandwidth", positive, "GB/S", "between them (default: 10)"),
        ("--threads", count, "N", "of the profile on a CPU, as each rank will have (default: OMP_NUM_THREADS, or 1)",
         {"default": usual_threads()}),
    )  # fmt: skip
    add_data(parser.add_argument_group("data of a MODEL, as for finetune.py"), required=False)
    add_microbatch(parser.add_argument_group("microbatches of a MODEL, as for finetune.py"))
    add_adapters(parser.add_argument_group("adapters in a MODEL, as for finetune.py"))
    return command_line.run(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    if (options.model is None) == (options.graph is None):
        raise ValueError("give a MODEL, or --graph FILE")
    for path in filter(None, (options.output, options.picture)):  # refused before the work begins
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file in it")
    if options.picture:
        require_picture(options.picture)
    return _run_graph(options) if options.model is None else _run_model(options)


def _run_model(options: argparse.Namespace) -> int:
    for name in ("task", "train_file", "devices"):
        if getattr(options, name) is None:
            raise ValueError(f"a MODEL is profiled on real data: give --{name}")
    settle_precision(options)
    validate_adapter(options)
    validate_rows(options)
    from megatron import backend

    backend.install()
    backend.keep_freed_memory()  # as in training
    import torch

    torch.set_num_threads(options.threads)
    from megatron.finetuning.partitioning import PlannedMachine, cut_model, num_bytes, num_microbatches
    from megatron.finetuning.plan import captured_model
    from megatron.finetuning.samples import read_data

    options = changed(options, model_name_or_path=options.model, do_train=True, do_eval=False)
    machine = PlannedMachine(options.devices, num_bytes(options.memory or "16GiB"), options.bandwidth or 10.0)
    with _progress() as progress:
        progress("reading data")
        data = read_data(options)
        progress("capturing")
        captured, batch, _ = captured_model(options, data)
        choice, candidates, graph, competition = cut_model(
            captured, batch, machine, options, methods=_methods(options), milp_seconds=options.milp,
            num_microbatches=num_microbatches(options, data), seconds=options.seconds, progress=progress,
        )  # fmt: skip
    _show(graph, competition, choice.result, {id(each.result): each.simulated_ms for each in candidates})
    if options.output:
        choice.file.write(options.output)
        print(f"Partition: {options.output}")
    _draw(graph, choice.result, options)
    if options.json:
        found = json.loads(choice.file.to_json())
        names = ("method", "objective_ms", "device_of_node", "stage_of_node")
        print(json.dumps({**{name: found[name] for name in names}, "simulated_ms": choice.simulated_ms}))
    return 0


def _run_graph(options: argparse.Namespace) -> int:
    for name in ("devices", "memory", "bandwidth", "task", "train_file", "validation_file"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"--{name} is for a MODEL, and --graph names its own machine and needs no data; leave it out"
            )
    graph = read_graph(options.graph)
    if graph.unknown:
        print(f"note: {options.graph}: keys that mean nothing here: {', '.join(graph.unknown)}", file=sys.stderr)
    with _progress() as progress:
        competition = compete(
            graph,
            methods=_methods(options),
            max_stages_per_device=options.max_stages_per_device,
            milp_seconds=options.milp,
            seed=options.seed,
            seconds=options.seconds,
            progress=progress,
        )
    choice = competition.choice
    _show(graph, competition, choice, {})
    content = _content(choice)
    if options.output:
        write_whole(options.output, json.dumps(content, indent=1) + "\n")
        print(f"Partition: {options.output}")
    _draw(graph, choice, options)
    if options.json:
        print(json.dumps(content))
    return 0


def _methods(options: argparse.Namespace) -> list[str]:
    methods = list(options.methods)
    if options.milp is not None and "milp" not in methods:
        methods.append("milp")
    return methods


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the current step on standard error: on one line of a terminal, otherwise as lines."""
    errors = Console(stderr=True)
    with errors.status("reading") if errors.is_terminal else nullcontext() as status:
        yield status.update if status else Lines()


class Lines:
    """Progress as printed lines: a text that is new apart from its numbers at once, others every `seconds` seconds."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._said: set[str] = set()
        self._last = -math.inf

    def __call__(self, text: str) -> None:
        now, words = time.monotonic(), re.sub("[0-9]+", "", text)
        if words not in self._said or now - self._last >= self._seconds:
            self._said.add(words)
            self._last = now
            print(text, file=sys.stderr, flush=True)


def _draw(graph: Graph, choice: CompeteResult, options: argparse.Namespace) -> None:
    if options.picture:
        draw(graph, choice, options.picture)
        print(f"Picture: {options.picture}")


def draw(graph: Graph, result: CompeteResult, path: Path) -> None:
    """Draw a partition to `path`, in the format of its suffix.

    Above are the nodes, in the order of computation and at the height of their device, with a line for each edge
    between devices. Below is a box for each device: its width is the memory in use, its filled part the utilisation.
    """
    partition, value = result.partition, result.value
    figure = new_figure(9.0, 3.0 + 0.5 * graph.num_devices, layout="constrained")
    above, below = figure.subplots(2, 1)
    inputs = {node.id for node in graph.nodes if node.input}
    order = [node for node in graph.order() if node not in inputs]
    place = {node: (index, partition.device_of_node(node)) for index, node in enumerate(order)}
    for source, target in graph.edges:
        if source in place and place[source][1] != place[target][1]:
            above.plot(*zip(place[source], place[target], strict=True), color="0.75", linewidth=0.6, zorder=1)
    colours = [f"C{partition.stage_of_node[node] % 10}" for node in order]
    above.scatter(*zip(*place.values(), strict=True), c=colours, s=14, marker="s", zorder=2)
    above.set_title(f"{graph.name}: {result.method}, {value.objective_ms:.1f} ms; colours tell stages apart")
    above.set_xlabel("node, in the order of computation")
    for device in range(graph.num_devices):
        memory = value.memory_bytes[device] / GIB
        used = value.compute_ms[device] / value.objective_ms if value.objective_ms else 0
        below.barh(device, memory, height=0.8, facecolor="none", edgecolor="0.3")
        below.barh(device, memory, height=0.8 * used, color=f"C{device % 10}", alpha=0.6)
        below.text(memory, device, f" {used:.0%}", va="center", fontsize=8)
    below.set_xlabel("memory in use (GiB); the filled part of the height is utilisation")
    below.set_xlim(right=1.12 * max(value.memory_bytes) / GIB or 1)
    for axes in (above, below):
        axes.set_ylabel("device")
        axes.set_yticks(range(graph.num_devices))
        axes.invert_yaxis()
    save(figure, path, dpi=130)


def _content(result: CompeteResult) -> dict:
    partition = result.partition
    return {
        "method": result.method,
        "objective_ms": result.value.objective_ms,
        "device_of_node": {str(node): partition.device_of_node(node) for node in sorted(partition.stage_of_node)},
        "stage_of_node": {str(node): stage for node, stage in sorted(partition.stage_of_node.items())},
    }


def _show(graph: Graph, competition: Competition, choice: CompeteResult, simulated: Mapping[int, float]) -> None:
    """Print the results and the choice. `simulated`: id of a result -> simulated milliseconds of a microbatch."""
    out, bound, rows = console(150, highlight=True), graph.bound_ms, []
    columns = ("method", "stages", "depth", "busiest ms", "over bound", "most GiB", "crosses MB", "seconds", "from")
    columns = (*columns[:5], "simulated ms", *columns[5:]) if simulated else columns
    for result in competition.results:
        value = result.value
        timed = [f"{simulated[id(result)]:.3f}" if id(result) in simulated else ""] if simulated else []
        rows.append((
            result.method + (" *" if result is choice else ""), str(result.partition.num_stages), str(value.depth),
            f"{value.objective_ms:.3f}", f"{value.objective_ms / bound:.4f}" if bound else "", *timed,
            f"{max(value.memory_bytes) / GIB:.2f}", f"{value.crossing_bytes / 1e6:.1f}", f"{result.seconds:.1f}",
            result.note,
        ))  # fmt: skip
    title = f"{graph.name or 'graph'}: {graph.num_devices} devices, bound {bound:.3f} ms"
    out.print(lined_table(title, columns, rows, left=("method", "from")))
    for method, reason in competition.failures.items():
        out.print(f"{method}: {reason}", highlight=False)
    devices = []
    for device in range(graph.num_devices):
        stages = [str(s) for s, holds in enumerate(choice.partition.device_of_stage) if holds == device]
        compute, used = choice.value.compute_ms[device], choice.value.memory_bytes[device]
        devices.append((
            str(device), " ".join(stages), f"{compute:.3f}",
            f"{compute / choice.value.objective_ms:.1%}" if choice.value.objective_ms else "",
            f"{used / GIB:.2f}", f"{graph.memory_limit(device) / GIB:.2f}",
        ))  # fmt: skip
    columns = ("device", "stages", "compute ms", "utilisation", "GiB", "of GiB")
    out.print(lined_table(f"choice: {choice.method}", columns, devices, left=()))
