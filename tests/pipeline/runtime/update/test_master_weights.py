"""FP32 masters of BF16 weights: what is stepped, what is written, and what a checkpoint has."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

from megatron.pipeline.runtime.update.optimizer_wrappers import GapAware, GapAwareMasters, MasterWeights

MAKERS = {
    "momentum": lambda weights: SGD(weights, lr=0.1, momentum=0.9),
    "adamw": lambda weights: AdamW(weights, lr=0.1, weight_decay=0.1),
}


def made(maker, seed=0):
    """(the wrapper, master, weight)."""
    master = torch.nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(seed)))
    weight = torch.nn.Parameter(master.detach().bfloat16())
    return MasterWeights(maker([master]), {master: weight}), master, weight


def gradients(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, generator=generator).bfloat16() for _ in range(count)]


def test_steps_that_bf16_rounds_away_add_up():
    """400 steps of 1/4096 from 1: BF16 alone stays at 1."""
    alone = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = SGD([alone], lr=2.0**-12)
    master = torch.nn.Parameter(torch.ones(1))
    weight = torch.nn.Parameter(master.detach().bfloat16())
    masters = MasterWeights(SGD([master], lr=2.0**-12), {master: weight})
    for _ in range(400):
        alone.grad = weight.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step()
        masters.step()
    assert alone.item() == 1.0
    assert master.item() == 1.0 - 400 / 4096 and weight.item() == torch.tensor(1.0 - 400 / 4096).bfloat16().item()


@pytest.mark.parametrize("maker", MAKERS)
def test_masters_are_stepped_as_fp32_weights_are(maker):
    """Bit for bit, with the gradients as they are; a weight without one stays."""
    masters, master, weight = made(MAKERS[maker])
    plain = torch.nn.Parameter(master.detach().clone())
    optimizer = MAKERS[maker]([plain])
    for gradient in gradients(4):
        weight.grad, plain.grad = gradient.clone(), gradient.float()
        masters.step()
        optimizer.step()
        assert torch.equal(master, plain) and torch.equal(weight, plain.bfloat16())
        assert torch.equal(weight.grad, gradient) and master.grad is None
    weight.grad = None
    masters.step()
    assert torch.equal(master, plain)
    assert masters.param_groups is masters.optimizer.param_groups


@pytest.mark.parametrize("maker", MAKERS)
def test_a_checkpoint_has_masters(maker):
    masters, master, weight = made(MAKERS[maker])
    loaded, other, other_weight = made(MAKERS[maker], seed=7)
    *before, last = gradients(4)
    for gradient in before:
        weight.grad = gradient
        masters.step()
    loaded.load_state_dict(copy.deepcopy(masters.state_dict()))
    assert torch.equal(master, other)
    weight.grad = other_weight.grad = last
    masters.step()
    loaded.step()
    assert torch.equal(master, other) and torch.equal(weight, other_weight)
    for state in (SGD([torch.nn.Parameter(torch.ones(5))]).state_dict(), {**masters.state_dict(), "masters": []}):
        with pytest.raises(ValueError, match=r"has 0 FP32 masters, which are not the 1 of these weights; go on with"):
            loaded.load_state_dict(state)


@pytest.mark.parametrize("maker", MAKERS)
def test_gap_aware_masters_are_gap_aware_fp32_weights(maker):
    """Gradients in BF16, all else in FP32, and a checkpoint has masters and averages."""
    masters, master, weight = made(MAKERS[maker])
    aware = GapAwareMasters(masters)
    plain = torch.nn.Parameter(master.detach().clone())
    expected, straight = GapAware(MAKERS[maker]([plain])), made(MAKERS[maker])
    for batch, gradient in enumerate(gradients(5)):
        if batch == 2:
            aware.remember(3)
            expected.remember(3)
        if batch == 4:
            inner, other, other_weight = made(MAKERS[maker], seed=7)
            loaded = GapAwareMasters(inner)
            loaded.load_state_dict(copy.deepcopy(aware.state_dict()))
            other_weight.grad = gradient.clone()
            loaded.step_of(batch)
        for each in (weight, straight[2]):
            each.grad = gradient.clone()
        plain.grad = gradient.float()
        aware.step_of(batch)
        expected.step_of(batch)
        straight[0].step()
        assert torch.equal(master, plain) and torch.equal(weight, master.bfloat16())
        assert torch.equal(master, straight[1]) == (batch < 3), "the gap counts from batch 3 on"
    assert torch.equal(other, master) and torch.equal(other_weight, weight)
