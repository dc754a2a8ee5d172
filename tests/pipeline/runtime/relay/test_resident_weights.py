"""Weights come to the device and go, and what is away is NaN."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.resident_weights import ResidentWeights, places

INPUT = torch.ones(1, 4)


class Relay:
    """Stages of one linear layer each, with the outputs that they had before their weights went away."""

    def __init__(self, num_stages=4, num_resident=2, sizes=None):
        torch.manual_seed(0)
        widths = sizes or [4] * num_stages
        self.modules = {index: nn.Sequential() for index in range(len(widths))}
        for index, (module, width) in enumerate(zip(self.modules.values(), widths, strict=True)):
            module.add_module(f"layer{index}", nn.Linear(4, width))
        self.outputs = {index: module(INPUT).detach() for index, module in self.modules.items()}
        self.store = HostStore({index: dict(module.named_parameters()) for index, module in self.modules.items()})
        self.weights = ResidentWeights(self.modules, self.store, num_resident=num_resident)

    def fetch(self, stage, version=0):
        self.weights.fetch(stage, version)()

    def free(self, stage):
        self.weights.free(stage)()

    def output(self, stage):
        return self.modules[stage](INPUT).detach()


def test_what_is_away_is_nan():
    """Before its first FETCH, and from FREE on, a module computes NaN; between them, what it did with its own
    weights.
    """
    relay = Relay()
    assert all(relay.output(stage).isnan().all() for stage in relay.modules)
    relay.fetch(1)
    relay.weights.of_stage(1).load(0)
    assert torch.equal(relay.output(1), relay.outputs[1]) and relay.output(2).isnan().all()
    carry_out = relay.weights.free(1)
    assert relay.output(1).isnan().all(), "at once, though the lane has not come to it"
    carry_out()


def test_what_is_away_takes_no_memory():
    """A parameter that is away is one element, whatever its shape."""
    relay = Relay()
    parameter = next(relay.modules[3].parameters())
    assert parameter.shape == (4, 4) and parameter.untyped_storage().nbytes() == 4
    assert relay.weights.num_bytes == 2 * relay.store.stages[0].layout.num_bytes
    assert (relay.weights.num_fetched, relay.weights.num_bytes_fetched) == (0, 0)


@pytest.mark.parametrize("num_resident", [1, 2, 3])
def test_a_fetch_leaves_those_alone_that_are_there(num_resident):
    """All the way up and down, each of the resident stages computes what it always did."""
    relay = Relay(5, num_resident, sizes=[4, 40, 3, 17, 4])
    there = []
    for stage in (*range(5), *reversed(range(5))):
        if stage not in there:
            if len(there) == num_resident:
                relay.free(there.pop(0 if there[0] < stage else there.index(max(there))))
            relay.fetch(stage)
            there.append(stage)
        assert all(torch.equal(relay.output(each), relay.outputs[each]) for each in there)


@pytest.mark.parametrize(
    ("sizes", "num_resident", "starts", "length"),
    [
        ([8, 4, 6, 2], 2, [0, 8, 0, 10], 12),  # from both ends: the largest pair
        ([8, 4, 6, 2], 1, [0, 0, 0, 0], 8),
        ([8, 4, 6, 2], 3, [0, 8, 12, 0], 18),
        ([8, 4], 4, [0, 8], 12),
        ([5], 2, [0], 5),
        ([], 2, [], 0),
    ],
)
def test_places_of_neighbours_lie_apart(sizes, num_resident, starts, length):
    """By hand; and no two of so many stages in a row overlap, nor reach beyond the end."""
    assert places(sizes, num_resident) == (starts, length)
    for first in range(len(sizes)):
        ranges = sorted(
            (starts[index], starts[index] + sizes[index])
            for index in range(first, min(first + num_resident, len(sizes)))
        )
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
        assert ranges[-1][1] <= length


def test_a_use_without_a_fetch_is_named():
    """A computation of a stage that is away, or of another version, fails before it computes."""
    relay = Relay()
    with pytest.raises(AssertionError, match=r"version 0 of stage 2 is not on the device: no FETCH stands before it"):
        relay.weights.of_stage(2).load(0)
    relay.fetch(2)
    with pytest.raises(AssertionError, match="version 1 of stage 2 is not on the device: version 0 is"):
        relay.weights.of_stage(2).load(1)
    with pytest.raises(AssertionError, match="on the device already"):
        relay.fetch(2)
    relay.fetch(3)
    with pytest.raises(AssertionError, match=r"stages \[2, 3\] fill the device"):
        relay.fetch(0)


def test_a_fetch_of_a_version_that_the_host_lacks_is_named():
    """The host says which version it has by then."""
    relay = Relay()
    with pytest.raises(AssertionError, match="the host has version 0 of stage 2, and 1 is fetched"):
        relay.fetch(2, version=1)


def test_stages_that_do_not_follow_one_another_have_no_room_together():
    """The places are laid out for neighbours; an order that keeps others at once is refused, and not computed wrong."""
    relay = Relay()
    relay.fetch(0)
    with pytest.raises(ValueError, match=r"stages 0 and 2 would share device memory.*use an order that relays"):
        relay.fetch(2)


def test_a_checkpoint_sees_the_host_and_the_next_fetch_hides_it():
    """Drained, all parameters are the host's own tensors; with the next batch they are away again."""
    relay = Relay()
    relay.weights.show_on_host()
    for stage, module in relay.modules.items():
        for name, parameter in module.named_parameters():
            assert parameter.data_ptr() == relay.store.stages[stage].weights[name].data_ptr()
    relay.fetch(0)
    assert torch.equal(relay.output(0), relay.outputs[0])
    assert all(relay.output(stage).isnan().all() for stage in (1, 2, 3))
    with pytest.raises(AssertionError, match=r"stages \[0\] are on the device"):
        relay.weights.show_on_host()


def test_buffers_stay_on_the_device():
    """Running statistics are no weights: they are written where the stage computes, and stay."""
    modules = {0: nn.Sequential(nn.BatchNorm1d(4))}
    store = HostStore({0: dict(modules[0].named_parameters())})
    weights = ResidentWeights(modules, store, num_resident=2)
    weights.fetch(0, 0)()
    modules[0](torch.randn(8, 4))
    weights.free(0)()
    assert modules[0][0].running_mean.isfinite().all() and modules[0][0].num_batches_tracked == 1
