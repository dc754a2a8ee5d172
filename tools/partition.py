"""Cut a model's graph into pipeline stages: several methods compete, and the best partition is shown and written.

    python tools/partition.py --graph graph.json
    python tools/partition.py --graph graph.json --max-stages-per-device 2 --output P.json --picture P.png
    python tools/partition.py --graph graph.json --milp 60 --json

docs/partition.md says what a graph file holds, what the methods are and what is minimised. With --json the last line
is one JSON object: method, objective_ms, device_of_node, stage_of_node.

Exit status: 0, or 1 where a file is wrong or nothing fits, 2 where the command line is or a file cannot be opened, 130
after Ctrl-C.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where the next one is
import command_line
from rich.console import Console
from rich.table import Table

from megatron.partition import METHODS, Competition, Graph, Result, compete, read_graph
from megatron.planner.files import write_whole

GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser_of(__doc__)
    parser.add_argument("--graph", type=Path, required=True, metavar="FILE", help="the graph, JSON")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["sequential", "mixed"], help="default: sequential mixed"
    )
    parser.add_argument(
        "--max-stages-per-device", type=command_line.count, default=3, metavar="N",
        help="mixed tries L = P, 2P, ... NP stages; more stages balance better and are staler (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--milp", type=command_line.positive, metavar="SECONDS", help="improve the best by a mixed integer program"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with the partition as one JSON line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the partition, JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the graph by device, memory and utilisation")
    return command_line.run(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    graph = read_graph(options.graph)
    if graph.unknown:
        print(f"note: {options.graph}: keys that mean nothing here: {', '.join(graph.unknown)}", file=sys.stderr)
    methods = list(options.methods)
    if options.milp is not None and "milp" not in methods:
        methods.append("milp")
    errors = Console(stderr=True)
    with errors.status("reading") if errors.is_terminal else nullcontext() as status:
        competition = compete(
            graph,
            methods=methods,
            max_stages_per_device=options.max_stages_per_device,
            milp_seconds=options.milp,
            seed=options.seed,
            progress=status.update if status else lambda text: None,
        )
    _show(graph, competition)
    choice = competition.choice
    content = _content(choice)
    if options.output:
        write_whole(options.output, json.dumps(content, indent=1) + "\n")
        print(f"Partition: {options.output}")
    if options.picture:
        from megatron.partition.draw import draw

        draw(graph, choice, options.picture)
        print(f"Picture: {options.picture}")
    if options.json:
        print(json.dumps(content))
    return 0


def _content(result: Result) -> dict:
    partition = result.partition
    return {
        "method": result.method,
        "objective_ms": result.value.objective_ms,
        "device_of_node": {str(node): partition.device_of_node(node) for node in sorted(partition.stage_of_node)},
        "stage_of_node": {str(node): stage for node, stage in sorted(partition.stage_of_node.items())},
    }


def _show(graph: Graph, competition: Competition) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=150, no_color=True)
    bound = graph.bound_ms
    table = Table(title=f"{graph.name or 'graph'}: {graph.num_devices} devices, bound {bound:.3f} ms")
    columns = ("method", "stages", "depth", "busiest ms", "over bound", "most GiB", "crosses MB", "seconds", "from")
    for column in columns:
        table.add_column(column, justify="left" if column in ("method", "from") else "right")
    for result in competition.results:
        value = result.value
        table.add_row(
            result.method + (" *" if result is competition.choice else ""),
            str(result.partition.num_stages),
            str(value.depth),
            f"{value.objective_ms:.3f}",
            f"{value.objective_ms / bound:.4f}" if bound else "",
            f"{max(value.memory_bytes) / GIB:.2f}",
            f"{value.crossing_bytes / 1e6:.1f}",
            f"{result.seconds:.1f}",
            result.note,
        )
    console.print(table)
    for method, reason in competition.failures.items():
        console.print(f"{method}: {reason}", highlight=False)
    choice = competition.choice
    devices = Table(title=f"choice: {choice.method}")
    for column in ("device", "stages", "compute ms", "utilisation", "GiB", "of GiB"):
        devices.add_column(column, justify="right")
    for device in range(graph.num_devices):
        stages = [str(s) for s, holds in enumerate(choice.partition.device_of_stage) if holds == device]
        compute, used = choice.value.compute_ms[device], choice.value.memory_bytes[device]
        devices.add_row(
            str(device), " ".join(stages), f"{compute:.3f}",
            f"{compute / choice.value.objective_ms:.1%}" if choice.value.objective_ms else "",
            f"{used / GIB:.2f}", f"{graph.memory_limit(device) / GIB:.2f}",
        )  # fmt: skip
    console.print(devices)


if __name__ == "__main__":
    raise SystemExit(main())
