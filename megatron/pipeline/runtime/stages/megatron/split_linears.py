"""The backward of megatron.core's linear layers in two halves: I without the weight product, and W with it.

The linear layers of Transformer Engine split their backwards themselves (`engine_linears`).

Problem: the backward of a linear layer in megatron.core computes the gradients of input and weight together.

Solution: all linear layers of megatron.core (column-parallel, row-parallel, the output layer with its own or a given
weight) use one autograd function. autograd looks up the function's backward when it runs. While an I runs, the backward
is replaced by one that postpones the weight product (`weight_products`). Forwards and whole backwards are those of
megatron.core. A forward that is recomputed inside an I uses the same autograd function, so its weight products are
postponed, too.

Under sequence parallelism each tensor rank has a part of the input, and the parts are gathered for the weight product.
The gather is postponed with the product. All tensor ranks execute the same program, so they gather in the same order.
The gradient of the input is reduced over the tensor ranks in I.
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
from megatron.pipeline.runtime.stages.megatron.engine_linears import puts_off

_LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication


@contextmanager
def putting_off(products: WeightProducts, *, but: Collection[torch.nn.Parameter] = ()) -> Iterator[None]:
    """While the context is active, backwards of linear layers, on any thread, postpone their weight products.

    Args:
        products: receives the postponed products.
        but: weights whose products are not postponed.
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
    """The weight that is both the embedding and the output layer of `model`, if there is one.

    A whole backward adds up the gradients of both uses before it adds them to the gradient of the batch. If I computes
    both, the gradients are added in the same order, so the result has the same bits.
    """
    inner = unwrap_model(model)
    looks_up = getattr(inner, "pre_process", False) or getattr(inner, "mtp_process", False)
    has_both = looks_up and getattr(inner, "post_process", False)
    if not has_both or not getattr(inner, "share_embeddings_and_output_weights", False):
        return frozenset()
    return frozenset((inner.shared_embedding_or_output_weight(),))


def require_splits(model: torch.nn.Module, config: TransformerConfig) -> None:
    """Check that backwards of `model` can be split.

    Raises:
        ValueError: a linear layer of Transformer Engine that does not postpone its weight gradients, or an option that
            cannot be combined with split backwards.
    """
    _require_halves(unwrap_model(model).modules())
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


def _require_halves(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if a module is a linear layer of Transformer Engine whose backward computes both halves."""
    foreign = {
        type(each).__name__ for each in modules if any(map(_is_foreign, type(each).__mro__)) and not puts_off(each)
    }
    if foreign:
        raise ValueError(
            f"the schedule splits backwards into I and W, and the model has {', '.join(sorted(foreign))} of "
            "Transformer Engine, whose backward computes both; build it with delay_wgrad_compute (Transformer Engine "
            "2.3 or later) or with --transformer-impl local, or take a schedule with whole backwards."
        )


def _is_foreign(kind: type) -> bool:
    """Whether a class is Linear, GroupedLinear, LayerNormLinear, LayerNormMLP or similar of Transformer Engine."""
    return kind.__module__.startswith("transformer_engine") and any(word in kind.__name__ for word in ("Linear", "MLP"))


def _input_half(ctx, grad_output: Tensor, products: WeightProducts) -> tuple[Tensor | None, ...]:
    """megatron.core's backward of a linear layer without the gradient of the weight."""
    input, weight = ctx.saved_tensors
    grad_output = grad_output.to(input.dtype)  # newer versions of megatron.core have logits in another dtype
    grad_input = grad_output.matmul(weight)
    handle = None
    if ctx.allreduce_dgrad:
        handle = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    elif ctx.sequence_parallel:
        whole, grad_input = grad_input, torch.empty_like(input)
        handle = layers.dist_reduce_scatter_func(grad_input, whole, group=ctx.tp_group, async_op=True)
    products.put_off(ctx.parameter, input, grad_output, _product_of(ctx))
    # Computed while the gradient of the input is communicated, as in megatron.core.
    grad_bias = _flat(grad_output).sum(dim=0) if ctx.use_bias else None
    if handle is not None:
        handle.wait()
    return grad_input, None, grad_bias, *[None] * (len(ctx.needs_input_grad) - 3)


def _flat(grad_output: Tensor) -> Tensor:
    return prepare_input_tensors_for_wgrad_compute(grad_output, grad_output)[0]


def _product_of(ctx) -> Product:
    """The function with which W computes the weight product. It holds no reference to the graph."""
    group = ctx.tp_group if ctx.sequence_parallel else None
    into = ctx.parameter if ctx.gradient_accumulation_fusion else None
    return functools.partial(_weight_half, group=group, into=into)


def _weight_half(input: Tensor, grad_output: Tensor, *, group, into: torch.nn.Parameter | None) -> Tensor | None:
    """Compute the gradient of a weight, in the dtype of the factors.

    With `into`, the fused kernel adds the gradient to the current `main_grad` of that parameter. The result is None.
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
