"""What fused kernels are worth: of Adam's step, and of the accumulation of weight gradients.

Adam: torch's AdamW as a loop over tensors, over lists of tensors (`foreach`, which megatron.core takes on a GPU without
further packages), and in one kernel (`fused`); Transformer Engine's and Apex's where they are installed. All step the
same weights with the same gradients. Accumulation: a weight gradient as a BF16 product that is then added to an FP32
buffer, as megatron.core's DDP does it, against a product that adds to the buffer itself: torch's `addmm` with an FP32
result, and Apex's kernel where it is installed. There a GPT is trained both ways, too.

The kernel of steps and predictions is measured by benchmarks/prediction_pass.py.

Row: fused | what are fused Adam and fused accumulation of gradients worth? |
-m benchmarks.gpu_hour.fused | limit 240, expected 50 | a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor

from benchmarks.common.tables import spread
from benchmarks.gpu_hour.process import largest_difference, main
from benchmarks.gpu_hour.result import Result
from megatron import backend

BYTES_OF_A_STEP = 28
"""What a step moves of an FP32 parameter: weight and two moments, read and written, and the gradient, read."""
OPTIONS = {"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-8, "betas": (0.9, 0.999)}
APEX = "fused_weight_gradient_mlp_cuda"
"""Apex's extension for gradients that its products add up."""


def run(result: Result) -> None:
    from benchmarks.gpu_hour import one_device

    sizes = one_device.sizes(result)
    for size, model in sizes.items():
        with one_device.may_not_fit(result, f"Adam on {size} layers"):
            measure_adam(result, size, model)
        with one_device.may_not_fit(result, f"accumulation in {size} layers"):
            measure_accumulation(result, size, model)
        if find_spec(APEX) is not None:
            with one_device.may_not_fit(result, f"training of {size} layers, fused and not"):
                measure_training(result, size, model)
    if find_spec(APEX) is None:
        result.add("Apex is not installed, so no GPT was trained with its fused accumulation")


def shapes_of(model: dict) -> list[tuple[int, ...]]:
    """The shapes of the parameters of a GPT's layers."""
    from benchmarks.gpu_hour.one_device import product_shapes

    matrices = product_shapes(model)
    vectors = [(rows,) for rows, _ in matrices] + 4 * [(model["hidden_size"],)]
    return model["layers"] * [*matrices, *vectors]


def optimizers() -> dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]]:
    """Name -> function that makes an AdamW over parameters."""
    found = {
        name: lambda parameters, options=options: torch.optim.AdamW(parameters, **OPTIONS, **options)
        for name, options in (("loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True}))
    }
    for name, module in (("te", "transformer_engine.pytorch.optimizers"), ("apex", "apex.optimizers")):
        with suppress(ImportError, AttributeError):
            adam = import_module(module).FusedAdam
            found[name] = lambda parameters, adam=adam: adam(parameters, **OPTIONS, adam_w_mode=True)
    return found


def measure_adam(result: Result, size: str, model: dict) -> None:
    from benchmarks.gpu_hour.one_device import alternated, extent, ratios, shown

    weights, steps = {}, {}
    for name, make in optimizers().items():
        generator = torch.Generator(backend.device()).manual_seed(1)
        weights[name] = [_random(shape, generator).requires_grad_() for shape in shapes_of(model)]
        for each in weights[name]:
            each.grad = _random(each.shape, generator)
        steps[name] = make(weights[name]).step
    seconds = alternated(steps, **extent(result, rounds=7, count=10))
    apart = {name: largest_difference(each, weights["loop"]) for name, each in weights.items() if name != "loop"}
    gains = {name: ratios(seconds, "foreach", name) for name in seconds if name != "foreach"}
    number = sum(each.numel() for each in weights["loop"])
    result.add(
        f"A step of AdamW on {number:,} parameters in {len(weights['loop'])} tensors ({size} layers), ms: "
        f"{shown(seconds, 3, 1e3)}; foreach over: {shown(gains, 2)}; GB/s "
        + ", ".join(f"{name} {BYTES_OF_A_STEP * number / median(each) / 1e9:.4g}" for name, each in seconds.items())
        + "; weights apart from the loop's by "
        + ", ".join(f"{name} {most:.2g}" for name, most in apart.items()),
        **{f"{size}_adam_{name}_seconds": each for name, each in seconds.items()},
        **{f"{size}_adam_ratio_of_foreach_over_{name}": each for name, each in gains.items()},
        **{f"{size}_adam_largest_difference_of_{name}": most for name, most in apart.items()},
    )


def accumulations() -> dict[str, Callable[[Tensor, Tensor, Tensor], object]]:
    """Name -> function that adds output_grad.T @ input to an FP32 buffer."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
        "plain": lambda buffer, input, output_grad: buffer.add_(output_grad.t() @ input),
        "addmm": lambda buffer, input, output_grad: torch.addmm(
            buffer, output_grad.t(), input, out_dtype=torch.float32, out=buffer
        ),
    }
    with suppress(ImportError):
        kernel = import_module(APEX).wgrad_gemm_accum_fp32
        found["apex"] = lambda buffer, input, output_grad: kernel(input, output_grad, buffer)
    return found


def measure_accumulation(result: Result, size: str, model: dict) -> None:
    """The weight gradients of a layer's four products."""
    from benchmarks.gpu_hour.one_device import alternated, extent, first_sentence, product_shapes, ratios, shown

    tokens = model["micro_batch_size"] * model["seq_length"]
    generator = torch.Generator(backend.device()).manual_seed(1)
    operands = [
        (torch.zeros(rows, columns, device=backend.device()), _random((tokens, columns), generator).bfloat16(),
         _random((tokens, rows), generator).bfloat16())
        for rows, columns in product_shapes(model)
    ]  # fmt: skip
    calls, sums = {}, {}
    for name, add in accumulations().items():

        def of_layer(add=add) -> None:
            for buffer, input, output_grad in operands:
                add(buffer, input, output_grad)

        for buffer, _, _ in operands:
            buffer.zero_()
        try:
            of_layer()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a release or a device that has no such product
            result.add(f"Weight gradients of {size} layers: no {name} here ({first_sentence(error)})")
            continue
        calls[name], sums[name] = of_layer, [buffer.clone() for buffer, _, _ in operands]
    seconds = alternated(calls, **extent(result, rounds=7, count=10))
    gains = {name: ratios(seconds, "plain", name) for name in seconds if name != "plain"}
    apart = {name: largest_difference(sums[name], sums["plain"]) for name in gains}
    most = max(each.abs().max().item() for each in sums["plain"])
    result.add(
        f"Weight gradients of a {size} layer, ms: {shown(seconds, 3, 1e3)}"
        + "".join(
            f"; plain over {name} {spread(each, 2)}, sums {apart[name]:.2g} apart of {most:.3g} at most"
            for name, each in gains.items()
        ),
        **{f"{size}_accumulation_{name}_seconds": each for name, each in seconds.items()},
        **{f"{size}_accumulation_ratio_of_plain_over_{name}": each for name, each in gains.items()},
        **{f"{size}_accumulation_largest_difference_of_{name}": each for name, each in apart.items()},
    )


def measure_training(result: Result, size: str, model: dict) -> None:
    """A GPT with and without Apex's accumulation, by a plain loop."""
    from benchmarks.gpu_hour.one_device import Loop, extent, num_microbatches, ratios, trained

    loops = {name: Loop(name, model, gradient_accumulation_fusion=name == "fused") for name in ("plain", "fused")}
    seconds = trained(loops, num_microbatches(result), **extent(result, rounds=5, batches=4))
    gain, losses = ratios(seconds, "plain", "fused"), {name: each.losses for name, each in loops.items()}
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    result.add(
        f"A GPT of {size} layers: seconds of a batch without fused accumulation over with {spread(gain, 3)}, losses of "
        f"{len(losses['plain'])} batches {apart:.2g} apart",
        **{f"{size}_training_{name}_seconds_per_batch": each for name, each in seconds.items()},
        **{f"{size}_training_ratio_of_plain_over_fused": gain},
        **{f"{size}_training_largest_difference": apart},
    )


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=backend.device())


if __name__ == "__main__":
    main(__doc__, run)
