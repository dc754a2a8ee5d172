"""Arguments of `Pipeline` that would fail only in the first step are refused before it."""

from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from megatron.pipeline import Pipeline


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


REFUSALS = {
    "the step of LBFGS needs closure": {"optimizer": torch.optim.LBFGS},
    "optimizer returns a NoneType, which has no step": {"optimizer": lambda parameters: None},
    "optimizer is a SGD, which cannot be called": {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))])},
    "the step of ReduceLROnPlateau needs metrics": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
    "loss is a str, which cannot be called": {"loss": "mse"},
    "timeout is 60; give a datetime.timedelta": {"timeout": 60},
    "timeout is datetime.timedelta(0)": {"timeout": timedelta(0)},
    "clip_grad is nan; give the largest norm": {"clip_grad": float("nan")},
    "traced_batches is -1": {"traced_batches": -1},
    "the parameter weight is float16": {"module": nn.Linear(8, 8).half()},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_would_fail_in_the_first_step_is_refused_before(reason):
    given = {"module": nn.Linear(8, 8), "loss": mse_loss, "optimizer": make_optimizer, **REFUSALS[reason]}
    with pytest.raises(ValueError) as error:
        Pipeline(given.pop("module"), "flush", 4, **given)
    assert reason in str(error.value)
