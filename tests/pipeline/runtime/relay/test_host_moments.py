"""An optimizer's moments lie in the host's memory."""

import pytest
import torch
from torch import nn

from megatron.pipeline.runtime.relay.host_optimizer import HostMoments, is_of_each_element
from megatron.pipeline.runtime.relay.host_store import HostStore
from tests.pipeline.runtime.relay.device_meter import shared_mappings
from tests.pipeline.runtime.relay.test_host_optimizer import NUM_STAGES, Host
from tests.pipeline.runtime.update.test_provisional_step import OPTIMIZERS


def are_shared(tensors):
    mappings = shared_mappings()
    return all(any(start <= each.data_ptr() < end for start, end in mappings) for each in tensors)


def moments_of(optimizer):
    return [value for parameter, state in optimizer.state.items() for name, value in state.items()
            if is_of_each_element(name, value, parameter.shape)]  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_lie_in_the_stores_memory(name):
    """From the first step of their stage on, and again after a state dict was loaded; with the bits of the optimizer
    that keeps its own.
    """
    host = Host(OPTIMIZERS[name])
    for number in range(4):
        host.step(number)
        host.assert_equal()
        found = moments_of(host.host.optimizer)
        assert are_shared(found) and host.host.moments.num_bytes >= sum(each.nbytes for each in found)
        if number == 1:
            loaded = {key: value.clone() if isinstance(value, torch.Tensor) else value
                      for key, value in host.host.optimizer.state_dict().items()}  # fmt: skip
            loaded["state"] = {
                index: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in each.items()}
                for index, each in loaded["state"].items()
            }
            host.host.optimizer.load_state_dict(loaded)
            num_bytes = host.host.moments.num_bytes
            assert not found or not are_shared(moments_of(host.host.optimizer))
    assert host.host.moments.num_bytes == num_bytes, "what is loaded takes the places that there are"


def test_masters_move_into_the_stores_memory():
    """New ones, and those that an optimizer has made, which remain the tensors that they are."""
    low = nn.Linear(3, 4).bfloat16()
    master = low.weight.detach().float()
    before = master.clone()
    HostStore({0: dict(low.named_parameters())}, masters={"weight": master})
    assert are_shared([master]) and torch.equal(master, before)
    host = Host(OPTIMIZERS["AdamW"], dtype=torch.bfloat16, masters=True)
    assert are_shared(host.store.parameters.values())
    assert host.store.num_bytes == sum(stage.num_bytes for stage in host.store.stages.values()) > NUM_STAGES * 24 * 6


def test_a_counter_is_no_moment():
    """Though a parameter may have its shape; and a place is taken once."""
    parameter = nn.Parameter(torch.tensor(3.0))
    state = {parameter: {"step": torch.tensor(2.0), "exp_avg": torch.tensor(0.5), "scale": 2.0, "row": torch.zeros(2)}}
    moments = HostMoments(lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    assert moments.strangers(state, [parameter]) == {(parameter, "exp_avg"): torch.tensor(0.5)}
    place = moments.places({(parameter, "exp_avg"): torch.float32})[parameter, "exp_avg"]
    state[parameter]["exp_avg"] = place
    assert moments.strangers(state, [parameter]) == {} and moments.num_bytes == 64
    assert moments.places({(parameter, "exp_avg"): torch.float32})[parameter, "exp_avg"] is place
    other = moments.places({(parameter, "exp_avg"): torch.float64})[parameter, "exp_avg"]
    assert other.dtype == torch.float64, "what is loaded in another precision has a place of that"
