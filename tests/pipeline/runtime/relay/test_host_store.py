"""The host's copy of the stages."""

import pytest
import torch
from torch import nn

from megatron.pipeline.runtime.relay import host_store
from megatron.pipeline.runtime.relay.host_store import HostStore, to_host_memory
from tests.pipeline.runtime.relay.device_meter import shared_mappings


def stages(*modules):
    return {index: {f"{index}.{name}": each for name, each in module.named_parameters()}
            for index, module in enumerate(modules)}  # fmt: skip


def test_the_store_has_the_initial_values_and_the_parameters_an_optimizer_steps():
    """In one precision the host's parameters are its weights: what changes one changes the other."""
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    store = HostStore(stages(first, last), first_version=7)
    newest = store.newest_tensors()
    assert set(newest) == set(store.parameters) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(newest["1.weight"], last.weight) and store.versions == {0: 7, 1: 7}
    with torch.no_grad():
        store.parameters["0.bias"].fill_(3.0)
    assert (newest["0.bias"] == 3.0).all() and not (first.bias == 3.0).any()


def test_masters_are_beside_weights_of_lower_precision():
    """FP32 parameters begin at the weights' values, and the weights are rounded from them behind a step."""
    low = nn.Linear(3, 4).bfloat16()
    store = HostStore(stages(low), masters=True)
    master, weight = store.parameters["0.weight"], store.stages[0].weights["0.weight"]
    assert master.dtype == torch.float32 and weight.dtype == torch.bfloat16
    assert torch.equal(master, low.weight.float())
    with torch.no_grad():
        master += 1 / 3
    store.write_weights(0)
    assert torch.equal(weight, master.bfloat16()) and not torch.equal(weight.float(), master)


def test_masters_may_be_there_already():
    """Those of an optimizer, by name, are the host's parameters; weights without one are parameters themselves."""
    low = nn.Linear(3, 4).bfloat16()
    master = low.weight.detach().float()
    store = HostStore(stages(low), masters={"0.weight": master})
    assert store.parameters["0.weight"] is master and store.parameters["0.bias"].dtype == torch.bfloat16
    master += 1 / 3
    store.write_weights(0)
    assert torch.equal(store.stages[0].weights["0.weight"], master.bfloat16())


def test_gradients_may_have_a_dtype_of_their_own():
    """Low-precision weights whose gradients add up in FP32."""
    store = HostStore(stages(nn.Linear(3, 4).bfloat16()), gradient_dtype=torch.float32)
    place = store.stages[0]
    assert set(place.flat) == {torch.bfloat16} and set(place.flat_gradients) == {torch.float32}
    assert {name: each.shape for name, each in place.gradients.items()} == {"0.weight": (4, 3), "0.bias": (4,)}
    assert store.num_bytes == place.layout.num_bytes + place.gradient_layout.num_bytes


def test_the_host_is_a_shared_mapping():
    """Seen from outside, its memory is not the process's private one, of which a CPU's device is made."""
    store = HostStore(stages(nn.Linear(30, 40)))
    shared = shared_mappings()

    def is_shared(tensor):
        return any(start <= tensor.data_ptr() < end for start, end in shared)

    place = store.stages[0]
    assert all(map(is_shared, (*place.flat.values(), *place.flat_gradients.values())))
    assert not is_shared(torch.empty(30 * 40))
    assert store.num_bytes == 2 * place.layout.num_bytes


def test_stages_have_nothing_in_common():
    """A parameter of two stages would be gone with the first of them; names are one space."""
    shared = nn.Linear(3, 3)
    with pytest.raises(
        ValueError, match=r"1\.weight of stage 1 is the same .* as 0\.weight.*give each stage a copy.*tied"
    ):
        HostStore(stages(shared, shared))
    with pytest.raises(ValueError, match="two parameters are called weight, one of them at stage 1; name them apart"):
        HostStore({index: dict(nn.Linear(2, 2).named_parameters()) for index in range(2)})


def test_a_stage_that_was_built_moves_to_the_hosts_memory(monkeypatch):
    """All parameters, the same objects with the same values, out of the process's private memory."""
    made = []

    def host_mapping(shape, dtype):
        made.append(torch.empty(shape, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(host_store, "host_mapping", host_mapping)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16())
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    to_host_memory(module)
    homes = {buffer.untyped_storage().data_ptr() for buffer in made}
    assert len(made) == 2, "one for each dtype"
    for name, parameter in module.named_parameters():
        was, value = before[name]
        assert parameter is was and torch.equal(parameter, value)
        assert parameter.untyped_storage().data_ptr() in homes
