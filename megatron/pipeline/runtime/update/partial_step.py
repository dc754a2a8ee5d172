"""The step that a part of a batch's gradients lead to, for forwards that come before the batch is complete.

Problem: a forward at stale weights finds gradients that no step has taken yet, since the batch that they belong to is
not complete at its stage.

Solution: their sum holds 1 / size of each microbatch's gradient, so size / number of them times as much stands for the
whole batch. `ProvisionalStep` takes the optimizer's next step with that, at the learning rate that it has now, and
changes nothing. Masters (`master_weights`) are stepped where there are any, and what that makes is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.pipeline.runtime.update.gap_aware import GapAware
from megatron.pipeline.runtime.update.master_weights import MasterWeights
from megatron.pipeline.runtime.update.provisional_step import ProvisionalStep


class PartialStep:
    """`optimizer`: what steps `parameters` (by name), which show their weights while such a step is taken.

    Raises:
        ValueError: gap-aware steps, whose gap is known when a batch is complete.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | MasterWeights | GapAware, parameters: Mapping[str, Tensor]
    ) -> None:
        if isinstance(optimizer, GapAware):
            raise ValueError(
                "gap-aware steps are not taken provisionally: how far weights have moved is known when a batch is "
                "complete; use the plain optimizer, or weights stale"
            )
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        if isinstance(optimizer, MasterWeights):
            self._name_of = {master: self._name_of[weight] for master, weight in optimizer.weight_of.items()}
            optimizer = optimizer.optimizer
        self._provisional = ProvisionalStep(optimizer)
        stepped = {self._name_of[each] for group in optimizer.param_groups for each in group["params"]}
        self._fixed = {name: parameter for name, parameter in parameters.items() if name not in stepped}

    @torch.no_grad()
    def take(self, gradients: Mapping[str, Tensor], factor: float, targets: Mapping[str, Tensor]) -> None:
        """Write where the step leads.

        Args:
            gradients: by name, as they were added up so far; they stay as they are.
            factor: on them.
            targets: by name, of the parameters' shapes and dtypes, and in no parameter.
        """
        for name, parameter in self._fixed.items():
            targets[name].copy_(parameter)
        self._provisional.take(
            lambda parameter: (gradients[self._name_of[parameter]], factor),
            lambda parameter: targets[self._name_of[parameter]],
        )
