"""BF16 beside FP32 and TF32, and FP8: seconds of a batch, and the losses after the same steps.

A GPT of megatron.core's layers is trained in BF16 (with FP32 masters), in FP32, and in FP32 with products in TF32, from
the same weights on the same data, in turns. Where Transformer Engine is installed, its layers are trained in BF16 and
in FP8 (`hybrid`, `tensorwise`) by megatron.core's schedule. Whether it is or not, torch's own FP8 products show what a
layer could gain at the most: its four products in BF16, in FP8, and in FP8 with the cast of their input by its largest
value (weights are cast once a batch).

Row: precision | what are BF16 and FP8 worth, and do their losses agree with FP32's? |
-m benchmarks.gpu_hour.precision | limit 240, expected 80 | a GPU; FP8 from compute capability 8.9 on
"""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median

import torch

from benchmarks.gpu_hour.process import main
from benchmarks.gpu_hour.result import Result
from megatron import backend

NUM_MICROBATCHES = 2
E4M3_MOST = torch.finfo(torch.float8_e4m3fn).max


def run(result: Result) -> None:
    from benchmarks.gpu_hour import one_device

    sizes = one_device.sizes(result)
    for size in [*sizes][1:]:
        with one_device.may_not_fit(result, f"{size} layers in BF16, FP32 and TF32"):
            measure(result, size, "megatron.core's", in_plain_layers(sizes[size]), sizes[size], "fp32")
        if find_spec("transformer_engine") is not None:
            with one_device.may_not_fit(result, f"{size} layers of Transformer Engine"):
                measure(result, size, "Transformer Engine's", in_engine_layers(sizes[size]), sizes[size], "te_bf16")
        with one_device.may_not_fit(result, f"FP8 products of {size} layers"):
            measure_products(result, size, sizes[size])
    if find_spec("transformer_engine") is None:
        result.add("Transformer Engine is not installed, so FP8 was measured in products alone")


def in_plain_layers(model: dict) -> dict:
    """Name -> contender, all with the weights that BF16 begins with."""
    from benchmarks.gpu_hour.one_device import Loop

    class InTF32(Loop):
        def run(self, num_microbatches: int) -> None:
            torch.set_float32_matmul_precision("high")
            try:
                super().run(num_microbatches)
            finally:
                torch.set_float32_matmul_precision("highest")

    bf16 = Loop("bf16", model)
    others = Loop("fp32", model, dtype=torch.float32), InTF32("tf32", model, dtype=torch.float32)
    for other in others:
        with torch.no_grad():
            for mine, narrow in zip(other.chunk.parameters(), bf16.chunk.parameters(), strict=True):
                mine.copy_(narrow)
    return {each.name: each for each in (bf16, *others)}


def in_engine_layers(model: dict) -> dict:
    """The same with Transformer Engine's layers. megatron.core's schedule tells them when weights are new."""
    from benchmarks.gpu_hour.one_device import MegatronCore
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec()
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    return {
        name: MegatronCore(name, model, layer_spec=spec, **options)
        for name, options in (("te_bf16", {}), ("te_fp8", fp8))
    }


def measure(result: Result, size: str, whose: str, contenders: dict, model: dict, reference: str) -> None:
    from benchmarks.gpu_hour.one_device import extent, ratios, shown, trained

    seconds = trained(contenders, NUM_MICROBATCHES, **extent(result, rounds=5, batches=1))
    losses = {name: each.losses for name, each in contenders.items()}
    found = {name: ratios(seconds, reference, name) for name in contenders if name != reference}
    result.add(
        f"{whose} {size} layers, ms of a batch: {shown(seconds, 1, 1e3)}; {reference} over: {shown(found, 2)}",
        **{f"{size}_{name}_seconds_per_batch": each for name, each in seconds.items()},
        **{f"{size}_ratio_of_{reference}_over_{name}": each for name, each in found.items()},
    )
    result.add(
        f"{whose} {size} layers, losses of the first batch and after {len(losses[reference]) - 1} steps: "
        + ", ".join(f"{name} {each[0]:.5f} and {each[-1]:.5f}" for name, each in losses.items()),
        **{f"{size}_losses_in_{name}": each for name, each in losses.items()},
    )


def measure_products(result: Result, size: str, model: dict) -> None:
    """The four products of a layer's forward."""
    from benchmarks.gpu_hour.one_device import alternated, extent, first_sentence, product_shapes, ratios, shown

    tokens, shapes = model["micro_batch_size"] * model["seq_length"], product_shapes(model)
    device, pairs = backend.device(), []
    for rows, columns in shapes:
        input, weight = (torch.randn(each, columns, device=device, dtype=torch.bfloat16) for each in (tokens, rows))
        pairs.append((input, weight, cast(input), cast(weight)))

    def in_bf16() -> list[torch.Tensor]:
        return [input @ weight.t() for input, weight, _, _ in pairs]

    def in_fp8() -> list[torch.Tensor]:
        return [product(narrow, narrow_weight) for _, _, narrow, narrow_weight in pairs]

    def with_casts() -> list[torch.Tensor]:
        return [product(cast(input), narrow_weight) for input, _, _, narrow_weight in pairs]

    try:
        with_casts()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a card or a build without these products
        result.add(f"torch has no FP8 product here: {first_sentence(error)}")
        return
    calls = {"bf16": in_bf16, "fp8": in_fp8, "fp8_with_casts": with_casts}
    seconds = alternated(calls, **extent(result, rounds=5, count=20))
    errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(with_casts(), in_bf16(), strict=True)]
    gains = {name: ratios(seconds, "bf16", name) for name in ("fp8", "fp8_with_casts")}
    operations = sum(2 * tokens * rows * columns for rows, columns in shapes)
    rates = ", ".join(f"{name} {operations / median(each) / 1e12:.4g}" for name, each in seconds.items())
    result.add(
        f"The four forward products of a {size} layer, TFLOP/s: {rates}; bf16's seconds over: {shown(gains, 2)}; FP8's "
        f"results are {max(errors):.2g} off in norm",
        **{f"{size}_products_in_{name}_seconds": each for name, each in seconds.items()},
        **{f"{size}_products_ratio_of_bf16_over_{name}": each for name, each in gains.items()},
        **{f"{size}_products_relative_error_of_fp8": errors},
    )


def cast(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in e4m3 by its largest value, and the factor that undoes its scale."""
    scale = E4M3_MOST / tensor.abs().amax().float()
    return (tensor * scale).to(torch.float8_e4m3fn), scale.reciprocal()


def product(left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """left @ right.T of two casts, in BF16. torch wants the second one in columns, as the transpose of rows is."""
    return torch._scaled_mm(
        left[0], right[0].t(), scale_a=left[1], scale_b=right[1], out_dtype=torch.bfloat16, use_fast_accum=True
    )


if __name__ == "__main__":
    main(__doc__, run)
