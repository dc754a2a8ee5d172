"""A provisional step leads where the optimizer's own step would, and leaves the optimizer as it is."""

import copy

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron.pipeline.runtime.update import provisional_step
from megatron.pipeline.runtime.update.provisional_step import ProvisionalStep, is_scale_invariant


class CounterInGroup(torch.optim.Optimizer):
    """Adam as Apex and Transformer Engine write it: the number of steps is the group's, a tensor where graphs are
    captured, and a table of the optimizer has an entry for each parameter."""

    def __init__(self, parameters, lr=0.1, weight_decay=0.0, capturable=False):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})
        self.capturable = capturable
        self.scales = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.zeros(()) if self.capturable else 0
            group["step"] += 1
            count, (first, second) = float(group["step"]), group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                self.scales[parameter] = 1.0
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first**count)
                size = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + 1e-8
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean / size)


OPTIMIZERS = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, weight_decay=0.1),
    "Adam one by one": lambda groups: torch.optim.Adam(groups, lr=0.1, foreach=False),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "learning rate in a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "counter in the group": CounterInGroup,
    "counter in a tensor of the group": lambda groups: CounterInGroup(groups, capturable=True),
}
SIZES = (3, 40, 1, 7, 25)


def build(name, num_steps):
    """Parameters, an optimizer over two groups of them that has stepped so often, and gradients of the next step."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(size, generator=generator).requires_grad_() for size in SIZES]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01, "weight_decay": 0.0}]
    optimizer = OPTIMIZERS[name](groups)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    optimizer.zero_grad()
    gradients = {parameter: torch.randn(parameter.shape, generator=generator) for parameter in parameters}
    return parameters, optimizer, gradients


def taken(optimizer, gradient_of, **options):
    """Parameter -> the value that a provisional step leads to."""
    values = {
        parameter: torch.empty_like(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }

    def scaled(parameter):
        gradient = gradient_of(parameter)
        return None if gradient is None else (gradient, 1.0)

    ProvisionalStep(optimizer).take(scaled, values.__getitem__, **options)
    return values


def contents(value):
    """Something to compare: tensors as lists, tables by the order of their entries."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key if isinstance(key, str) else None, contents(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [contents(each) for each in value]
    return repr(value)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 8, 2**20])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_leads_where_the_step_would(monkeypatch, name, num_steps, chunk_bytes):
    """Bit for bit, with several groups, before the first step, and however few parameters are copied at once; the
    optimizer's state, counters, parameters and gradients stay."""
    monkeypatch.setattr(provisional_step, "CHUNK_BYTES", chunk_bytes)
    parameters, optimizer, gradients = build(name, num_steps)
    before = contents(vars(optimizer)), contents(parameters), contents(list(gradients.values()))
    values = taken(optimizer, gradients.get)
    assert (contents(vars(optimizer)), contents(parameters), contents(list(gradients.values()))) == before
    assert all(parameter.grad is None for parameter in parameters)
    assert contents([*taken(optimizer, gradients.get).values()]) == contents([*values.values()])
    for parameter in parameters:
        parameter.grad = gradients[parameter]
    optimizer.step()
    assert all(torch.equal(parameter, values[parameter]) for parameter in parameters)
    assert contents(parameters) != before[1]


@pytest.mark.parametrize("name", ["AdamW", "counter in the group"])
def test_a_parameter_without_a_gradient_stays(name):
    """It is not stepped, not even by weight decay."""
    parameters, optimizer, gradients = build(name, 1)
    values = taken(optimizer, lambda parameter: None if parameter is parameters[1] else gradients[parameter])
    assert torch.equal(values[parameters[1]], parameters[1])
    assert not torch.equal(values[parameters[0]], parameters[0])


@pytest.mark.parametrize("name", ["Adam", "momentum", "counter in the group"])
def test_hooks_and_schedules_do_not_see_it(name):
    """Neither those of the optimizer nor those of all optimizers; the learning rate is the schedule's at the moment."""
    parameters, optimizer, gradients = build(name, 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    seen = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
    ]
    try:
        for _ in range(2):
            state = copy.deepcopy(scheduler.state_dict())
            values = taken(optimizer, gradients.get)
            assert not seen and scheduler.state_dict() == state
            for parameter in parameters:
                parameter.grad = gradients[parameter].clone()
            optimizer.step()
            scheduler.step()
            assert len(seen) == 4
            assert all(torch.equal(parameter, values[parameter]) for parameter in parameters)
            seen.clear()
    finally:
        for handle in handles:
            handle.remove()


def test_few_parameters_are_copied_at_once(monkeypatch):
    """A chunk ends with the parameter that fills it, and no chunk spans two groups."""
    _, optimizer, gradients = build("counter in the group", 0)
    monkeypatch.setattr(provisional_step, "CHUNK_BYTES", 4 * 8)
    sizes = []
    step = ProvisionalStep(optimizer)
    monkeypatch.setattr(step, "_step", lambda group, copies: sizes.append([copied.numel() for copied in copies]))
    step.take(lambda parameter: (gradients[parameter], 1.0), torch.empty_like)
    assert sizes == [[3, 40], [1, 7], [25]]


def test_whose_steps_do_not_depend_on_the_size_of_gradients():
    """Adam's, whoever wrote it."""
    named = type("FusedAdam", (CounterInGroup,), {})
    parameters = [torch.zeros(1, requires_grad=True)]
    assert all(
        map(is_scale_invariant, (torch.optim.Adam(parameters), torch.optim.AdamW(parameters), named(parameters)))
    )
    assert not is_scale_invariant(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize("name", ["AdamW", "amsgrad"])
@pytest.mark.parametrize("steps", [True, False])
def test_whether_to_step_may_be_known_on_the_device_alone(steps, name):
    """Where it says no, the values are the parameters themselves, though their gradients lead nowhere."""
    parameters, optimizer, gradients = build(name, 1)
    gradients[parameters[0]].fill_(float("inf") if not steps else 1.0)
    values = taken(optimizer, gradients.get, where=lambda parameter: torch.tensor(steps))
    assert all(torch.equal(values[parameter], parameter) != steps for parameter in parameters)
