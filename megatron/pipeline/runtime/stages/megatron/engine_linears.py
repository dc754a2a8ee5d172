"""The backward of Transformer Engine's linear layers in two halves, which these layers offer themselves.

Problem: a layer that is built with `delay_wgrad_compute` keeps, in each backward, the factors of its weight gradient in
a queue, first in, first out. Its method `backward_dw` takes the oldest, and **assigns** the gradient to ``.grad``, past
autograd and the hooks that add gradients to the batch's buffer; older releases assign it only where there is none.
Under fused accumulation it adds the gradient to `main_grad`. The gradients of norms come with the whole backward. So do
those of biases that are not added inside the product (of row-parallel layers, and those that the layer returns); and
`backward_dw` fails if it does not find them in ``.grad``, from where a hook has taken them.

Solution: after an I, what the layers have put off is listed in the microbatch's `WeightProducts`, beside that of
megatron.core's own linears. A product of W calls `backward_dw`, takes the gradients out of ``.grad``, and gives them to
autograd as W gives all gradients. A whole backward turns the queues off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.activations.weight_products import WeightProducts


class EngineLinears:
    """The layers of a model chunk that can put their weight gradients off; there may be none.

    For a microbatch that megatron.core calls the first, which here is the first one ever, a layer overwrites
    `main_grad` in place of adding to it, and keeps the weights that it has cast to FP8 for all others. But another
    microbatch may have added before, and weights change. So layers are told that they do not know which is the first.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(unwrap_model(model).modules())
        self._modules = [each for each in modules if puts_off(each)]
        for each in modules:
            if hasattr(each, "disable_parameter_transpose_cache"):
                each.disable_parameter_transpose_cache = True

    @contextmanager
    def putting_off(self, products: WeightProducts) -> Iterator[None]:
        """While the context is active, backwards postpone weight gradients; at its end `products` lists them."""
        before = [module.wgrad_store.context.qsize() for module in self._modules]
        yield
        for module, count in zip(self._modules, before, strict=True):
            for item in list(module.wgrad_store.context.queue)[count:]:
                _list(module, item, products)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While the context is active, backwards compute all gradients."""
        for module in self._modules:
            module.wgrad_store.disable_delay_wgrad_compute()
        try:
            yield
        finally:
            for module in self._modules:
                module.wgrad_store.enable_delay_wgrad_compute()


def puts_off(module: torch.nn.Module) -> bool:
    """Whether a layer of Transformer Engine was built to put its weight gradients off."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.context is not None


def _list(module: torch.nn.Module, item: list, products: WeightProducts) -> None:
    """Add the gradients that a layer has put off in one backward, `item` of its queue, to `products`."""
    gradients = _LateGradients(module, item)
    (inputs, output_grads, *_), _ = item
    for number, name in enumerate(module.weight_names):
        products.put_off(
            getattr(module, name), _tensor(inputs, number), _tensor(output_grads, number), partial(gradients.take, name)
        )
    for number, name in enumerate(module.bias_names if _sums_bias(module) else ()):
        if getattr(module, name).requires_grad:
            factor = _tensor(output_grads, number)
            products.put_off(getattr(module, name), factor, factor, partial(gradients.take, name))


def _tensor(factors: Tensor | list[Tensor], number: int) -> Tensor:
    """The factor of a layer's weight, which holds its memory; grouped layers have one for each of their weights."""
    return factors if isinstance(factors, Tensor) else factors[number]


def _sums_bias(module: torch.nn.Module) -> bool:
    """Whether a layer computes the gradients of its biases with those of its weights."""
    return module.apply_bias and not getattr(module, "gemm_bias_unfused_add", False)


class _LateGradients:
    """The gradients that `backward_dw` makes of one item of a layer's queue, as soon as the first is taken."""

    def __init__(self, module: torch.nn.Module, item: list) -> None:
        self._module, self._item = module, item
        self._made: dict[str, Tensor | None] | None = None

    def take(self, name: str, *_: Tensor) -> Tensor | None:
        """The gradient of a parameter; None if it was added to `main_grad`."""
        if self._made is None:
            self._made = self._make()
        return self._made.pop(name)

    def _make(self) -> dict[str, Tensor | None]:
        module, queue = self._module, self._module.wgrad_store.context.queue
        if not queue or queue[0] is not self._item:
            raise RuntimeError(
                f"the queue of a {type(module).__name__} does not begin with the gradients of this W: the program has "
                "W in another order than I"
            )
        self._item = None
        parameters: dict[str, Parameter] = {name: getattr(module, name) for name in module.weight_names}
        if module.use_bias:
            biases = {name: getattr(module, name) for name in module.bias_names}
            if _sums_bias(module):
                parameters |= biases
            else:  # their gradients came in I
                for bias in biases.values():
                    bias.grad = torch.empty_like(bias)
        module.backward_dw()
        made = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in (*parameters.values(), *(biases.values() if module.use_bias else ())):
            parameter.grad = None
        return made
