"""AdamW that stores its moments between steps in a narrower dtype than FP32.

A step is torch's AdamW in FP32, for one parameter after another, followed by the rounding of the moments. (Transformer
Engine's FusedAdam does the same in one kernel, in another order of operations.)

Problem: BF16 has 8 significant bits. With a decay of 0.999 the second moment can shrink by at most a thousandth in a
step, and rounding to the nearest value undoes this. So the moment only grows, and steps become too small.

Solution: dithered rounding. A 16-bit number is added to the bits of the FP32 value before the lower 16 are cut off.
Over the steps these numbers are evenly spread (a Weyl sequence), so an element rounds up in as many steps as it should.
The numbers depend on the step and on the element's index modulo `PERIOD`. So the bits are the same whether one replica
steps a whole parameter or several replicas step shares of it, cut at multiples of `PERIOD`. A resumed run also computes
the bits of an uninterrupted run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

PERIOD = 64
"""The number of elements after which the added numbers repeat."""

_OF_STEP, _OF_ELEMENT = 40503, 27145  # odd numbers near 2^16 / golden ratio and 2^16 (sqrt(2) - 1)


class OneByOne(torch.optim.Optimizer, ABC):
    """An optimizer that steps each parameter by itself. Its state is Adam's: `step`, `exp_avg`, `exp_avg_sq`.

    Args:
        params: the parameters or their groups, as for any torch optimizer.
        lr, betas, eps, weight_decay: as for Adam; a group may have values of its own.
    """

    adams_state = True  # tells megatron.backend.fixes to complete the state before a load

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient.

        `closure`, if given, computes the gradients first and returns the loss, which this method returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group)
        return loss

    @abstractmethod
    def _step(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one parameter in place."""


class NarrowMoments(OneByOne):
    """AdamW that stores each moment between steps in a dtype that the user chose.

    Args:
        dtypes: the dtypes of `exp_avg` and of `exp_avg_sq`.
        dithers: round to BF16 by dithering; otherwise to the nearest value.
        fused: step with torch's fused kernel.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        dtypes: tuple[torch.dtype, torch.dtype],
        dithers: bool = False,
        fused: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self._dtypes = dict(zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True))
        self._dithers, self._fused = dithers, fused

    def make_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Make the state of a parameter, if it has none."""
        state = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0))
        for name, dtype in self._dtypes.items():
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. torch converts loaded moments to their parameter's dtype; this method converts them back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].to(dtype) for name, dtype in self._dtypes.items() if name in state})

    def _step(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.make_state(parameter, group)
        mean, size = (state[name].float() for name in self._dtypes)
        beta1, beta2 = group["betas"]
        adamw(
            [parameter], [parameter.grad], [mean], [size], [], [state["step"]], foreach=False, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False, fused=self._fused,
        )  # fmt: skip
        for name, moment in zip(self._dtypes, (mean, size), strict=True):
            if self._dithers and state[name].dtype is torch.bfloat16:
                dither(moment, int(state["step"]))
            state[name].copy_(moment)


def dither(values: Tensor, step: int) -> None:
    """Round contiguous FP32 values in place to values of BF16, up or down in turns over the steps."""
    bits = values.view(torch.int32).view(-1)
    added = (torch.arange(PERIOD, device=values.device) * _OF_ELEMENT + step * _OF_STEP) % 2**16
    added, whole = added.to(torch.int32), bits.numel() // PERIOD * PERIOD
    bits[:whole].view(-1, PERIOD).add_(added)
    bits[whole:].add_(added[: bits.numel() - whole])
    bits.bitwise_and_(-(2**16))
