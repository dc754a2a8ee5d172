"""Weight gradients that are put off: from the I of a microbatch, which the stage before waits for, to its W.

Problem: autograd computes the gradients of a linear's input and of its weight in one node, and a backward that is asked
for the first alone keeps its whole graph for the second.

Solution: a linear's own node decides. While an I runs, it computes the gradient of its input and puts off the product
that makes the weight's: it adds the two factors, its input and the gradient of its output, to the microbatch's
`WeightProducts`. All else (biases, norms, embeddings, attention) is computed in I, and the graph goes with it. W
computes the products and hands each to autograd as the gradient of its parameter. So whatever follows a gradient
follows this one: it is added to ``.grad``, and hooks of the parameter run, such as those that add it to a `main_grad`.

Products of one parameter are added up before they are handed on, in the order in which they were put off, as autograd
does. So gradients are bit-equal to those of a whole backward, unless a part of a parameter's gradient comes from
elsewhere (an embedding that is also the output layer of its stage): that part is added to the batch's sum by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

Product = Callable[[Tensor, Tensor], Tensor | None]
"""From a linear's input and the gradient of its output, the gradient of its weight; None: the kernel has added it."""

_collecting: WeightProducts | None = None  # of the I that runs; not of a thread, since CUDA's backwards have their own


def collecting() -> WeightProducts | None:
    """The products to which a linear's backward postpones its own; None: it computes it, in a whole backward."""
    return _collecting


@dataclass(slots=True)
class _Factors:
    input: Tensor
    output_grad: Tensor
    product: Product


class WeightProducts:
    """The products of one microbatch at one stage. `collect` surrounds its I; `compute`, called once, is its W."""

    def __init__(self) -> None:
        self._of: dict[Parameter, list[_Factors]] = {}

    @contextmanager
    def collect(self) -> Iterator[None]:
        """In this context backwards postpone their products to this object."""
        global _collecting
        before, _collecting = _collecting, self
        try:
            yield
        finally:
            _collecting = before

    def put_off(self, parameter: Parameter, input: Tensor, output_grad: Tensor, product: Product) -> None:
        """Postpone the addition of ``product(input, output_grad)`` to the gradient of `parameter`, in its shape."""
        self._of.setdefault(parameter, []).append(_Factors(input.detach(), output_grad.detach(), product))

    @property
    def num_products(self) -> int:
        return sum(map(len, self._of.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages saved for the products."""
        storages = {
            storage._cdata: storage.nbytes()
            for factors in self._of.values()
            for each in factors
            for storage in (each.input.untyped_storage(), each.output_grad.untyped_storage())
        }
        return sum(storages.values())

    def compute(self) -> None:
        """Add the products to the gradients of their parameters, one parameter after another in the order of the I, and
        let go of the factors of each.
        """
        with torch.enable_grad():  # made last to first, since autograd computes first what was made last
            roots = [_GradientOf.apply(parameter, self._of[parameter]) for parameter in reversed(self._of)]
        self._of.clear()
        if roots:
            torch.autograd.backward(roots)


class DeferredProducts:
    """The products of a stage's microbatches that are between I and W."""

    def __init__(self) -> None:
        self._of: dict[int, WeightProducts] = {}

    def begin(self, microbatch: int) -> WeightProducts:
        """The products to collect during the I of a microbatch."""
        products = self._of[microbatch] = WeightProducts()
        return products

    def compute(self, microbatch: int) -> None:
        """Compute the products of a microbatch: its W."""
        self._of.pop(microbatch).compute()

    def num_bytes(self, microbatch: int) -> int:
        """Bytes saved for the microbatch's W; 0 before its I and after its W."""
        return self._of[microbatch].num_bytes if microbatch in self._of else 0


class _GradientOf(torch.autograd.Function):
    """A root whose backward yields the sum of the products as the gradient of a parameter.

    autograd gets the only reference to it, so it keeps the sum itself where it would copy what a caller still holds.
    """

    @staticmethod
    def forward(ctx, parameter: Parameter, factors: list[_Factors]) -> Tensor:
        ctx.factors = factors
        return parameter.new_empty((), dtype=torch.float32)  # real, as where a backward begins has to be

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, None]:
        factors, ctx.factors = ctx.factors[::-1], None
        total = None
        while factors:
            each = factors.pop()
            product = each.product(each.input, each.output_grad)
            total = product if total is None else total + product
        return total, None
