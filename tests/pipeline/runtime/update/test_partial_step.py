"""A step that a part of a batch leads to is the optimizer's own, and leaves it as it was."""

import copy

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW

from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.contract.stage import BatchInfo
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.optimizer_wrappers import GapAware, GapAwareMasters, MasterWeights
from megatron.pipeline.runtime.update.provisional_step import PartialStep
from megatron.pipeline.runtime.update.versions import AheadVersions

MAKERS = {
    "plain": lambda weights: SGD(weights, lr=0.1),
    "momentum": lambda weights: SGD(weights, lr=0.1, momentum=0.9),
    "adamw": lambda weights: AdamW(weights, lr=0.1, weight_decay=0.1),
    "adafactor": lambda weights: Adafactor(weights, lr=0.1),
}


def gradients(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 2, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("has_masters", [False, True], ids=["float32", "masters"])
@pytest.mark.parametrize("maker", MAKERS)
def test_it_is_the_step(maker, has_masters):
    """The step of the gradients times the factor, bit for bit; the true step is what it would have been without it."""
    outcomes = []
    for looks in (True, False):
        torch.manual_seed(0)
        master = torch.nn.Parameter(torch.randn(3, 2))
        weight = torch.nn.Parameter(master.detach().bfloat16()) if has_masters else master
        fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        inner = MAKERS[maker]([master])
        optimizer = MasterWeights(inner, {master: weight}) if has_masters else inner
        step = PartialStep(optimizer, {"weight": weight, "fixed": fixed})
        for gradient in gradients(3):
            weight.grad = gradient.to(weight.dtype)
            if looks:
                before = copy.deepcopy((master, inner.state_dict()))
                target = {"weight": torch.empty_like(weight), "fixed": torch.empty(2)}
                step.take({"weight": weight.grad / 2}, 2.0, target)
                assert str(before) == str((master, inner.state_dict()))
                assert torch.equal(weight.grad, gradient.to(weight.dtype)) and torch.equal(target["fixed"], fixed)
            optimizer.step()
            if looks:
                assert torch.equal(target["weight"], weight)
        outcomes.append(master)
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (3, 1, 0, 4)], ids=["means", "sums"])
def test_an_update_steps_its_buffer_at_the_rate_of_now(counts):
    """Half of a batch, and then the step: what is ahead is made once, and gone with the weights. Gradients of sums are
    divided by what those that are there count.
    """
    weight = torch.nn.Parameter(torch.ones(2))
    versions = AheadVersions({"weight": weight}, ahead=Ahead.PROVISIONAL_STEP)
    optimizer = SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    update = ModuleUpdate(
        {"weight": weight}, versions=versions, optimizer=optimizer, scheduler=scheduler, num_grad_buffers=1,
        counts=lambda batch, number: sum(counts[:number]),
    )  # fmt: skip
    for batch, rate in enumerate((1.0, 0.5)):
        info = BatchInfo(batch, num_microbatches=4, num_samples=4)
        update.begin_batch(info)
        update.begin_backward(info)
        before = versions.newest_tensors()["weight"].clone()
        for done in range(1, 5):
            weight.grad += 0.25 * done
            for _ in range(2 if done < 4 else 0):
                versions.load_ahead(batch, done)
                mean = sum(range(1, done + 1)) / sum(counts[:done])
                torch.testing.assert_close(weight.detach(), before - rate * mean)
                versions.load(batch)
                assert torch.equal(weight.detach(), before)
        update.step(batch + 1)
        torch.testing.assert_close(weight.detach(), before - rate * 10 / sum(counts))
        assert versions.num_made == 3 * (batch + 1) and versions.num_slots == 2
    with pytest.raises(ValueError, match=r"weight version 0 is not alive"):
        versions.load_ahead(0, 1)


def test_gap_aware_steps_are_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    masters = MasterWeights(SGD([weight], lr=0.1), {weight: weight})
    for optimizer in (GapAware(SGD([weight], lr=0.1)), GapAwareMasters(masters)):
        with pytest.raises(ValueError, match=r"gap-aware steps are not taken provisionally.*; use the plain optimizer"):
            PartialStep(optimizer, {"weight": weight})
