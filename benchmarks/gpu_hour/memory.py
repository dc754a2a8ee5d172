"""Peak memory of one rank beside `--dry-run` and the planner, at sizes that fill the card.

    python -m benchmarks.gpu_hour.memory --json memory.json

A GPT of pretrain_gpt.py in BF16 trains three batches at each size. Sizes differ in depth alone. The dry run of the same
flags chooses the depths: the least that takes a quarter, half, 85 and 95% of the card, the last that it calls fitting,
and the next one. First without recomputation, then with whole layers recomputed. "peak" is the most that torch's
allocator has handed out, "reserved" what it had from the driver. Weights, gradients and optimizer are counted tensor by
tensor; "activations" is the rest of the peak before a step, and "step" what a step takes beyond what it keeps.

Row of the table: memory, 420 s at most, about 200 s, needs CUDA.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_hour.meters import meter_of_device
from benchmarks.gpu_hour.process import free
from benchmarks.gpu_hour.result import Result, parser_of
from benchmarks.gpu_hour.trained import (
    RECOMPUTE,
    Size,
    Tasks,
    first_line,
    is_out_of_memory,
    prepare_environment,
    training,
)
from megatron import backend

GIB = 2**30
BATCHES = 3
SETTINGS = {
    "no recomputation": (),
    "layers recomputed": RECOMPUTE,
}
FITS, DOES_NOT = "just fits", "just does not fit"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured. `parts`: of the card's memory; `settings`: names in `SETTINGS`."""

    size: Size
    parts: Sequence[float]
    settings: Sequence[str]


CARD = Plan(
    size=Size(layers=1, hidden=2048, heads=16, sequence=2048, micro_batch=1, microbatches=2),
    parts=(0.5, 0.85, 0.25, 0.95), settings=tuple(SETTINGS),
)  # fmt: skip
REHEARSAL = Plan(
    size=Size(layers=1, hidden=64, heads=4, sequence=64, micro_batch=2, microbatches=2, vocabulary=256),
    parts=(0.5,), settings=("no recomputation",),
)  # fmt: skip
REHEARSED_GIB = 16 / 1024


def describe(*, store: Any, start: Callable[[], None]) -> dict:
    """The memory of the device in GiB; called in a task, since who asks CUDA takes memory of the device."""
    start()
    if not backend.is_cuda():
        return {"gib": REHEARSED_GIB, "free_gib": REHEARSED_GIB}
    free, total = torch.cuda.mem_get_info()
    return {"gib": total / GIB, "free_gib": free / GIB}


def dry_run(argv: Sequence[str], gib: float) -> Any:
    """What `pretrain_gpt.py --dry-run 1` finds on a GPU of so much memory, without Transformer Engine and Apex."""
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.dry_run.dry_run import check_job

    flags = ("--dry-run", "1", "--dry-run-gpu", f"{gib:.6f}", "--assume-packages", "none")
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        return check_job(parse_args([*argv, *flags]))


def planners_bytes(size: Size, flags: Sequence[str]) -> float:
    """The estimate of a search for the same configuration, in bytes."""
    from megatron.planner import Cluster, Configuration, Planner
    from megatron.planner.memory.recompute import RecomputeScope
    from megatron.trainer.arguments.platform import assumed_platform
    from megatron.trainer.plan.command import Job

    job = Job.read(size.model_argv(), architecture="gpt", platform=assumed_platform(["none"]))
    shape = replace(job.shape(1), num_layers=size.layers)
    configuration = Configuration(
        micro_batch_size=size.micro_batch, global_batch_size=size.micro_batch * size.microbatches,
        recompute=RecomputeScope.LAYER if flags else RecomputeScope.NONE,
    )  # fmt: skip
    cluster = Cluster(gpu="H100", nodes=1, gpus_per_node=1)  # memory does not depend on the GPU
    [rank] = Planner(shape, cluster, None, job.software).memory(configuration)
    return rank.total


def chosen(plan: Plan, setting: str, gib: float) -> dict[str, tuple[Size, Any]]:
    """Name of a size -> the size, and what its dry run finds."""
    flags = SETTINGS[setting]

    @functools.cache
    def found(layers: int) -> Any:
        return dry_run(replace(plan.size, layers=layers).argv(*flags), gib)

    def least(reaches: Callable[[Any], bool]) -> int:
        """The least number of layers whose dry run `reaches`; the next one does, too."""
        low, high = 0, 1
        while not reaches(found(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(found(middle)) else (middle, high)
        return high

    def takes(part: float) -> int:
        return least(lambda dry: dry.memory[0].total >= part * gib * GIB)

    too_many = least(lambda dry: not dry.verdict.fits)
    depths = {f"{part:.0%}": takes(part) for part in plan.parts} | {FITS: too_many - 1, DOES_NOT: too_many}
    return {name: (replace(plan.size, layers=layers), found(layers)) for name, layers in depths.items() if layers}


# --- in a task --------------------------------------------------------------------------------------------------------


def train(argv: Sequence[str], *, store: Any, start: Callable[[], None]) -> dict:
    """Train `BATCHES` batches. Returns bytes by part and peaks; with `failed` if memory is short."""
    start()
    free()
    found: dict[str, Any] = {"computing_bytes": 0, "step_bytes": 0, "losses": []}
    meter = meter_of_device()
    try:
        with meter, training(argv, store) as run:
            meter.take()
            found["built_bytes"] = meter.take()
            step = run.run.update.step

            def stepped(*arguments: Any, **options: Any) -> Any:
                found["computing_bytes"] = max(found["computing_bytes"], meter.take())
                report = step(*arguments, **options)
                found["step_bytes"] = max(found["step_bytes"], meter.take())
                return report

            run.run.update.step = stepped
            for _ in range(BATCHES):
                found["losses"] += run.batch()
            found["losses"] += run.drain()
            found |= kept_bytes(run.run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found |= {"failed": first_line(error), "out_of_memory": True}
    found["peak_bytes"] = max(found["computing_bytes"], found["step_bytes"], meter.take())
    return found | {"reserved_bytes": meter.reserved, "retries": meter.retries()}


def kept_bytes(run: Any) -> dict[str, int]:
    """The bytes of weights, gradient buffers and optimizer state, of the tensors themselves."""
    from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of

    weights = {each for chunk in run.chunks for each in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}
    for optimizer in optimizers_of(run.optimizer):
        stepped = optimizer.optimizer
        masters = [each for group in stepped.param_groups for each in group["params"] if each not in weights]
        states = [each for state in stepped.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
        kept |= {each.data_ptr(): each for each in (*masters, *states) if each.numel()}
    return {
        "weights_bytes": sum(each.nbytes for each in weights),
        "gradients_bytes": sum(buffer.grad_data.nbytes for chunk in run.chunks for buffer in chunk.buffers),
        "optimizer_bytes": sum(each.nbytes for each in kept.values()),
    }


# --- beside the estimate ----------------------------------------------------------------------------------------------

KEPT = ("weights", "gradients", "optimizer")


def compared(found: dict, dry: Any) -> dict[str, float]:
    """Estimated and measured bytes by part, and the ratio of the peaks."""
    parts, rank = dry.memory[0].parts, dry.memory[0]
    kept = sum(found[f"{name}_bytes"] for name in KEPT)
    saved = parts.activations + parts.workspace + parts.transfers + parts.deferred
    return {
        "estimate_bytes": rank.total,
        "ratio_to_estimate": found["peak_bytes"] / rank.total,
        "activations_bytes": found["computing_bytes"] - kept,
        "step_extra_bytes": found["step_bytes"] - kept,
        **{f"estimate_{name}_bytes": getattr(parts, name) for name in (*KEPT, "step")},
        "estimate_activations_bytes": saved,
    }


def sentence(what: str, size: Size, verdict: str, found: dict, estimate: float, figures: dict) -> str:
    """The line of a size. `verdict`: the dry run's word."""
    begin = f"{what} ({size.layers} layers, planned {estimate / GIB:.4g} GiB, {verdict!r})"
    if "failed" in found:
        peak = f" at {found['peak_bytes'] / GIB:.4g} GiB" if found.get("peak_bytes") else ""
        return f"{begin}: {'out of memory' if found.get('out_of_memory') else 'failed'}{peak}: {found['failed']}"
    names = (*KEPT, "activations")
    parts = ", ".join(
        f"{name} {figures[f'{name}_bytes'] / GIB:.4g} of {figures[f'estimate_{name}_bytes'] / GIB:.4g}"
        for name in names
    )
    reserved = "" if found["reserved_bytes"] is None else f", reserved {found['reserved_bytes'] / GIB:.4g}"
    return (
        f"{begin}: ran, peak {found['peak_bytes'] / GIB:.4g} GiB, {figures['ratio_to_estimate']:.3f} of the plan"
        f"{reserved}; GiB by part, measured of planned: {parts}; a step takes {figures['step_extra_bytes'] / GIB:.4g} "
        f"beyond what it keeps, planned {figures['estimate_step_bytes'] / GIB:.4g}"
    )


def measure(plan: Plan, gib: float, tasks: Tasks, result: Result) -> Iterator[dict]:
    """Measure all sizes, of all settings in turn. Yields a row for each."""
    sizes = {setting: chosen(plan, setting, gib) for setting in plan.settings}
    for name in dict.fromkeys(name for of_setting in sizes.values() for name in of_setting):
        for setting in plan.settings:
            if name not in sizes[setting]:
                continue
            size, dry = sizes[setting][name]
            found = tasks.do(train, argv=size.argv(*SETTINGS[setting]))
            figures = {**found, "layers": size.layers, "planner_bytes": planners_bytes(size, SETTINGS[setting])}
            if "failed" not in found:
                found |= compared(found, dry)
                figures |= found
            what = f"{setting}, {name}"
            line = sentence(what, size, dry.verdict.word, found, dry.memory[0].total, figures)
            row = {"setting": setting, "name": name, "fits": dry.verdict.fits, "word": dry.verdict.word, **figures}
            result.content.setdefault("rows", []).append(row)
            key = f"{setting.replace(' ', '_')}_{name.replace(' ', '_').rstrip('%')}"
            result.add(line, **{
                f"{key}_{short}": figures[short]
                for short in ("peak_bytes", "reserved_bytes", "estimate_bytes", "planner_bytes", "ratio_to_estimate")
                if figures.get(short) is not None
            })  # fmt: skip
            yield row


def summary(rows: Sequence[dict]) -> str:
    """What the rows come to: the ratios, and where the verdict was wrong."""
    ratios = sorted(row["ratio_to_estimate"] for row in rows if "failed" not in row)
    said = f"Peak over plan: {ratios[0]:.3f} to {ratios[-1]:.3f} at {len(ratios)} sizes. " if ratios else ""
    wrong = [
        f"{row['setting']}, {row['name']} {'ran' if 'failed' not in row else 'did not run'}"
        for row in rows
        if row["fits"] != ("failed" not in row)
    ]
    return f"{said}Verdicts that the card contradicts: {', '.join(wrong) or 'none'}"


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    prepare_environment(rehearse=args.rehearse)
    backend.install()
    plan = REHEARSAL if args.rehearse else CARD
    result = Result(args)
    with Tasks(threads=1, timeout=90) as tasks:
        card = tasks.do(describe)
        if "failed" in card:
            raise SystemExit(f"error: the device does not say how much memory it has: {card['failed']}")
        gib = card["gib"]
        result.add(
            f"The device has {gib:.4g} GiB, of which {card['free_gib']:.4g} are free",
            device_gib=gib, device_free_gib=card["free_gib"],
        )  # fmt: skip
        rows = list(measure(plan, gib, tasks, result))
    result.add(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
