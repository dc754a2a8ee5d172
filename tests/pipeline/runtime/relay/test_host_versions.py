"""Weights on the host as the one version that checkpoints know."""

import pytest
import torch
from torch import nn

from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.resident_weights import HostVersions, ResidentWeights


def test_what_is_loaded_into_the_shown_weights_is_the_version_that_is_fetched():
    """Drained, parameters are the host's weights; written to and reset, they are what the next FETCH brings."""
    modules = {index: nn.Linear(2, 2) for index in range(3)}
    named = {index: {f"{index}.{name}": each for name, each in module.named_parameters()}
             for index, module in modules.items()}  # fmt: skip
    store = HostStore(named, first_version=4)
    resident = ResidentWeights(modules, store, num_resident=2)
    versions = HostVersions(store, resident)
    assert versions.newest == 4 and modules[1].weight.isnan().all()
    versions.show_newest()
    for name, tensor in versions.newest_tensors().items():
        index, local = name.split(".")
        assert modules[int(index)].get_parameter(local).data_ptr() == tensor.data_ptr()
    with torch.no_grad():
        modules[1].weight.fill_(0.5)
    versions.reset(7)
    assert versions.newest == 7
    with pytest.raises(AssertionError, match="the host has version 7 of stage 0, and 4 is fetched"):
        resident.fetch(0, 4)()
    resident.fetch(1, 7)()
    assert (modules[1].weight == 0.5).all() and modules[2].weight.isnan().all()
