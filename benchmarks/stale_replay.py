"""An asynchronous chain of stages, replayed in one process: what each computes at which weights, and nothing of when.

A stage of depth k (stages behind it) computes the forward of microbatch i when the backwards of 0 ... i - k - 1 are
done there, and its backward, recomputed, at the newest weights. So where batches have m microbatches, a forward finds
(i - k) // m steps done, and the gradients of (i - k) mod m microbatches that no step has taken yet. Depth 0 everywhere
is `flush`.

    rule                     where the forward is computed, where steps are missing
    stale                    at the newest weights
    predicted                at these, moved by the last step's direction for each missing step
    gap-aware                at the newest weights; the step divides its gradients by the gap
    provisional              at the step that the gradients not stepped yet lead to, scaled to a whole batch; where
                             there are none, at the newest weights
    provisional, predicted   the same, then by that step's direction for each further step; where there are none, as
                             predicted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.pipeline.runtime.update.gap_aware import GapAware
from megatron.pipeline.runtime.update.optimizer_stand_in import copied
from megatron.pipeline.runtime.update.weight_predictor import WeightPredictor, learning_rates_to_come

RULES = ("stale", "predicted", "gap-aware", "provisional", "provisional, predicted")

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class ReplayedStage:
    """A stage with its own optimizer.

    Args:
        module: takes what `data_of` says of a microbatch and the tuple of tensors from the stage before, and gives a
            tuple of tensors; of the last stage the first one is the loss. Called twice for a microbatch, it has to
            compute the same: dropout seeds itself.
        depth: stages behind it, in an asynchronous pipeline; 0: it waits for its backwards.
        make_scheduler: a torch learning-rate scheduler over an optimizer, which steps with it, or None.
    """

    def __init__(
        self, module: nn.Module, depth: int, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler, rule: str
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"{rule!r} is no rule for forwards at stale weights; there are {', '.join(RULES)}")
        self.module, self.depth, self.rule = module, depth, rule
        self.parameters = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(self.parameters)
        self.scheduler = make_scheduler(self.optimizer)
        self.gap_aware = GapAware(self.optimizer) if rule == "gap-aware" and depth else None
        self.num_steps = self.num_unstepped = 0  # microbatches with a gradient that no step has taken
        self.num_provisional = 0  # forwards computed so
        self._make_optimizer = make_optimizer
        self._remembered = -1

    def step(self) -> None:
        if self.gap_aware is None:
            self.optimizer.step()
        else:
            self.gap_aware.step_of(self.num_steps)
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.num_steps, self.num_unstepped = self.num_steps + 1, 0

    @contextmanager
    def weights_of_forward(self, batch: int, size: int) -> Iterator[None]:
        """A block in which the parameters are those of a forward of `batch`; batches have `size` microbatches."""
        horizon = batch - self.num_steps
        if horizon and self.gap_aware is not None and self._remembered < batch:
            self.gap_aware.remember(batch)
            self._remembered = batch
        is_provisional = self.rule.startswith("provisional") and self.num_unstepped > 0
        if not horizon or not (is_provisional or self.rule.endswith("predicted")):
            yield
            return
        true = [each.data for each in self.parameters]
        shown = self._provisional(horizon, size) if is_provisional else self._predicted(horizon)
        for parameter, weights in zip(self.parameters, shown, strict=True):
            parameter.data = weights
        yield
        for parameter, weights in zip(self.parameters, true, strict=True):
            parameter.data = weights

    def _predicted(self, horizon: int) -> list[Tensor]:
        targets = [torch.empty_like(each) for each in self.parameters]
        tensors = [(each, each.detach(), target) for each, target in zip(self.parameters, targets, strict=True)]
        WeightPredictor(self.optimizer, scheduler=self.scheduler).predict(horizon, tensors)
        return targets

    @torch.no_grad()
    def _provisional(self, horizon: int, size: int) -> list[Tensor]:
        """The optimizer's own step on copies, with gradients that hold 1 / `size` of each microbatch's."""
        self.num_provisional += 1
        copies = [each.detach().clone() for each in self.parameters]
        optimizer = self._make_optimizer(copies)
        for parameter, copy in zip(self.parameters, copies, strict=True):
            if parameter.grad is not None:
                copy.grad = parameter.grad * (size / self.num_unstepped)
            if parameter in self.optimizer.state:
                optimizer.state[copy] = {key: copied(value) for key, value in self.optimizer.state[parameter].items()}
        rates = learning_rates_to_come(self.optimizer, self.scheduler, horizon)
        _set_rates(optimizer, [of_group[0] for of_group in rates])
        optimizer.step()
        if self.rule.endswith("predicted"):
            predictor = WeightPredictor(optimizer)
            for further in range(1, horizon):
                _set_rates(optimizer, [of_group[further] for of_group in rates])
                targets = [torch.empty_like(each) for each in copies]
                predictor.predict(1, [(each, each, target) for each, target in zip(copies, targets, strict=True)])
                for copy, target in zip(copies, targets, strict=True):
                    copy.copy_(target)
        return copies


def replay(
    stages: Sequence[ReplayedStage], data_of: Callable[[int], Any], *, num_batches: int, size: int
) -> list[float]:
    """Train, from a drained pipeline to a drained one. `size`: microbatches a batch. Returns the loss of each
    microbatch, at the weights of its forwards.
    """
    num_microbatches = num_batches * size
    inputs: list[dict[int, tuple[Tensor, ...]]] = [{} for _ in stages]  # by microbatch; a leaf each
    recorded: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # forwards that are their own recompute
    gradients: dict[tuple[int, int], list[Tensor]] = {}  # of what a stage handed on
    losses = []
    last = len(stages) - 1
    for now in range(num_microbatches + max(each.depth for each in stages)):
        handed: tuple[Tensor, ...] = ()
        for place, stage in enumerate(stages) if now < num_microbatches else ():
            inputs[place][now] = tuple(each.detach().requires_grad_() for each in handed)
            if stage.depth:
                with torch.no_grad(), stage.weights_of_forward(now // size, size):
                    handed = stage.module(data_of(now), inputs[place][now])
            else:
                handed = recorded[place, now] = stage.module(data_of(now), inputs[place][now])
            if place == last:
                losses.append(handed[0].item())
        for place in reversed(range(len(stages))):
            stage = stages[place]
            mine = now - stage.depth
            if not 0 <= mine < num_microbatches:
                continue
            leaves = inputs[place].pop(mine)
            outputs = recorded.pop((place, mine), None) or stage.module(data_of(mine), leaves)
            if place == last:
                (outputs[0] / size).backward()
            else:
                torch.autograd.backward(outputs, gradients.pop((place, mine)))
            gradients[place - 1, mine] = [each.grad for each in leaves]
            stage.num_unstepped += 1
            if stage.num_unstepped == size:
                stage.step()
        gradients.pop((-1, now - stages[0].depth), None)
    return losses


def _set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
