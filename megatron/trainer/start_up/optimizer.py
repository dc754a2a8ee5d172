"""The optimizer of a run: megatron.core's, which owns masters, groups and formats, around torch's or this project's.

megatron.core knows Adam and SGD. What else is a torch optimizer takes the place of its Adam before that has any state:
the groups, which hold the masters of 16-bit weights by then, are kept, and so are the names of the moments.

LAMB (You et al., 2019, algorithm 2): Adam's direction, and for each tensor a step as long as its weights say.

For a tensor x with gradient g, at step t, as Adam:

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay x

and then, with the norms of the whole tensor, x = x - lr |x| / |r| r. (The algorithm's phi is the identity here.) Where
one of the norms is 0, as of a bias that begins there, their ratio counts as 1.

torch's optimizers step parameters one by one, an operation after another (`loop`), or each in one pass of a compiled
kernel (`fused`): on a CPU several times faster; the last bits may differ. The kernel is in the optimizer's groups,
which a checkpoint brings along, so it is chosen after loading.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.backend.cpu import optimizers_on_host
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.trainer.models import core_config

# --- LAMB -------------------------------------------------------------------------------------------------------------


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


# --- the optimizer of a run -------------------------------------------------------------------------------------------

OWN = {"lamb": Lamb}
"""Value of --optimizer -> what takes Adam's place: made of groups with Adam's numbers, with moments of Adam's names."""


def build_optimizer(
    args: argparse.Namespace, chunks: Sequence[torch.nn.Module], *, on_host: bool = False
) -> MegatronOptimizer:
    """The optimizer of `args` for a rank's chunks. `on_host`: their weights lie there, and steps are made there."""
    wanted = core_config.optimizer_config(args)
    own = OWN.get(wanted.optimizer)
    if own is not None:
        wanted = replace(wanted, optimizer="adam")
    with optimizers_on_host() if on_host else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(wanted, chunks, config_overrides=get_standard_config_overrides(wanted))
    if own is not None:
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not each.is_stub_optimizer:
                each.optimizer = _in_place_of(each.optimizer, own)
    return optimizer


def _in_place_of(adam: torch.optim.Optimizer, own: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer of the groups of `adam`, without what says only how Adam computes."""
    assert not adam.state, "an optimizer that has stepped cannot be replaced"
    made = own(adam.param_groups)
    for group in made.param_groups:
        for name in adam.defaults.keys() - made.defaults.keys():
            del group[name]
    return made


# --- the kernel that takes the steps ----------------------------------------------------------------------------------

KERNELS = ("loop", "fused")
_WITH_KERNELS = (torch.optim.Adam, torch.optim.SGD)  # and AdamW, which is an Adam


def choose_kernel(optimizer: MegatronOptimizer, kernel: str) -> None:
    """Have `optimizer` step with a kernel of `KERNELS`. What is not torch's (Apex, Transformer Engine) has one only."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(each, "optimizer", None)
        if isinstance(inner, _WITH_KERNELS):
            for group in inner.param_groups:
                group["fused"] = True if kernel == "fused" else None
