"""megatron.core's linears in a backward of two halves.

All linears of its own (column- and row-parallel ones, the output layer with its own or a given weight) are one autograd
function. Its backward is looked up when a graph's backward comes to it. So while an I runs, and only then, it is
another one, which puts the weight product off (`weight_products`); forwards and whole backwards are megatron.core's,
untouched. What is recomputed inside of an I goes the same way, since it is built of the same function.

Under sequence parallelism each tensor rank has a part of the input. For the weight product the parts are gathered; that
goes to W with the product, and as all tensor ranks execute one program, they gather in the same order. The input's
gradient is reduced over the tensor ranks in I.
"""

import functools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute, unwrap_model
from megatron.pipeline.runtime.activations.weight_products import Product, WeightProducts

_LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication


@contextmanager
def putting_off(products: WeightProducts, *, but: Collection[torch.nn.Parameter] = ()) -> Iterator[None]:
    """In this context backwards of linears, on any thread, postpone their weight products to `products`, except for the
    weights in `but`.
    """
    whole = _LINEAR.__dict__["backward"]

    def backward(ctx, grad_output):
        if not ctx.parameter.is_leaf or not ctx.needs_input_grad[1] or ctx.parameter in but:
            return whole.__func__(ctx, grad_output)
        return _input_half(ctx, grad_output, products)

    _LINEAR.backward = staticmethod(backward)
    try:
        yield
    finally:
        _LINEAR.backward = whole


def weights_of_both_ends(model: torch.nn.Module) -> frozenset[torch.nn.Parameter]:
    """The embedding that is also the output layer of the same stage, if `model` has one.

    A whole backward adds up its two parts before it adds them to the gradient of the batch, and so does an I that
    computes both: its sum is the same, to the last bit.
    """
    inner = unwrap_model(model)
    has_both = all(getattr(inner, name, False) for name in ("pre_process", "post_process"))
    if not has_both or not getattr(inner, "share_embeddings_and_output_weights", False):
        return frozenset()
    return frozenset((inner.shared_embedding_or_output_weight(),))


def require_splits(model: torch.nn.Module, config: TransformerConfig) -> None:
    """Raises ValueError if `model` has other linears than megatron.core's, or options that cannot be split."""
    _require_own_linears(unwrap_model(model).modules())
    if config.defer_embedding_wgrad_compute:
        raise ValueError(
            "defer_embedding_wgrad_compute puts off the output layer's weight gradients by itself, and a schedule with "
            "I and W does so in W; turn it off."
        )
    if config.enable_autocast:
        raise ValueError(
            "enable_autocast has the linears cast their weights, which a schedule with I and W does not follow; give "
            "the parameters the dtype of the computation, or take a schedule with whole backwards."
        )


def _require_own_linears(modules: Iterable[torch.nn.Module]) -> None:
    """Raises ValueError if a module is or has a linear of Transformer Engine, whose backward computes both halves."""
    foreign = sorted({type(each).__name__ for each in modules if any(map(_is_foreign, type(each).__mro__))})
    if foreign:
        raise ValueError(
            f"the schedule splits backwards into I and W, and the model has {', '.join(foreign)} of Transformer "
            "Engine, whose backward computes both; build it with --transformer-impl local, or take a schedule "
            "with whole backwards."
        )


def _is_foreign(kind: type) -> bool:
    """Whether it is Transformer Engine's Linear, GroupedLinear, LayerNormLinear, LayerNormMLP or the like."""
    return kind.__module__.startswith("transformer_engine") and any(word in kind.__name__ for word in ("Linear", "MLP"))


def _input_half(ctx, grad_output: Tensor, products: WeightProducts) -> tuple[Tensor | None, ...]:
    """megatron.core's backward without the weight's gradient."""
    input, weight = ctx.saved_tensors
    grad_output = grad_output.to(input.dtype)  # newer versions of megatron.core have logits in another
    grad_input = grad_output.matmul(weight)
    handle = None
    if ctx.allreduce_dgrad:
        handle = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    elif ctx.sequence_parallel:
        whole, grad_input = grad_input, torch.empty_like(input)
        handle = layers.dist_reduce_scatter_func(grad_input, whole, group=ctx.tp_group, async_op=True)
    products.put_off(ctx.parameter, input, grad_output, _product_of(ctx))
    # While the gradient is under way, as megatron.core does with the product.
    grad_bias = _flat(grad_output).sum(dim=0) if ctx.use_bias else None
    if handle is not None:
        handle.wait()
    return grad_input, None, grad_bias, *[None] * (len(ctx.needs_input_grad) - 3)


def _flat(grad_output: Tensor) -> Tensor:
    return prepare_input_tensors_for_wgrad_compute(grad_output, grad_output)[0]


def _product_of(ctx) -> Product:
    """The function with which W computes a linear's product; it holds nothing of the graph."""
    group = ctx.tp_group if ctx.sequence_parallel else None
    into = ctx.parameter if ctx.gradient_accumulation_fusion else None
    return functools.partial(_weight_half, group=group, into=into)


def _weight_half(input: Tensor, grad_output: Tensor, *, group, into: torch.nn.Parameter | None) -> Tensor | None:
    """The weight's gradient in the dtype of the factors, or None where the fused kernel has added it to the `main_grad`
    that the parameter has now.
    """
    if group is not None:
        shape = [input.shape[0] * group.size(), *input.shape[1:]]
        gathered = get_global_memory_buffer().get_tensor(shape, input.dtype, "mpu")
        layers.dist_all_gather_func(gathered, input, group=group)
        input = gathered
    grad_output, input = prepare_input_tensors_for_wgrad_compute(grad_output, input)
    if into is None:
        return grad_output.t().matmul(input)
    kernels = layers.fused_weight_gradient_mlp_cuda
    is_fp32 = into.main_grad.dtype is torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if is_fp32 else kernels.wgrad_gemm_accum_fp16
    add(input, grad_output, into.main_grad)
    into.grad_added_to_main_grad = True
    return None
