"""Postponed weight gradients: from the I of a microbatch, for which the stage before waits, to its W.

Problem: autograd computes the gradients of a linear's input and of its weight in one node. A backward that computes
only the first keeps the whole graph for the second.

Solution: the linear's own node decides. During an I it computes the gradient of its input and postpones the product
that makes the gradient of its weight: it adds the two factors, its input and the gradient of its output, to the
microbatch's `WeightProducts`. I computes all other gradients (biases, norms, embeddings, attention) and frees the
graph. W computes the products and gives each to autograd as the gradient of its parameter. Autograd then treats it as
any other gradient: it is added to ``.grad``, and the parameter's hooks run, such as a hook that adds it to a
`main_grad`.

Products of one parameter are added up first, in the order in which they were postponed, as autograd does. So gradients
are bit-equal to those of a whole backward, with one exception: where a part of a parameter's gradient comes from
another operation (an embedding that is also the output layer of its stage), that part is added to the batch's sum
separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

Product = Callable[[Tensor, Tensor], Tensor | None]
"""(input of a linear, gradient of its output) -> gradient of its weight, or None if the kernel has added it already."""

_collecting: WeightProducts | None = None  # of the running I; not thread-local, since CUDA backwards run on own threads


def collecting() -> WeightProducts | None:
    """Return the object that collects postponed products, or None in a whole backward, where nothing is postponed."""
    return _collecting


@dataclass(slots=True)
class _Factors:
    input: Tensor
    output_grad: Tensor
    product: Product
    held: Sequence[Tensor]


class WeightProducts:
    """The postponed products of one microbatch at one stage. `collect` surrounds its I. `compute` is its W."""

    def __init__(self) -> None:
        self._of: dict[Parameter, list[_Factors]] = {}

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context in which backwards postpone their products to this object."""
        global _collecting
        before, _collecting = _collecting, self
        try:
            yield
        finally:
            _collecting = before

    def put_off(
        self,
        parameter: Parameter,
        input: Tensor,
        output_grad: Tensor,
        product: Product,
        *,
        held: Sequence[Tensor] = (),
    ) -> None:
        """Postpone ``product(input, output_grad)``, a summand of the gradient of `parameter`, with its shape.

        `held`: the tensors that the product holds in addition to the two factors.
        """
        self._of.setdefault(parameter, []).append(_Factors(input.detach(), output_grad.detach(), product, held))

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that the factors hold, each storage counted once."""
        storages = {
            storage._cdata: storage.nbytes()
            for factors in self._of.values()
            for each in factors
            for storage in (held.untyped_storage() for held in (each.input, each.output_grad, *each.held))
        }
        return sum(storages.values())

    def compute(self) -> None:
        """Add the products to the gradients of their parameters, in the order of the I. Call it once.

        The factors of each parameter are freed when its products are computed.
        """
        with torch.enable_grad():  # made in reverse, since autograd runs the node made last first
            roots = [_GradientOf.apply(parameter, self._of[parameter]) for parameter in reversed(self._of)]
        self._of.clear()
        if roots:
            torch.autograd.backward(roots)


class DeferredProducts:
    """The postponed products of a stage's microbatches between I and W."""

    def __init__(self) -> None:
        self._of: dict[int, WeightProducts] = {}

    def begin(self, microbatch: int) -> WeightProducts:
        """Return the new object that collects the products of a microbatch's I."""
        products = self._of[microbatch] = WeightProducts()
        return products

    def compute(self, microbatch: int) -> None:
        """Run the W of a microbatch: compute its products."""
        self._of.pop(microbatch).compute()

    def num_bytes(self, microbatch: int) -> int:
        """Return the bytes saved for the microbatch's W; 0 before its I and after its W."""
        return self._of[microbatch].num_bytes if microbatch in self._of else 0


class _GradientOf(torch.autograd.Function):
    """A root of a backward that yields the sum of the products as the gradient of a parameter.

    Autograd gets the only reference to the sum, so it stores the sum itself as ``.grad`` and makes no copy.
    """

    @staticmethod
    def forward(ctx, parameter: Parameter, factors: list[_Factors]) -> Tensor:
        ctx.factors = factors
        return parameter.new_empty((), dtype=torch.float32)  # real, as the root of a backward has to be

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, None]:
        factors, ctx.factors = ctx.factors[::-1], None
        total = None
        while factors:
            each = factors.pop()
            product = each.product(each.input, each.output_grad)
            total = product if total is None else total + product
        return total, None
