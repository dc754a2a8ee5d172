"""Transformer Engine's linear layers: backwards in two halves, and weights that are cast to FP8 once per batch.

**Halves.** Problem: a layer that is built with `delay_wgrad_compute` appends the factors of its weight gradient to a
queue in each backward. Its method `backward_dw` takes the oldest factors and **assigns** the gradient to ``.grad``. So
it bypasses autograd and the hooks that add gradients to the batch's buffer. (Older releases assign the gradient only
where ``.grad`` is None.) Under fused accumulation it adds the gradient to `main_grad`. The backward itself computes the
gradients of norms, of biases that are not added inside the product (those of row-parallel layers, and those that the
layer returns), and in FP8 of all biases. `backward_dw` fails if it does not find these gradients of biases in
``.grad``, from where a hook has taken them.

Solution: after an I, the postponed gradients of these layers are listed in the microbatch's `WeightProducts`, beside
those of megatron.core's own linears. In W a product calls `backward_dw`, takes the gradients out of ``.grad``, and
gives them to autograd like all gradients of W. A whole backward turns the queues off.

**FP8.** Problem: a layer casts its weights for the first microbatch of a batch and keeps the casts for the other
microbatches, in one place. megatron.core says which microbatch is the first. For this microbatch a layer overwrites the
kept casts, and under fused accumulation `main_grad`, too. But with delayed weights the next batch begins, with other
weights, while microbatches of the current batch wait for their recompute, or for their backward, which reads the kept
casts.

Solution: no microbatch is called the first. A layer then adds to `main_grad`, and casts only weights that it does not
find in its dictionary of casts. Each batch has a dictionary of its own. So the weights of a batch are cast once, and
the casts are freed when its last backward is done and the next batch has begun. In evaluations each microbatch has a
dictionary of its own.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.activations.weight_products import WeightProducts


class EngineLinears:
    """The layers of a model chunk that can postpone their weight gradients or keep FP8 casts; there may be none.

    `keeps_casts`: whether layers cast their weights once per batch and keep the casts. If not, they cast them for each
    microbatch.
    """

    def __init__(self, model: torch.nn.Module, *, keeps_casts: bool = False) -> None:
        modules = list(unwrap_model(model).modules())
        self._modules = [each for each in modules if puts_off(each)]
        self._casting = [each for each in modules if keeps_casts and hasattr(each, "_fp8_workspaces")]
        self._casts: dict[int, list[dict]] = {}  # batch -> for each layer: name of a weight -> its cast
        self._waiting: Counter[int] = Counter()  # batch -> microbatches between their forward and their backward
        for each in modules:
            if hasattr(each, "disable_parameter_transpose_cache"):
                each.disable_parameter_transpose_cache = not keeps_casts
                each.is_first_microbatch = False

    def begin_forward(self, batch: int) -> None:
        """Announce the forward of a microbatch with the weights of `batch`. Batches come in ascending order."""
        if not self._casting:
            return
        self._waiting[batch] += 1
        self._forget(but=batch)
        self.show_batch(batch)

    def show_batch(self, batch: int | None) -> None:
        """Let layers use the casts of a batch, and keep new casts for the batch. None: use and keep no casts."""
        if not self._casting:
            return
        if batch is not None and batch not in self._casts:
            self._casts[batch] = [{} for _ in self._casting]
        shown = [{} for _ in self._casting] if batch is None else self._casts[batch]
        for module, casts in zip(self._casting, shown, strict=True):
            module._fp8_workspaces = casts

    def end_backward(self, batch: int) -> None:
        """Announce that a microbatch of `batch` no longer needs the batch's weights."""
        if not self._casting:
            return
        self._waiting[batch] -= 1
        self._forget(but=max(self._casts))

    def drop(self, batch: int) -> None:
        """Drop the casts of a batch that begins again, with other weights."""
        self._casts.pop(batch, None)
        self._waiting.pop(batch, None)

    def clear(self) -> None:
        """Drop the casts of all batches, whose backwards will not come."""
        self._casts.clear()
        self._waiting.clear()

    def _forget(self, but: int) -> None:
        for batch in [each for each in self._casts if not self._waiting[each] and each != but]:
            del self._casts[batch], self._waiting[batch]

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
    """Whether a layer of Transformer Engine was built to postpone its weight gradients."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.context is not None


def _list(module: torch.nn.Module, item: list, products: WeightProducts) -> None:
    """Add the gradients that a layer has postponed in one backward, `item` of its queue, to `products`."""
    gradients = _LateGradients(module, item)
    (inputs, output_grads, *_), _ = item
    for number, name in enumerate(module.weight_names):
        held = [*_tensors(inputs, number), *_tensors(output_grads, number)]
        products.put_off(getattr(module, name), *held[:2], partial(gradients.take, name), held=held[2:])
    for number, name in enumerate(module.bias_names if _sums_bias(module) else ()):
        if getattr(module, name).requires_grad:
            [factor] = _tensors(output_grads, number)
            products.put_off(getattr(module, name), factor, factor, partial(gradients.take, name))


def _tensors(factors: object, number: int) -> list[Tensor]:
    """The tensors that hold the memory of a factor of a weight's gradient.

    Grouped layers have a factor for each of their weights. In FP8 a factor has one of Transformer Engine's classes,
    which need not be a tensor.
    """
    factor = factors[number] if isinstance(factors, list | tuple) else factors
    if hasattr(factor, "get_data_tensors"):
        return [each for each in factor.get_data_tensors() if each is not None]
    return [factor]


def _sums_bias(module: torch.nn.Module) -> bool:
    """Whether a layer computes the gradients of its biases with those of its weights."""
    return module.apply_bias and not getattr(module, "gemm_bias_unfused_add", False) and not module.fp8


class _LateGradients:
    """The gradients that `backward_dw` computes from one item of a layer's queue, when the first of them is taken."""

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
