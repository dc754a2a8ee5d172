"""A gradient is divided by how far its weights have moved, counted in usual steps."""

import copy

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from megatron.pipeline.runtime.update.optimizer_wrappers import SMOOTHING, GapAware

MAKERS = {
    "sgd": lambda weights: SGD(weights, lr=0.1),
    "momentum": lambda weights: SGD(weights, lr=0.1, momentum=0.9),
    "adam": lambda weights: Adam(weights, lr=0.1),
    "adamw": lambda weights: AdamW(weights, lr=0.1, weight_decay=0.1),
}


def gradients(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=generator) for _ in range(count)]


def test_a_gradient_is_divided_by_the_gap():
    """By hand, for SGD: the second batch's forward was a step behind."""
    weights = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = GapAware(SGD([weights], lr=0.1))
    weights.grad = torch.tensor([1.0, -2.0, 0.0])
    optimizer.remember(1)
    optimizer.step_of(0)
    torch.testing.assert_close(weights.detach(), torch.tensor([0.9, 2.2, 3.0]))
    weights.grad = torch.tensor([4.0, 4.0, 4.0])
    optimizer.step_of(1)  # the gap is a step of usual size, but where nothing moved yet
    torch.testing.assert_close(weights.detach(), torch.tensor([0.7, 2.0, 2.6]))
    weights.grad = torch.tensor([1.0, 1.0, 1.0])
    optimizer.step_of(2)  # nothing remembered: no gap
    torch.testing.assert_close(weights.detach(), torch.tensor([0.6, 1.9, 2.5]))
    average = torch.tensor([0.1, 0.2, 0.0])
    for step in (torch.tensor([0.2, 0.2, 0.4]), torch.full((3,), 0.1)):
        average = SMOOTHING * average + (1 - SMOOTHING) * step
    torch.testing.assert_close(optimizer.optimizer.state[weights]["step_average"], average)


@pytest.mark.parametrize("maker", MAKERS)
def test_without_a_gap_it_is_the_optimizer(maker):
    """Bit for bit: where nothing is remembered, and where what is remembered has not moved."""
    plain, own = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer, aware = MAKERS[maker]([plain]), GapAware(MAKERS[maker]([own]))
    for batch, gradient in enumerate(gradients(5)):
        if batch % 2:
            aware.remember(batch)
        plain.grad, own.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        aware.step_of(batch)
        assert torch.equal(plain, own)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_checkpoint_has_the_average(maker):
    """Loaded into another one, steps go on alike; a larger gap gives a smaller gradient."""
    weights = torch.nn.Parameter(torch.ones(5))
    aware = GapAware(MAKERS[maker]([weights]))
    first, second, third = gradients(3)
    for batch, gradient in enumerate((first, second)):
        weights.grad = gradient.clone()
        aware.step_of(batch)
    other = torch.nn.Parameter(weights.detach().clone())
    loaded = GapAware(MAKERS[maker]([other]))
    loaded.load_state_dict(copy.deepcopy(aware.state_dict()))
    shrunk = []
    for each, optimizer in ((weights, aware), (other, loaded)):
        with torch.no_grad():
            each += 0.3
            optimizer.remember(2)
            each -= 0.3
        each.grad = third.clone()
        optimizer.step_of(2)
        shrunk.append(each.grad)
    assert torch.equal(weights, other) and torch.equal(*shrunk)
    assert (shrunk[0].abs() < third.abs()).all()
    assert len(loaded.param_groups) == 1


@pytest.mark.parametrize("maker", MAKERS)
def test_real_and_imaginary_parts_have_gaps_of_their_own(maker):
    weights = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parts = torch.nn.Parameter(torch.view_as_real(weights.detach()).clone())
    for parameter, as_its in ((weights, torch.view_as_complex), (parts, torch.clone)):
        optimizer = GapAware(MAKERS[maker]([parameter]))
        for batch, gradient in enumerate(gradients(6)):
            optimizer.remember(batch + 1)
            parameter.grad = as_its(gradient[:4].reshape(2, 2))
            optimizer.step_of(batch)
    torch.testing.assert_close(torch.view_as_real(weights.detach()), parts.detach())
