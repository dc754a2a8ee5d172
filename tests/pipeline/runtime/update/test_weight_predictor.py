"""A prediction is where the steps lead that the state of the optimizer announces."""

import copy

import pytest
import torch
from torch.optim import SGD, Adafactor, Adam, AdamW

from megatron.pipeline.runtime.update.versions import AheadVersions
from megatron.pipeline.runtime.update.weight_prediction import WeightPredictor, learning_rates_to_come
from tests.pipeline.runtime.update.test_coming_learning_rates import SCHEDULES

MAKERS = {
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "nesterov": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda groups: SGD(groups, lr=0.1, momentum=0.8, dampening=0.5, maximize=True),
    "adam": lambda groups: Adam(groups, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda groups: Adam(groups, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda groups: AdamW(groups, lr=0.05, weight_decay=0.3, maximize=True),
}


def made(maker, schedule="none", num_steps=4):
    """Two groups of a parameter each after some steps, the optimizer, and a scheduler."""
    torch.manual_seed(0)
    weights = [torch.randn(3, 2, requires_grad=True), torch.randn(4, requires_grad=True)]
    optimizer = MAKERS[maker]([{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.02}])
    scheduler = SCHEDULES[schedule](optimizer)
    for _ in range(num_steps):
        step(optimizer, scheduler, [torch.randn_like(each) for each in weights])
    return weights, optimizer, scheduler


def step(optimizer, scheduler, gradients):
    for group, gradient in zip(optimizer.param_groups, gradients, strict=True):
        group["params"][0].grad = gradient
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def predicted(weights, optimizer, scheduler, horizon):
    targets = [torch.full_like(each, float("nan")) for each in weights]
    predictor = WeightPredictor(optimizer, scheduler=scheduler)
    predictor.predict(horizon, [(each, each.detach(), to) for each, to in zip(weights, targets, strict=True)])
    return targets


def assert_close(targets, weights):
    for target, each in zip(targets, weights, strict=True):
        torch.testing.assert_close(target, each.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maker", ["sgd", "nesterov", "dampening"])
@pytest.mark.parametrize("schedule", ["none", "lambda", "sequence"])
def test_steps_that_keep_the_momentum_lead_there(maker, schedule):
    """torch's own steps with the gradient at which the buffer stays what it is."""
    weights, optimizer, scheduler = made(maker, schedule)
    targets = predicted(weights, optimizer, scheduler, 3)
    for _ in range(3):
        gradients = []
        for each, group in zip(weights, optimizer.param_groups, strict=True):
            kept = optimizer.state[each]["momentum_buffer"] * (1 - group["momentum"]) / (1 - group["dampening"])
            gradients.append((kept - group["weight_decay"] * each.detach()) * (-1 if group["maximize"] else 1))
        step(optimizer, scheduler, gradients)
    assert_close(targets, weights)


@pytest.mark.parametrize("maker", ["adam", "amsgrad", "adamw"])
@pytest.mark.parametrize("schedule", ["none", "lambda"])
def test_adams_steps_go_on_in_the_corrected_direction(maker, schedule):
    """Step after step, decay before each, by the textbook's formulas."""
    weights, optimizer, scheduler = made(maker, schedule)
    targets = predicted(weights, optimizer, scheduler, 3)
    rates = learning_rates_to_come(optimizer, scheduler, 3)
    expected = []
    for each, group, own in zip(weights, optimizer.param_groups, rates, strict=True):
        state, (beta1, beta2) = optimizer.state[each], group["betas"]
        second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        direction = (state["exp_avg"] / (1 - beta1**4)) / ((second / (1 - beta2**4)).sqrt() + group["eps"])
        moved = each.detach().clone()
        for rate in own:
            moved = moved * (1 - rate * (group["weight_decay"] if maker == "adamw" else 0)) - rate * direction
        expected.append(moved)
    assert_close(targets, expected)


@pytest.mark.parametrize("maker", ["adam", "adamw"])
def test_a_constant_gradient_is_predicted(maker):
    """Then the direction is that of the steps that torch takes."""
    weights, optimizer, _ = made(maker, num_steps=0)
    for group in optimizer.param_groups:
        group["weight_decay"] *= maker == "adamw"
    gradients = [torch.randn_like(each) for each in weights]
    step(optimizer, None, gradients)
    targets = predicted(weights, optimizer, None, 4)
    for _ in range(4):
        step(optimizer, None, gradients)
    assert_close(targets, weights)


@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_moves_before_the_first_step_or_without_a_learning_rate(maker):
    """Bit for bit; and a prediction changes neither weights nor state."""
    weights, optimizer, _ = made(maker, num_steps=0)
    assert all(map(torch.equal, weights, predicted(weights, optimizer, None, 2)))
    weights, optimizer, _ = made(maker)
    before = copy.deepcopy((weights, optimizer.state_dict()))
    assert not any(map(torch.equal, weights, predicted(weights, optimizer, None, 2)))
    assert str((weights, optimizer.state_dict())) == str(before)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert all(map(torch.equal, weights, predicted(weights, optimizer, None, 2)))


def test_what_cannot_be_predicted_is_refused():
    weights = [torch.zeros(2, 2, requires_grad=True)]
    with pytest.raises(ValueError, match="Adafactor is not predicted: it keeps no mean of its gradients"):
        WeightPredictor(Adafactor(weights))
    with pytest.raises(ValueError, match="SGD without momentum keeps no mean"):
        WeightPredictor(SGD(weights, lr=0.1))


def test_a_prediction_is_made_once_and_forgotten_with_the_weights():
    """Forwards of one version and horizon share it; the weights are back where a backward loads them."""
    weights, optimizer, _ = made("sgd", num_steps=0)
    named = {"0": torch.nn.Parameter(weights[0].detach()), "1": torch.nn.Parameter(weights[1].detach())}
    optimizer = MAKERS["sgd"]([{"params": [named["0"]]}, {"params": [named["1"]]}])
    step(optimizer, None, [torch.ones(3, 2), torch.ones(4)])
    versions = AheadVersions(named, first_version=1)
    predictor = WeightPredictor(optimizer)
    versions.make_with(
        lambda version, horizon, weights, targets: predictor.predict(
            horizon, [(each, weights[name], targets[name]) for name, each in named.items()]
        )
    )
    plain = {name: each.detach().clone() for name, each in named.items()}
    for horizon, count in ((2, 1), (2, 1), (1, 2)):
        versions.load_ahead(1, horizon)
        torch.testing.assert_close(named["1"].detach(), plain["1"] - 0.1 * horizon)
        assert versions.num_made == count and versions.num_slots == 2 and versions.live() == [1]
        versions.load(1)
        assert all(torch.equal(each, plain[name]) for name, each in named.items())
    versions.load_ahead(1, 1)
    with versions.making(2):
        step(optimizer, None, [torch.ones(3, 2), torch.ones(4)])
    assert torch.equal(named["1"].detach(), versions.newest_tensors()["1"])
    torch.testing.assert_close(named["1"].detach(), plain["1"] - 0.19)
    with pytest.raises(ValueError, match="weight version 1 is not alive"):
        versions.load_ahead(1, 1)
    versions.load_ahead(2, 1)
    versions.restore({2: {name: torch.zeros_like(each) for name, each in named.items()}})
    versions.load_ahead(2, 1)
    torch.testing.assert_close(named["1"].detach(), torch.full((4,), -0.19))


@pytest.mark.parametrize("maker", MAKERS)
def test_complex_parameters_are_predicted_as_their_real_and_imaginary_parts(maker):
    """As torch steps them."""
    torch.manual_seed(0)
    weights = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    parts = torch.view_as_real(weights.detach()).clone().requires_grad_()
    found = []
    for parameter, as_its in ((weights, torch.view_as_complex), (parts, torch.clone)):
        generator = torch.Generator().manual_seed(1)
        optimizer = MAKERS[maker]([parameter])
        for _ in range(3):
            step(optimizer, None, [as_its(torch.randn(3, 2, generator=generator))])
        found += predicted([parameter], optimizer, None, 2)
    assert_close([torch.view_as_real(found[0])], [found[1]])
    assert (found[1] - parts).abs().max() > 1e-3
