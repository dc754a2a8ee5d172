"""Arguments of `Pipeline` that would fail only in the first batch are refused before it, on all ranks."""

import inspect
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from megatron.pipeline import Pipeline
from megatron.pipeline.library.arguments import require_steps
from tests import workers


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
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_would_fail_in_the_first_batch_is_refused_before(reason):
    given = {"module": nn.Linear(8, 8), "loss": mse_loss, "optimizer": make_optimizer, **REFUSALS[reason]}
    with pytest.raises(ValueError) as error:
        Pipeline(given.pop("module"), "flush", 4, **given)
    assert reason in str(error.value)


ACCEPTED = {
    "a scheduler for some runs only": {"scheduler": lambda optimizer: None},
    "parameters in float16": {"module": nn.Linear(8, 8).half(), "loss": lambda output, targets: output.float().mean()},
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_can_be_trained_is_accepted(what):
    given = {"module": nn.Linear(8, 8), "loss": mse_loss, "optimizer": make_optimizer, **ACCEPTED[what]}
    module = given.pop("module")
    before = module.weight.detach().clone()
    with Pipeline(module, "flush", 4, **given) as pipeline:
        pipeline.step((torch.randn(8, 8).to(before.dtype), torch.randn(8, 8)))
    assert module.weight.isfinite().all() and not torch.equal(module.weight, before)


def test_a_step_without_a_signature_is_accepted():
    """As a function in C may be, of which it is not known what it needs."""
    made = SimpleNamespace(step=max)
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(made.step)
    assert require_steps("optimizer", made) is made


def with_a_timeout_of_one_rank() -> str:
    given = {"timeout": 60} if torch.distributed.get_rank() == 1 else {}
    with pytest.raises(ValueError) as error:
        Pipeline(nn.Linear(8, 8), "flush", 4, loss=mse_loss, optimizer=make_optimizer, **given)
    return str(error.value)


def test_a_timeout_of_one_rank_is_refused_on_all():
    reason = "timeout is 60; give a datetime.timedelta above 0"
    assert workers.run(2, f"{__name__}:with_a_timeout_of_one_rank", timeout=30) == [f"rank 1: {reason}", reason]
