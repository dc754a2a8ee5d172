"""Learning rates to come are those that the scheduler then sets, and asking changes nothing."""

import copy

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from megatron.pipeline.runtime.update.weight_prediction import learning_rates_to_come

SCHEDULES = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        milestones=[3],
    ),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.2, 0.4], total_steps=20),
}


@pytest.mark.parametrize("num_steps", [0, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates_are_those_that_come(schedule, num_steps):
    """Those of two groups, for schedules of several kinds, before the first step and later."""
    weights = [torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    optimizer = SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.02}], lr=0.1, momentum=0.9)
    scheduler = SCHEDULES[schedule](optimizer)

    def step() -> None:
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    def state() -> str:
        return str(copy.deepcopy((optimizer.state_dict(), scheduler and scheduler.state_dict())))

    for _ in range(num_steps):
        step()
    before = state()
    asked = learning_rates_to_come(optimizer, scheduler, 5)
    assert state() == before
    found = []
    for _ in range(5):
        found.append([group["lr"] for group in optimizer.param_groups])
        step()
    assert asked == tuple(zip(*found, strict=True))
    assert len(set(asked[0])) > 1 or scheduler is None
