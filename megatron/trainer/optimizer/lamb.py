"""LAMB (You et al., 2019, algorithm 2): Adam's direction, and for each tensor a step as long as its weights say.

For a tensor x with gradient g, at step t, as Adam:

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay x

and then, with the norms of the whole tensor, x = x - lr |x| / |r| r. (The algorithm's phi is the identity here.) Where
one of the norms is 0, as of a bias that begins there, their ratio counts as 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Steps each parameter by itself. Its state is Adam's: `step`, `exp_avg`, `exp_avg_sq`.

    Args:
        params: as of any torch optimizer.
        lr, betas, eps, weight_decay: see above; of a group where that says them.
    """

    adams_state = True  # for megatron.backend.fixes, which completes it before a load

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
        """One step of every parameter that has a gradient. `closure`: computes them, and the loss that is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group)
        return loss

    def _step(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        gradient, mean, size, count = parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"].item()
        beta1, beta2 = group["betas"]
        mean.lerp_(gradient, 1 - beta1)
        size.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        direction = mean / (1 - beta1**count)
        direction.div_((size / (1 - beta2**count)).sqrt_().add_(group["eps"]))
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        of_weights, of_direction = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(direction)
        ratio = torch.where((of_weights > 0) & (of_direction > 0), of_weights / of_direction, 1.0)
        parameter.sub_(direction.mul_(ratio * group["lr"]))
