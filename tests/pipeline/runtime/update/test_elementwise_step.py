"""Steps in one pass lead, bit for bit, where the optimizer's own step leads; what is not known is stepped on copies."""

import pytest
import torch

from megatron.pipeline.runtime.update import elementwise_step
from megatron.pipeline.runtime.update.elementwise_step import RULES, ElementwiseStep
from megatron.pipeline.runtime.update.provisional_step import ProvisionalStep

KNOWN = {
    "Adam": (torch.optim.Adam, {}),
    "Adam, penalty": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam, decoupled": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5}),
    "AdamW, light first moment": (torch.optim.AdamW, {"betas": (0.3, 0.9)}),
    "AdamW, many at once": (torch.optim.AdamW, {"foreach": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD, penalty": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "momentum, dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
FUSED = {
    f"{name}, fused": (kind, options | {"foreach": None, "fused": True}) for name, (kind, options) in KNOWN.items()
}
BLOCKED = KNOWN | FUSED  # what the pass on a CPU knows
UNKNOWN = {
    "subclass": (type("MyAdamW", (torch.optim.AdamW,), {}), {}),
    "subclass of SGD": (type("MySGD", (torch.optim.SGD,), {}), {}),
    "other": (torch.optim.Adagrad, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
    "differentiable": (torch.optim.AdamW, {"differentiable": True}),
    "capturable": (torch.optim.Adam, {"capturable": True}),
    "amsgrad, fused": (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    "SGD, maximize": (torch.optim.SGD, {"maximize": True}),
    "SGD, differentiable": (torch.optim.SGD, {"differentiable": True}),
    "SGD, maximize, fused": (torch.optim.SGD, {"maximize": True, "fused": True}),
    "learning rate in a tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
}
SHAPES = ((1,), (7,), (64,), (5, 13), (129, 3), (1000,))
FACTOR = 0.37
BLOCK = 64  # so that a parameter has up to 16, the last of them shorter


def views(generator):
    """One tensor for each shape, at odd offsets of one buffer."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    flat = torch.randn(3 + sum(sizes), generator=generator)
    return [part.view(shape) for part, shape in zip(flat[3:].split(sizes), SHAPES, strict=True)]


def build(kind, options, *, num_steps=3):
    """Parameters, an optimizer over two groups of them that has stepped so often, and gradients of the next step."""
    generator = torch.Generator().manual_seed(1)
    parameters = [view.requires_grad_() for view in (each.detach() for each in views(generator))]
    groups = [{"params": parameters[:2], "lr": 0.3, "weight_decay": 0.0}, {"params": parameters[2:]}]
    optimizer = kind(groups, **{"lr": 0.01, **options})
    for _ in range(num_steps):
        for parameter, gradient in zip(parameters, views(generator), strict=True):
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad()
    return parameters, optimizer, dict(zip(parameters, views(generator), strict=True))


def taken(optimizer, gradients, *, dtype=torch.float32, where=None, factor_of=lambda parameter: FACTOR):
    """Parameter -> the value that a provisional step leads to, with a factor times its gradient."""
    targets = {parameter: torch.zeros(parameter.numel() + 1, dtype=dtype)[1:] for parameter in gradients}
    ProvisionalStep(optimizer).take(
        lambda parameter: (gradients[parameter], factor_of(parameter)),
        targets.__getitem__,
        where=where or (lambda parameter: None),
    )
    return [target.view_as(parameter) for parameter, target in targets.items()]


def forbid(monkeypatch, name):
    """Fail where the provisional step takes this way."""

    def fail(*args):
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(
        *{"copies": (ProvisionalStep, "_take_on_copies"), "pass": (ElementwiseStep, "take")}[name], fail
    )


def step(parameters, optimizer, gradients):
    for parameter in parameters:
        parameter.grad = gradients[parameter] * FACTOR
    optimizer.step()


def equal(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(elementwise_step, "BLOCK", BLOCK)


@pytest.mark.parametrize("name", BLOCKED)
def test_a_pass_leads_where_copies_and_the_step_lead(monkeypatch, blocks, name):
    """Twice in a row with the same result, so parameters, moments and gradients stay as they are."""
    parameters, optimizer, gradients = build(*BLOCKED[name])
    with monkeypatch.context() as patched:
        forbid(patched, "copies")
        values, again = taken(optimizer, gradients), taken(optimizer, gradients)
    with monkeypatch.context() as patched:
        patched.setattr(elementwise_step, "RULES", {})
        copied = taken(optimizer, gradients)
    assert equal(values, again) and equal(values, copied) and not equal(values, parameters)
    step(parameters, optimizer, gradients)
    assert equal(values, parameters)


@pytest.mark.parametrize("name", ["AdamW", "Nesterov", "AdamW, fused", "Nesterov, fused"])
def test_a_pass_in_whole_blocks_on_two_threads(monkeypatch, name):
    """With the block that is used, which each thread takes a part of."""
    monkeypatch.setitem(globals(), "SHAPES", ((3, 100_003), (2 * elementwise_step.BLOCK,)))
    forbid(monkeypatch, "copies")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        parameters, optimizer, gradients = build(*BLOCKED[name])
        values = taken(optimizer, gradients)
        torch.set_num_threads(2)
        assert equal(values, taken(optimizer, gradients))
        step(parameters, optimizer, gradients)
    finally:
        torch.set_num_threads(threads)
    assert equal(values, parameters)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "momentum", "SGD", "AdamW, fused", "momentum, fused"])
def test_weights_and_gradients_of_16_bits(monkeypatch, blocks, name):
    """The step is taken in FP32, from the gradient to the result."""
    parameters, optimizer, gradients = build(*BLOCKED[name])
    gradients = {parameter: gradient.bfloat16() for parameter, gradient in gradients.items()}
    forbid(monkeypatch, "copies")
    values = taken(optimizer, gradients, dtype=torch.bfloat16)
    step(parameters, optimizer, {parameter: gradient.float() for parameter, gradient in gradients.items()})
    assert equal(values, [parameter.bfloat16() for parameter in parameters])


@pytest.mark.parametrize("name", ["AdamW", "AdamW, fused"])
def test_some_are_not_stepped(monkeypatch, blocks, name):
    """Which of them, a scalar beside them says; their gradients lead nowhere."""
    parameters, optimizer, gradients = build(*BLOCKED[name])
    stays = parameters[1::2]
    for parameter in stays:
        gradients[parameter].fill_(float("nan"))
    forbid(monkeypatch, "copies")
    values = taken(optimizer, gradients, where=lambda each: torch.tensor(not any(each is other for other in stays)))
    assert equal(values[1::2], stays)
    step(parameters, optimizer, gradients)
    assert equal(values[::2], parameters[::2])


@pytest.mark.parametrize("rules", [RULES, {}], ids=["pass", "copies"])
@pytest.mark.parametrize("name", ["AdamW", "momentum", "AdamW, fused", "momentum, fused"])
def test_factors_may_be_known_on_the_device_alone(monkeypatch, blocks, name, rules):
    """One for most parameters, another for some: the same as numbers."""
    parameters, optimizer, gradients = build(*BLOCKED[name])
    monkeypatch.setattr(elementwise_step, "RULES", rules)
    numbers = {parameter: 0.5 if place in (1, 3) else FACTOR for place, parameter in enumerate(parameters)}
    tensors = {number: torch.tensor(number) for number in numbers.values()}
    expected = taken(optimizer, gradients, factor_of=numbers.__getitem__)
    assert equal(taken(optimizer, gradients, factor_of=lambda parameter: tensors[numbers[parameter]]), expected)
    assert not any(map(torch.equal, taken(optimizer, gradients)[1:4:2], expected[1:4:2]))


@pytest.mark.parametrize("name", ["AdamW", "momentum", "momentum, fused"])
def test_before_the_first_step_there_are_no_moments(monkeypatch, name):
    """The optimizer's own step makes them, on copies."""
    parameters, optimizer, gradients = build(*BLOCKED[name], num_steps=0)
    forbid(monkeypatch, "pass")
    values = taken(optimizer, gradients)
    assert not optimizer.state
    step(parameters, optimizer, gradients)
    assert equal(values, parameters)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known(name):
    _, optimizer, _ = build(*UNKNOWN[name], num_steps=0)
    assert ElementwiseStep.of(optimizer, optimizer.param_groups[-1]) is None


def test_a_subclass_is_stepped_on_copies(monkeypatch):
    """It steps as it likes."""

    class Slower(torch.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 0.5
            super().step(closure)

    forbid(monkeypatch, "pass")
    parameters, optimizer, gradients = build(Slower, {})
    values = taken(optimizer, gradients)
    step(parameters, optimizer, gradients)
    assert equal(values, parameters)


def test_parameters_of_other_kinds_are_stepped_on_copies(monkeypatch):
    """Parameters of another dtype, or not contiguous."""
    forbid(monkeypatch, "pass")
    for parameter in (torch.ones(3, dtype=torch.float64), torch.ones(3, 4).t()):
        optimizer = torch.optim.AdamW([parameter.requires_grad_()])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        gradients = {parameter: torch.ones_like(parameter)}
        [value] = taken(optimizer, gradients, dtype=parameter.dtype)
        step([parameter], optimizer, gradients)
        assert torch.equal(value, parameter)


def test_the_known_rules_are_those_of_exact_types():
    assert set(RULES) == {kind for kind, _ in KNOWN.values()}
