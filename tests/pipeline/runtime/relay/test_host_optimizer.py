"""The host's optimizer steps one stage at a time, and has stepped once when all stages have."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn

from megatron.pipeline.runtime.relay import host_store
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer
from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.update.optimizer_wrappers import note_step
from tests.pipeline.runtime.update.test_provisional_step import OPTIMIZERS

NUM_STAGES = 3


class Host:
    """A store of three stages, an optimizer of two groups over them, and a plain optimizer over plain parameters."""

    def __init__(self, make, *, dtype=torch.float32, **options):
        torch.manual_seed(3)
        stages = {}
        for index in range(NUM_STAGES):
            module = nn.Linear(5, 4).to(dtype)
            stages[index] = {f"{index}.{name}": each for name, each in module.named_parameters()}
        self.store = HostStore(stages, **options)
        self.plain = {name: each.detach().clone().to(self.store.parameters[name].dtype).requires_grad_()
                      for named in stages.values() for name, each in named.items()}  # fmt: skip
        self.expected = make(self.groups(self.plain))
        self.host = HostOptimizer(make(self.groups(self.store.parameters)), self.store)

    @staticmethod
    def groups(parameters):
        """Weights, and biases with another learning rate and weight decay."""
        weights, biases = ([each for name, each in parameters.items() if name.endswith(kind)] for kind in ("t", "s"))
        return [{"params": weights}, {"params": biases, "lr": 0.03, "weight_decay": 0.0}]

    def step(self, number, *, factor=1.0):
        """Both, with the same gradients; the stages in any order."""
        generator = torch.Generator().manual_seed(number)
        for name, parameter in self.plain.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            place = self.store.stages[int(name[0])].gradients[name]
            place.copy_(gradient)
            parameter.grad = place.to(parameter.dtype, copy=True).mul_(factor)
        self.expected.step()
        settings = self.host.settings()
        order = random.Random(number).sample(range(NUM_STAGES), NUM_STAGES)
        for stage in order:
            self.host.update(stage, settings, factor=factor)

    def assert_equal(self):
        for name, parameter in self.plain.items():
            assert torch.equal(self.store.parameters[name], parameter), name
        mine, theirs = copy.deepcopy(self.host.optimizer.state_dict()), self.expected.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            for key, value in state.items():
                assert torch.equal(mine["state"][number][key], value) if isinstance(value, torch.Tensor) else (
                    mine["state"][number][key] == value
                )  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_stages_together_are_one_step(name):
    """Parameters and state dict after five steps are bit-equal to the optimizer that steps all at once, for Adam, SGD,
    fused kernels, and where counters are the group's; clipped or not, in any order of the stages.
    """
    host = Host(OPTIMIZERS[name])
    for number in range(5):
        host.step(number, factor=0.3 if number % 2 else 1.0)
        host.assert_equal()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_other_parameters_keeps_its_state(name):
    """It is made of parameters that stand for the host's, as those of a model that are away: they stay as they are, the
    host's are stepped, and the state is under the optimizer's own, from the first step on and after loading.
    """
    host, make = Host(OPTIMIZERS[name]), OPTIMIZERS[name]
    away = {each: nn.Parameter(torch.full((), torch.nan).expand(value.shape))
            for each, value in host.store.parameters.items()}  # fmt: skip
    stands_for = {away[each]: value for each, value in host.store.parameters.items()}
    host.host = HostOptimizer(make(Host.groups(away)), host.store, stands_for=stands_for)
    for number in range(4):
        host.step(number, factor=0.3 if number % 2 else 1.0)
        host.assert_equal()
        if number == 1:
            saved = copy.deepcopy(host.host.optimizer.state_dict())
            host.host.optimizer.state.clear()
            host.host.optimizer.load_state_dict(saved)
    assert set(host.host.optimizer.state) <= set(stands_for)
    assert all(each.isnan().all() and each.grad is None for each in away.values())


def test_other_stages_stay_as_they_are():
    """The update of one stage touches nothing of the others, though they have gradients."""
    host = Host(OPTIMIZERS["AdamW"])
    before = {name: each.detach().clone() for name, each in host.store.parameters.items()}
    for place in host.store.stages.values():
        for flat in place.flat_gradients.values():
            flat.fill_(1.0)
    host.host.update(1, host.host.settings())
    changed = {name for name, each in host.store.parameters.items() if not torch.equal(each, before[name])}
    assert changed == {"1.weight", "1.bias"}
    assert set(host.host.optimizer.state) == {host.store.parameters[name] for name in changed}


def test_updates_use_what_the_groups_said_when_the_batch_began():
    """A schedule that has advanced by the time of a deferred update does not change it."""
    host = Host(OPTIMIZERS["AdamW"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(host.host.optimizer, 0.5)
    settings = host.host.settings()
    host.step(0)
    note_step(host.host.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule that advances before its optimizer's step
        schedule.step()
    rates = [group["lr"] for group in host.host.optimizer.param_groups]
    assert rates == [said["lr"] / 2 for said in settings]
    host.expected.step()
    for stage in range(NUM_STAGES):
        host.host.update(stage, settings)
    assert [group["lr"] for group in host.host.optimizer.param_groups] == rates
    assert all(torch.equal(host.store.parameters[name], each) for name, each in host.plain.items())


class CountsItsGroups(torch.optim.Optimizer):
    """As apex's optimizers: a group counts its steps, unless it has no parameters."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in filter(lambda each: each["params"], self.param_groups):
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["step"])


def test_a_batch_that_begins_before_all_updates_are_made_counts_on():
    """Deferred updates end when the next batch has begun: what steps change in a group is that of the step before, also
    of a group whose parameters are all of a late stage; what a schedule changes is that of the batch.
    """
    host = Host(CountsItsGroups)
    of_stages = [
        [
            {"params": [each for name, each in parameters.items() if name[0] == str(stage)]}
            for stage in range(NUM_STAGES)
        ]
        for parameters in (host.plain, host.store.parameters)
    ]
    host.expected, optimizer = map(CountsItsGroups, of_stages)
    host.host = HostOptimizer(optimizer, host.store)
    settings = [host.host.settings()]
    for number in range(4):
        for name, parameter in host.plain.items():
            parameter.grad = torch.full(parameter.shape, number - 1.5)
            host.store.stages[int(name[0])].gradients[name].copy_(parameter.grad)
        host.expected.step()
        for group in (*host.expected.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.5
        for stage in range(NUM_STAGES):
            host.host.update(stage, settings[number])
            if stage == 0:
                settings.append(host.host.settings())
        host.assert_equal()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_stepped_and_the_weights_written_behind(dtype):
    """The master takes the FP32 step of the low-precision gradient, bit for bit; the weight is the master, rounded. The
    gradient in FP32, which is no one's once its stage is stepped, is gone.
    """
    host = Host(OPTIMIZERS["AdamW"], dtype=dtype, masters=True)
    for number in range(4):
        host.step(number, factor=0.3 if number % 2 else 1.0)
        host.assert_equal()
    for name, weight in host.store.newest_tensors().items():
        assert weight.dtype == dtype and torch.equal(weight, host.plain[name].to(dtype))
        assert host.store.parameters[name].grad is None


class Beside:
    """Replicas in one process: each asks for the same buffers in the same order."""

    def __init__(self, index, buffers):
        self.index, self.size, self.host, self._buffers, self._asked = index, 2, "here", buffers, 0

    def buffer(self, shape, dtype):
        if self._asked == len(self._buffers):
            self._buffers.append(torch.zeros(shape, dtype=dtype))
        self._asked += 1
        return self._buffers[self._asked - 1]

    def barrier(self):
        self.seen = [each.clone() for each in self._buffers]


@pytest.mark.parametrize("name", ["Adam", "amsgrad", "fused AdamW", "SGD", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_step_shares_of_one_store(name, dtype, monkeypatch):
    """Cut inside of parameters: each steps its part, both see the whole, and weights and state dict are those of one,
    also after loading. What neither steps stays.
    """
    monkeypatch.setattr(host_store, "GRAIN", 8)
    buffers = []
    masters = dtype != torch.float32
    hosts = [Host(OPTIMIZERS[name], dtype=dtype, masters=masters, replicas=Beside(index, buffers)) for index in (0, 1)]
    shares = [host.store.stages[0].share["0.weight"] for host in hosts]
    assert shares == [slice(0, 8), slice(8, 20)]
    assert all(map(torch.equal, hosts[1].store.replicas.seen, buffers)), "all wait for the first one's values"
    for number in range(5):
        for host in hosts:
            host.step(number, factor=0.3 if number % 2 else 1.0)
            seen = host.store.replicas.seen
            assert all(map(torch.equal, seen, buffers)), "nothing is written behind the barrier"
        for host in hosts:
            host.assert_equal()
        if number == 1:
            for host in hosts:
                saved = copy.deepcopy(host.host.optimizer.state_dict())
                host.host.optimizer.state.clear()
                host.host.optimizer.load_state_dict(saved)
    one, other = (host.store.newest_tensors() for host in hosts)
    assert all(one[each].data_ptr() == other[each].data_ptr() for each in one)
    assert all(torch.equal(weight, hosts[0].plain[each].to(dtype)) for each, weight in one.items())
    assert len({each.data_ptr() for each in buffers}) == len(buffers) >= 2 * NUM_STAGES, "no two are one"


def test_what_cannot_be_shared_is_refused():
    """An optimizer that may look at a whole parameter."""
    with pytest.raises(ValueError, match=r"replicas on here share one store.*Adagrad may not step each.*use Adam, "):
        Host(lambda groups: torch.optim.Adagrad(groups, lr=0.1), replicas=Beside(0, []))


def test_what_it_cannot_step_is_refused():
    """Parameters that are not the host's, and hooks that would be called for each stage."""
    host = Host(OPTIMIZERS["SGD"])
    with pytest.raises(ValueError, match=r"parameters that are not the host's.*make it of the parameters"):
        HostOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), host.store)
    host.host.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"hooks around its step.*remove them"):
        host.host.update(0, host.host.settings())
