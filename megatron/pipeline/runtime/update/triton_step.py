"""Steps of Adam, AdamW and SGD on a GPU, and predictions after them, for many parameters in one Triton launch.

Problem: a prediction reads the parameters and moments that the step before it has just read and written. Kernels for
one operation at a time, as torch has them, read and write each operand many times.

Solution: a program of the kernel keeps a block of a parameter and of its moments in registers. It takes the optimizer's
own step and stores the results in place. Then it takes the predicted step, and stores only its weights. Either step may
be left out. The kernel finds the tensors by their addresses in a table with a row for each parameter, so the tensors
may lie anywhere. A program finds its row by bisection over the numbers of the rows' first blocks.

Arithmetic is FP32, with the operations of torch's operators on a CPU with AVX2 or AVX-512 in the same order. A
multiplication is fused into an addition exactly where these operators fuse it. So a step has the bits of the pass on a
CPU (`elementwise_step`), with one exception: the kernel rounds square roots correctly, and torch's may be off by one in
the last place. torch's own kernels on a GPU may round in other places. All numbers that depend on options or on a count
of steps are in a second table, so options need no kernels of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The dtypes that the kernel can read as gradients of predicted steps and write as predicted weights."""

BLOCK = 1024
"""Elements that a program steps: each of its 128 threads has two vectors of four FP32 numbers per operand."""

NUM_NUMBERS = 8
"""The most numbers of a step. Adam: coupled decay, the factor of a weight under decoupled decay, 1 - beta1, beta2,
1 - beta2, the square root of 1 - beta2^t, epsilon, -lr / (1 - beta1^t). SGD: coupled decay, momentum, 1 - dampening,
-lr."""


@dataclass(frozen=True)
class Step:
    """A step of one parameter.

    Attributes:
        gradient: as many elements as the parameter, of a type in `ELEMENT_TYPES`; FP32 for the optimizer's own step.
        factor: multiplies the gradient; a number or a scalar tensor on the device.
        numbers: at most `NUM_NUMBERS`.
    """

    gradient: Tensor
    factor: float | Tensor
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """The steps of one parameter. All tensors are contiguous and on one device.

    Attributes:
        rule: "adam", "sgd", "momentum" or "nesterov".
        parameter: FP32.
        moments: FP32, two for Adam, none for "sgd", else one.
        own: the optimizer's own step, taken in place; None: no such step.
        ahead: the predicted step, taken after `own`, whose weights are written into `target`; None: no such step.
        target: of a type in `ELEMENT_TYPES`.
        condition: a bool scalar; if it is false, `target` gets the parameter without the step `ahead`. None: true.
    """

    rule: str
    parameter: Tensor
    moments: tuple[Tensor, ...]
    own: Step | None = None
    ahead: Step | None = None
    target: Tensor | None = None
    condition: Tensor | None = None

    def variant(self) -> tuple[str, torch.dtype, torch.dtype, bool]:
        """The arguments of the kernel that are constants when it is compiled."""
        gradient = torch.float32 if self.ahead is None else self.ahead.gradient.dtype
        target = torch.float32 if self.target is None else self.target.dtype
        tensors = (self.parameter, *self.moments, self.target, *(each.gradient for each in self._steps()))
        is_aligned = all(each is None or each.data_ptr() % 16 == 0 for each in tensors)
        return self.rule, gradient, target, is_aligned and self.parameter.numel() % 8 == 0

    def _steps(self) -> list[Step]:
        return [each for each in (self.own, self.ahead) if each is not None]


def take(rows: Iterable[Row]) -> None:
    """Take the steps of all rows. The kernel reads the factors and conditions on the device; the host never waits."""
    of_variant: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row.parameter.numel():
            of_variant[row.variant()].append(row)
    for (rule, gradient, target, is_aligned), alike in of_variant.items():
        _launch(alike, rule, ELEMENT_TYPES[gradient], ELEMENT_TYPES[target], is_aligned)


def warm_up(rule: str, gradient: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels for these types. Loading one may wait for all work on the device, so do it early."""
    for offset in (0, 1):
        made = [torch.zeros(9, dtype=dtype, device=device)[offset:] for dtype in (torch.float32,) * 3 + (target,)]
        step = Step(torch.zeros(9, dtype=gradient, device=device)[offset:], 1.0, (1.0,) * NUM_NUMBERS)
        parameter, first, second, result = (each[: 8 - offset] for each in made)
        take([Row(rule, parameter, (first, second)[: _NUM_MOMENTS[rule]], ahead=step, target=result)])


_NUM_MOMENTS = {"adam": 2, "sgd": 0, "momentum": 1, "nesterov": 1}


def _launch(rows: list[Row], rule: str, gradient: tl.dtype, target: tl.dtype, is_aligned: bool) -> None:
    device = rows[0].parameter.device
    numbers = [
        value
        for row in rows
        for step in (row.own, row.ahead)
        for value in (_numbers(step) if step is not None else (0.0,) * (NUM_NUMBERS + 1))
    ]
    on_device = _table(numbers, torch.float32, device)
    factors, addresses = [], []  # `factors` keeps tensors alive until the launch
    for position, row in enumerate(rows):
        assert row.own is None or not isinstance(row.own.factor, Tensor), "an own step's factor is a number"
        factor_at = on_device.data_ptr() + 4 * ((2 * position + 1) * (NUM_NUMBERS + 1) + NUM_NUMBERS)
        if row.ahead is not None and isinstance(row.ahead.factor, Tensor):
            factors.append(row.ahead.factor.to(device, torch.float32))
            factor_at = factors[-1].data_ptr()
        own, ahead = (each and each.gradient for each in (row.own, row.ahead))
        moments = (*row.moments, None, None)[:2]
        addresses += map(_address, (row.parameter, *moments, own, ahead, row.target, row.condition))
        addresses += (factor_at, row.parameter.numel())
    blocks = [triton.cdiv(row.parameter.numel(), BLOCK) for row in rows]
    firsts = [0, *accumulate(blocks)]
    _kernel[(firsts[-1],)](
        _table([*firsts[:-1], *addresses], torch.int64, device), on_device, len(rows), RULE=rule, GRADIENT=gradient,
        TARGET=target, ALIGNED=is_aligned, BLOCK=BLOCK, NUMBERS=NUM_NUMBERS, enable_fp_fusion=False,
    )  # fmt: skip


def _numbers(step: Step) -> tuple[float, ...]:
    factor = 0.0 if isinstance(step.factor, Tensor) else float(step.factor)
    return (*step.numbers, *(0.0,) * (NUM_NUMBERS - len(step.numbers)), factor)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _table(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values on the device, copied without a wait of the host."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@triton.jit
def _adam(p, g, m, v, numbers):
    weight, beta2 = tl.load(numbers + 2), tl.load(numbers + 3)
    g = tl.fma(tl.load(numbers), p, g)
    change = g - m
    m = tl.where(weight < 0.5, tl.fma(weight, change, m), tl.fma(-change, 1.0 - weight, g))  # as torch.lerp does it
    v = tl.fma(tl.load(numbers + 4) * g, g, v * beta2)
    size = tl.div_rn(tl.sqrt_rn(v), tl.load(numbers + 5)) + tl.load(numbers + 6)
    return p * tl.load(numbers + 1) + tl.div_rn(tl.load(numbers + 7) * m, size), m, v


@triton.jit
def _sgd(p, g, m, numbers, RULE: tl.constexpr):
    momentum = tl.load(numbers + 1)
    g = tl.fma(tl.load(numbers), p, g)
    if RULE != "sgd":
        m = tl.fma(tl.load(numbers + 2), g, m * momentum)
        g = tl.fma(momentum, m, g) if RULE == "nesterov" else m
    return tl.fma(tl.load(numbers + 3), g, p), m


@triton.jit
def _step(p, g, m, v, numbers, RULE: tl.constexpr):
    if RULE == "adam":
        p, m, v = _adam(p, g, m, v, numbers)
    else:
        p, m = _sgd(p, g, m, numbers, RULE)
    return p, m, v


@triton.jit
def _tensor(row, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    table, numbers, num_rows, RULE: tl.constexpr, GRADIENT: tl.constexpr, TARGET: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Step a block of a parameter.

    `table` has the number of each row's first block, and then for each row the addresses of parameter, two moments,
    gradients of both steps, target, condition and factor of the step ahead, and the number of elements. The address 0
    means that there is no such tensor.
    """
    block = tl.program_id(0).to(tl.int64)
    place = tl.program_id(0) * 0
    above = place + num_rows
    while above - place > 1:
        middle = (place + above) // 2
        is_behind = tl.load(table + middle) <= block
        place = tl.where(is_behind, middle, place)
        above = tl.where(is_behind, above, middle)
    row = table + num_rows + place * 9
    own_numbers = numbers + place * 2 * (NUMBERS + 1)
    ahead_numbers = own_numbers + NUMBERS + 1
    num_elements = tl.load(row + 8)
    if ALIGNED:
        num_elements = tl.multiple_of(num_elements, 8)
    offsets = (block - tl.load(table + place)) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    has_own, has_ahead = tl.load(row + 3) != 0, tl.load(row + 4) != 0

    at = _tensor(row, 0, tl.float32, ALIGNED) + offsets
    p = tl.load(at, mask=inside)
    own = tl.load(_tensor(row, 3, tl.float32, ALIGNED) + offsets, mask=offsets < tl.where(has_own, num_elements, 0))
    ahead = tl.load(
        _tensor(row, 4, GRADIENT, ALIGNED) + offsets, mask=offsets < tl.where(has_ahead, num_elements, 0)
    ).to(tl.float32)
    m, v = p, p
    if RULE != "sgd":
        first_at = _tensor(row, 1, tl.float32, ALIGNED) + offsets
        m = tl.load(first_at, mask=inside)
    if RULE == "adam":
        second_at = _tensor(row, 2, tl.float32, ALIGNED) + offsets
        v = tl.load(second_at, mask=inside)

    if has_own:
        p, m, v = _step(p, own * tl.load(own_numbers + NUMBERS), m, v, own_numbers, RULE)
        tl.store(at, p, mask=inside)
        if RULE != "sgd":
            tl.store(first_at, m, mask=inside)
        if RULE == "adam":
            tl.store(second_at, v, mask=inside)
    if has_ahead:
        factor = tl.load(tl.load(row + 7).to(tl.pointer_type(tl.float32)))
        stepped, _, _ = _step(p, ahead * factor, m, v, ahead_numbers, RULE)
        condition = tl.load(row + 6)
        steps = tl.load(condition.to(tl.pointer_type(tl.int8)), mask=condition != 0, other=1)
        stepped = tl.where(steps != 0, stepped, p)
        tl.store(_tensor(row, 5, TARGET, ALIGNED) + offsets, stepped.to(TARGET), mask=inside)
