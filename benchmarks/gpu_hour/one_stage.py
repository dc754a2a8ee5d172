"""One stage on one device: the engine beside a plain torch loop and megatron.core's own schedule.

All train the same GPT of megatron.core layers in BF16, from the same weights and on the same data, with the same
optimizer. The loop clips gradients on the device and waits for nothing; the engine's step waits for the norm, under
`2bw` of the batch before; megatron.core, without Apex and Transformer Engine, waits for the norm of each parameter.
First their losses are compared: those of `flush` with the loop's and with megatron.core's, and those of
`2bw` with a loop whose gradients are taken one version late. Then they take turns in rounds. A time is of wall clock
between two idle devices, over batches with their steps.

Row: one_stage | has one stage plain torch's losses, and what is its time over torch's and megatron.core's? |
-m benchmarks.gpu_hour.one_stage | limit 300, expected 100 | a GPU; the large size takes about 90 GB of it
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from statistics import median

from benchmarks.common.tables import spread
from benchmarks.gpu_hour.process import main
from benchmarks.gpu_hour.result import Result, key_of

COMPARED = 4
"""Batches whose losses are compared."""
PAIRS = (("flush", "loop"), ("megatron.core", "loop"), ("2bw", "loop, one late"))
RATIOS = (("flush", "loop"), ("flush", "megatron.core"), ("2bw", "loop"), ("2bw", "megatron.core"))


def run(result: Result) -> None:
    from benchmarks.gpu_hour import one_device

    rates = one_device.product_rate(result)
    result.add(
        f"A BF16 product of large matrices in this process: {spread([each / 1e12 for each in rates], 1)} TFLOP/s",
        product_flop_per_second=rates,
    )
    for size, model in one_device.sizes(result).items():
        with one_device.may_not_fit(result, f"{size} layers"):
            measure_losses(result, size, model)
        with one_device.may_not_fit(result, f"{size} layers"):
            measure_times(result, size, model, median(rates))


def measure_losses(result: Result, size: str, model: dict) -> None:
    """Train some batches by each, one after the other, and compare."""
    from benchmarks.gpu_hour.one_device import free, num_microbatches

    losses = {}
    for name in ("flush", "2bw", "loop", "loop, one late", "megatron.core"):
        with closing(contender_of(name, model)) as contender:
            for _ in range(COMPARED):
                contender.run(num_microbatches(result))
            contender.finish()
            losses[name] = contender.losses
        del contender
        free()
    differences = {
        f"{name} and {other}": max(abs(a - b) for a, b in zip(losses[name], losses[other], strict=True))
        for name, other in PAIRS
    }
    words = ", ".join(f"{pair} {_apart(most)}" for pair, most in differences.items())
    shown = ", ".join(f"{each:.4f}" for each in losses["flush"])
    result.add(
        f"{size} layers: losses of {COMPARED} batches by flush are {shown}; {words}",
        **{f"{size}_losses_of_{key_of(name)}": each for name, each in losses.items()},
        **{f"{size}_largest_difference_of_{key_of(pair)}": most for pair, most in differences.items()},
    )


def measure_times(result: Result, size: str, model: dict, rate: float) -> None:
    from benchmarks.gpu_hour.one_device import extent, flops_per_token, num_microbatches, ratios, shown, trained

    with ExitStack() as made:
        names = ("flush", "2bw", "loop", "megatron.core")
        contenders = {name: made.enter_context(closing(contender_of(name, model))) for name in names}
        seconds = trained(contenders, num_microbatches(result), **extent(result, rounds=5, batches=2))
        del contenders
    tokens = num_microbatches(result) * model["micro_batch_size"] * model["seq_length"]
    speeds = {name: [tokens / each for each in times] for name, times in seconds.items()}
    flops = {name: median(each) * flops_per_token(model) for name, each in speeds.items()}
    found = {f"{name} over {other}": ratios(seconds, name, other) for name, other in RATIOS}
    result.add(
        f"{size} layers (hidden {model['hidden_size']}), ratios of time: {shown(found, 3)}",
        **{f"{size}_{key_of(name)}_seconds_per_batch": each for name, each in seconds.items()},
        **{f"{size}_ratio_of_{key_of(pair)}": each for pair, each in found.items()},
    )
    result.add(
        f"{size} layers: "
        + "; ".join(
            f"{name} {median(speeds[name]):,.0f} tokens/s, {each / 1e12:.4g} TFLOP/s ({each / rate:.1%} of the product)"
            for name, each in flops.items()
        ),
        **{f"{size}_{key_of(name)}_tokens_per_second": each for name, each in speeds.items()},
        **{f"{size}_{key_of(name)}_model_flop_per_second": each for name, each in flops.items()},
    )


def contender_of(name: str, model: dict):
    from benchmarks.gpu_hour.one_device import Loop, MegatronCore, engine

    makes = {"loop, one late": partial(Loop, delay=1), "loop": Loop, "megatron.core": MegatronCore}
    return makes.get(name, engine)(name, model)


def _apart(difference: float) -> str:
    return f"{difference:.2g} apart" if difference else "equal in all bits"


if __name__ == "__main__":
    main(__doc__, run)
