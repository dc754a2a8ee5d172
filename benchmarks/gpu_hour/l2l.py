"""Weights on the host: l2l beside flush and FSDP2 with CPUOffloadPolicy, on one card.

    python -m benchmarks.gpu_hour.l2l --json l2l.json

speed    tokens/s of the same GPT and batches, BF16, every layer recomputed, in turns in one process. The ratio is over
         flush within a round. FSDP2 brings the weights for each microbatch, and so also runs with a batch as one.
         With one rank torch copies FSDP2's weights on the stream that computes, so its copies hide behind nothing.
overlap  of the copies and of the host's optimizer, the share of their time in which the device computes (a trace of the
         engine: CUDA events on the streams of copies and of computation).
depth    the most bytes of the device, over the layers of the model, a contender at a time.
largest  computed, not run: the deepest model of this width for the host's memory.

Row of the table: l2l, 480 s at most, about 240 s, needs CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.tables import spread
from benchmarks.gpu_hour.l2l_contenders import FLUSH, FSDP2, L2L
from benchmarks.gpu_hour.l2l_tasks import GIB, compare, device_bytes, host, overlap
from benchmarks.gpu_hour.result import Result, parser_of
from benchmarks.gpu_hour.trained import Size, Tasks, num_cores, prepare_environment
from megatron import backend


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured. `sizes`: of the speed; `depths`: layers of the last section."""

    sizes: Sequence[Size]
    rounds: int
    batches: int
    depths: Sequence[int]


_WIDE = Size(layers=6, hidden=4096, heads=32, sequence=2048, micro_batch=4, microbatches=4)
CARD = Plan(sizes=(_WIDE, replace(_WIDE, microbatches=1)), rounds=5, batches=2, depths=(3, 6, 12))
_TINY = Size(layers=3, hidden=32, heads=2, sequence=16, micro_batch=2, microbatches=2, vocabulary=64)
REHEARSAL = Plan(sizes=(_TINY,), rounds=2, batches=1, depths=(3, 6))


def add_speed(result: Result, size: Size, found: dict) -> None:
    """A line for each contender."""
    m, flush = size.microbatches, found.get(FLUSH, {"failed": ""})
    for name, each in found.items():
        key = f"{name.replace(', ', '_').replace(' ', '_').lower()}_m{m}"
        if "failed" in each:
            why = "out of memory" if each.get("out_of_memory") else "failed"
            result.add(f"{name}, m = {m}: {why}: {each['failed']}")
            continue
        rates = [size.tokens / seconds for seconds in each["seconds"]]
        figures = {"tokens_per_second": rates, "losses": each["losses"]}
        line = f"{name}, m = {m}: {spread(rates, 0, ',')} tokens/s"
        if "failed" not in flush and name != FLUSH:
            ratios = [theirs / own for theirs, own in zip(flush["seconds"], each["seconds"], strict=True)]
            farthest = max(abs(a - b) / abs(b) for a, b in zip(each["losses"], flush["losses"], strict=True))
            figures |= {"ratio_to_flush": ratios, "loss_difference_ratio": farthest}
            line += f", {spread(ratios, 3)} of flush; losses at most {farthest:.2g} of their size from flush's"
        result.add(line, **{f"{key}_{what}": values for what, values in figures.items()})


def add_overlap(result: Result, size: Size, found: dict) -> None:
    if "failed" in found:
        result.add(f"The trace of l2l failed: {found['failed']}")
        return
    names = {"to_device": "copies to the device", "from_device": "copies from the device", "host_optimizer": "the host"}
    said = ", ".join(
        f"{names[lane]} {each['seconds']:.3g} s, {each['hidden_ratio']:.1%} of it beside computation"
        for lane, each in found["lanes"].items()
    )
    result.add(
        f"l2l, m = {size.microbatches}, traced for {found['seconds']:.3g} s, of which the device computes "
        f"{found['computing_seconds']:.3g} s and waits {found['waiting_seconds']:.3g} s: {said}",
        **{
            f"m{size.microbatches}_{track}_{what}": lane[what]
            for track, lane in found["lanes"].items()
            for what in lane
        },
    )


def add_depth(result: Result, name: str, peaks: dict[int, int]) -> None:
    """The line of a contender: bytes by depth, and how they grow."""
    if not peaks:
        return
    text = ", ".join(f"{peak / GIB:.4g} GiB at {layers} layers" for layers, peak in peaks.items())
    line, key = f"Device peak of {name}: {text}", name.replace(", ", "_").replace(" ", "_").lower()
    figures = {"depth_layers": list(peaks), "depth_peak_bytes": list(peaks.values())}
    if len(peaks) > 1:
        (few, least), *_, (many, most) = peaks.items()
        growth = (most - least) / (many - few)
        line += f"; a layer more takes {growth / 2**20:.4g} MiB"
        figures["bytes_a_layer"] = growth
    result.add(line, **{f"{key}_{what}": values for what, values in figures.items()})


def measure(plan: Plan, tasks: Tasks, result: Result, trace: Path) -> Iterator[str]:
    """Measure all sections, the most telling first; yields the name of each when it is done.

    `trace`: the file of a trace, of which `{m}` becomes the number of microbatches.
    """
    first, *others = plan.sizes
    for size in (first, *others):
        found = tasks.do(compare, size=size, rounds=plan.rounds, batches=plan.batches)
        add_speed(result, size, {"All": found} if "failed" in found else found)
        yield "speed"
        file = trace.with_name(trace.name.format(m=size.microbatches))
        add_overlap(result, size, tasks.do(overlap, size=size, batches=plan.batches, trace_file=str(file)))
        yield "overlap"
        if size is first:
            add_depth(result, L2L, depths(L2L, first, plan.depths, tasks, result))
            yield "depth"
            add_largest(result, first, tasks.do(host, size=first))
            yield "largest"
    for name in (FSDP2, FLUSH):
        add_depth(result, name, depths(name, first, (plan.depths[0], plan.depths[-1]), tasks, result))
        yield "depth"


def depths(name: str, size: Size, layers: Sequence[int], tasks: Tasks, result: Result) -> dict[int, int]:
    """Number of layers -> the most bytes of the device of a contender alone."""
    peaks = {}
    for count in layers:
        found = tasks.do(device_bytes, name=name, size=replace(size, layers=count))
        if "failed" in found:
            result.add(f"{name} with {count} layers, alone: {found['failed']}")
        else:
            peaks[count] = found["peak_bytes"]
    return peaks


def add_largest(result: Result, size: Size, found: dict) -> None:
    if "failed" in found:
        result.add(f"The largest model for the host is not known: {found['failed']}")
        return
    layers = found["largest_layers"]
    held = "not even a layer"
    if layers is not None:
        held = f"{layers} layers of width {size.hidden}, {found['largest_parameters'] / 1e9:.4g} billion parameters"
    result.add(
        f"Computed, not run: the {found['available_gib']:.4g} GiB that the host has to give hold {held}",
        **{f"planned_{name.removeprefix('planned_')}": value for name, value in found.items() if value is not None},
    )


HOST_BYTES = 18 + 2 * 20
"""A parameter's, at most, with l2l and two of FSDP2 beside each other: FP32 weights, gradients and moments, the first
two in pinned blocks that torch rounds up to powers of two."""


def fitting(size: Size, available: float) -> Size:
    """The size, with fewer layers if all contenders together would take more than three quarters of the host."""
    of_layer = 12 * size.hidden**2 * HOST_BYTES
    of_ends = 2 * size.vocabulary * size.hidden * HOST_BYTES
    return replace(size, layers=max(2, min(size.layers, int((0.75 * available - of_ends) / of_layer))))


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    prepare_environment(rehearse=args.rehearse)
    backend.install()
    plan = REHEARSAL if args.rehearse else CARD
    available = backend.available_host_bytes()
    plan = replace(plan, sizes=[fitting(size, available) for size in plan.sizes])
    with Tasks(threads=1 if args.rehearse else num_cores(), timeout=240) as tasks:
        for _ in measure(plan, tasks, Result(args), args.json.with_name(f"{args.json.stem}_trace_m{{m}}.json")):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
