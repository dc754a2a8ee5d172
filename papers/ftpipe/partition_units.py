"""The gains of finer units and of mixed stages: FTPipe's sections 5.6 and 5.8 with this project's partitioner.

    python -m papers.ftpipe.partition_units                         # about 6 minutes of one core; tables
    python -m papers.ftpipe.partition_units t5-3b --picture IMAGES --json result.json

Problem: the paper's models and GPUs are not available. Solution: each model is captured without its weights, its
operators are priced by a roofline of the paper's GPU (megatron/capture/estimate.py; the rates are printed above each
table), and the partitioner cuts that graph. Absolute times are estimates, but all partitions are priced by the same
estimates.

units      the parts that are not cut: operators; sublayers (T5LayerFF, GPT2MLP); or layers (T5Block, GPT2Block). Code
           outside of them is cut between modules. A partition of coarser units is also one of finer units, so it is a
           candidate for them, too
method     sequential, or mixed with at most two stages on a device (the better of L = P and 2P)
memory     t5-11b: the memory of the fastest partitions without a limit, and the least memory, found by bisection
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import networkx
from rich.console import Console
from rich.table import Table

from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from megatron.partition import CompeteResult, Graph, Partition, compete, evaluate
from megatron.partition.graph import stage_edges
from megatron.partition.mixed import merge_stages
from megatron.partition.refine import PriceBudget, refine
from megatron.partition.units import PartitionState, compiled, partition_of
from papers.ftpipe.partition_units_graphs import (
    CASES,
    COMPUTE,
    GIB,
    GIGABYTES_PER_SECOND,
    LAUNCH,
    MEMORY,
    RESERVED,
    UNITS,
    Case,
    Estimated,
    estimated,
)  # fmt: skip

METHODS = ("sequential", "mixed")
PER_DEVICE = 2
"""The most stages of a mixed partition on a device."""

LIMITLESS = 1e15
"""Bytes of memory that stand for no limit."""

STEP = GIB / 4
"""The precision in bytes of the search for the least memory."""


@dataclass(frozen=True)
class Row:
    """A partition with its price.

    `unit_count`: number of units. `bound_ms`: a lower bound of the objective for such units.
    """

    units: str
    unit_count: int
    method: str
    objective_ms: float
    bound_ms: float
    stages: int
    depth: int
    memory_gib: tuple[float, ...]
    compute_ms: tuple[float, ...]
    crossing_megabytes: float
    seconds: float
    note: str


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of a partition of layers on the device that holds most."""

    partition: str
    gib: float
    objective_ms: float


@dataclass(frozen=True)
class Measured:
    """The results for one model. `failures`: units and method -> the reason why no partition was found."""

    rows: tuple[Row, ...]
    failures: dict[str, str]
    memory_needs: tuple[MemoryNeed, ...]
    results: dict[tuple[str, str], CompeteResult]


def measure(
    model: Estimated, case: Case, *, units: Sequence[str] = tuple(UNITS), effort: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Measured:  # fmt: skip
    """Cut a model by each method with each kind of units, from coarse to fine units."""
    rows, failures, best = [], {}, {}
    for kind in reversed([each for each in UNITS if each in units]):
        graph = model.graph(kind)
        bound, count = _bound(graph)
        for method in METHODS:
            progress(f"{kind}, {method}")
            try:
                results = _compete(graph, method, effort)
            except ValueError as error:
                results = []
                failures[f"{kind}, {method}"] = str(error)
            results += list(_inherited(graph, method, best))
            if results:
                best[kind, method] = found = min(results, key=lambda each: (each.value.objective_ms, each.value.depth))
                rows.append(_row(kind, count, method, found, bound))
                failures.pop(f"{kind}, {method}", None)
    needs = _memory_needs(model.graph("layers"), effort, progress) if case.memory_needs else ()
    return Measured(tuple(rows), failures, needs, best)


def _compete(graph: Graph, method: str, effort: float) -> list[CompeteResult]:
    """Run a method. The seconds of each result are those of the whole method."""
    started = time.perf_counter()
    found = compete(graph, methods=[method], max_stages_per_device=PER_DEVICE, effort=effort).results
    return [replace(each, seconds=time.perf_counter() - started) for each in found]


def _bound(graph: Graph) -> tuple[float, int]:
    """A lower bound of the objective of any partition in milliseconds, and the number of units."""
    plain = compiled(graph, [node.id for node in graph.nodes])
    least = [min(times) / 1e9 for times in zip(compiled(graph).time, plain.time, strict=True)]
    return max(sum(least) / graph.num_devices, *least), len(plain)


def _inherited(graph: Graph, method: str, best: dict[tuple[str, str], CompeteResult]) -> Iterator[CompeteResult]:
    """Yield the results of coarser units for these units: unchanged, and for mixed stages also refined."""
    for (kind, its_method), result in best.items():
        if its_method == method:
            started = time.perf_counter()
            candidates = [result.partition]
            if method == "mixed":
                candidates.append(_refined(graph, result.partition))
            for partition in candidates:
                try:
                    value = evaluate(graph, partition)
                except ValueError:  # too much memory, since refinement has changed the last stage, which saves more
                    continue
                if partition.most_stages_on_a_device() <= PER_DEVICE:
                    seconds = time.perf_counter() - started
                    yield CompeteResult(result.method, partition, value, seconds, f"{kind}, {result.method}")


def _refined(graph: Graph, partition: Partition) -> Partition:
    quotient = networkx.DiGraph(stage_edges(graph, partition))
    quotient.add_nodes_from(range(partition.num_stages))
    number = {stage: place for place, stage in enumerate(networkx.lexicographical_topological_sort(quotient))}
    units = compiled(graph, [node for node, stage in partition.stage_of_node.items() if not quotient.out_degree(stage)])
    stage_of = [number[partition.stage_of_node[nodes[0]]] for nodes in units.nodes]
    state = PartitionState(units, stage_of, [partition.device_of_stage[stage] for stage in number])
    refine(state, PriceBudget(20_000))
    found = partition_of(units, state.stage_of, state.device_of)
    try:
        return merge_stages(graph, found)
    except ValueError:  # it does not fit
        return found


def _row(kind: str, count: int, method: str, result: CompeteResult, bound: float) -> Row:
    value = result.value
    return Row(
        kind, count, method, value.objective_ms, bound, result.partition.num_stages, value.depth,
        tuple(each / GIB for each in value.memory_bytes), value.compute_ms, value.crossing_bytes / 1e6,
        result.seconds, result.note,
    )  # fmt: skip


def _memory_needs(graph: Graph, effort: float, progress: Callable[[str], None]) -> tuple[MemoryNeed, ...]:
    found = []
    for method in METHODS:
        progress(f"least memory of {method}")
        fastest = _fastest(replace(graph, memory_limit_bytes=LIMITLESS), method, effort)
        low, least = sum(fastest.value.memory_bytes) / graph.num_devices, fastest
        while max(least.value.memory_bytes) - low > STEP:
            middle = (low + max(least.value.memory_bytes)) / 2
            try:
                least = _fastest(replace(graph, memory_limit_bytes=middle), method, effort)
            except ValueError:
                low = middle
        for words, result in (("the fastest where memory has no limit", fastest), ("the least memory", least)):
            gib = max(result.value.memory_bytes) / GIB
            found.append(MemoryNeed(f"{method}, {words}", gib, result.value.objective_ms))
    return tuple(found)


def _fastest(graph: Graph, method: str, effort: float) -> CompeteResult:
    return min(_compete(graph, method, effort), key=lambda each: each.value.objective_ms)


def show(name: str, case: Case, model: Estimated, measured: Measured, console: Console) -> None:
    device, content = case.device, model.content
    lengths = ", ".join(f"{tokens} of {tensor}" for tensor, tokens in case.lengths.items())
    params = sum(each["params"] for each in (*content["nodes"], *content["shared_parameters"]))
    console.print(
        f"{name}: {params / 1e9:.2f} billion parameters of {case.weight_bytes_per_parameter:g} bytes, "
        f"{len(model.captured.nodes)} operators; microbatches of {case.microbatch} with {lengths}\n"
        f"{case.num_devices} {device.name}, each with {(device.memory - RESERVED) / GIB:g} GiB for that, "
        f"{device.teraflops:g} TFLOP/s x {COMPUTE:g}, {device.gigabytes_per_second:g} GB/s x {MEMORY:g}, {LAUNCH:g} us "
        f"a kernel; {GIGABYTES_PER_SECOND:g} GB/s between them",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table()
    columns = (
        "units",
        "number",
        "method",
        "objective ms",
        "over bound",
        "stages",
        "depth",
        "most GiB",
        "seconds",
        "from",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("units", "method", "from") else "right")
    for row in measured.rows:
        table.add_row(
            row.units, str(row.unit_count), row.method, f"{row.objective_ms:.2f}",
            f"{row.objective_ms / row.bound_ms:.3f}", str(row.stages), str(row.depth), f"{max(row.memory_gib):.2f}",
            f"{row.seconds:.1f}", row.note,
        )  # fmt: skip
    console.print(table)
    for what, reason in measured.failures.items():
        console.print(f"  {what}: {reason}", highlight=False, soft_wrap=True)
    for need in measured.memory_needs:
        console.print(
            f"  layers, {need.partition}: {need.gib:.2f} GiB a device, {need.objective_ms:.2f} ms", highlight=False
        )
    objective = {(row.units, row.method): row.objective_ms for row in measured.rows}
    for method in METHODS:
        if ("layers", method) in objective and ("operators", method) in objective:
            ratio = objective["layers", method] / objective["operators", method]
            console.print(f"  {method}: layers take {ratio:.3f} times as long as operators", highlight=False)
    console.print(f"  paper: {case.published}\n", highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, json="also write every row")
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--units", nargs="+", choices=list(UNITS), default=list(UNITS), help="default: all")
    parser.add_argument("--effort", type=float, default=0.2, help="of the mixed search, in proportion (default: 0.2)")
    parser.add_argument("--picture", type=Path, metavar="DIR", help="draw the partitions of the finest units, as PNG")
    options = parser.parse_args(argv)
    for name in options.graphs:
        if name not in CASES:
            parser.error(f"'{name}' is no graph; choose of {', '.join(CASES)}")
    console = terminal(150)
    errors = Console(stderr=True)
    found = {}
    for name in options.graphs or CASES:
        case = CASES[name]
        with errors.status(f"{name}: capturing") if errors.is_terminal else nullcontext() as status:
            model = estimated(name, case)

            def progress(text: str, name: str = name, status=status) -> None:
                if status:
                    status.update(f"{name}: {text}")

            measured = measure(model, case, units=options.units, effort=options.effort, progress=progress)
        show(name, case, model, measured, console)
        found[name] = {
            "rows": [asdict(row) for row in measured.rows], "failures": measured.failures,
            "memory_needs": [asdict(need) for need in measured.memory_needs], "published": case.published,
        }  # fmt: skip
        if options.picture:
            from megatron.commands.partition import draw

            finest = next(each for each in UNITS if each in options.units)
            for (units, method), result in measured.results.items():
                if units == finest:
                    draw(model.graph(units), result, options.picture / f"partition_{name}_{method}.png")
    write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
