"""Estimates: FLOPs and bytes at the rates that are given, and the bytes of a profile."""

import resource

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.capture.blocks import blocks_of
from megatron.capture.estimate import Roofline, estimate
from megatron.capture.export import capture
from megatron.capture.profile import profile
from megatron.capture.tensors import fake_parameters
from tests.capture.models import KINDS, captured

ONLY_FLOPS = Roofline(teraflops=1.0, gigabytes_per_second=1e30)
ONLY_BYTES = Roofline(teraflops=1e30, gigabytes_per_second=1.0)
ONLY_LAUNCHES = Roofline(teraflops=1e30, gigabytes_per_second=1e30, launch_microseconds=1.0)


class TwoLayers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.second(self.first(x).relu()).view(-1).mean()


def costs_of(roofline, *, width=1024, samples=64):
    with fake_parameters():
        model = TwoLayers(width).train()
    ours = capture(model, {"x": torch.ones(2, width)})
    costs = estimate(ours, {"x": torch.ones(samples, width)}, roofline)
    named = [ours.nodes[block[0]].name for block in blocks_of(ours)]
    return dict(zip(named, costs, strict=True))


def test_a_matrix_product_takes_its_flops():
    """Two for each multiplication and addition; backward as often as gradients are wanted."""
    found, once = costs_of(ONLY_FLOPS), 2 * 64 * 1024 * 1024 / 1e9
    assert found["linear"].forward_ms == found["linear"].recorded_forward_ms == pytest.approx(once)
    assert found["linear"].backward_ms == pytest.approx(once)  # of the weight alone: data needs none
    assert found["linear_1"].backward_ms == pytest.approx(2 * once)
    assert found["relu"].forward_ms == pytest.approx(0, abs=1e-12)


def test_other_kernels_take_their_bytes():
    found, num_bytes = costs_of(ONLY_BYTES), 64 * 1024 * 4
    assert found["relu"].forward_ms == pytest.approx(2 * num_bytes / 1e6)
    assert found["linear"].forward_ms == pytest.approx((2 * num_bytes + 1024 * 1024 * 4) / 1e6)
    assert found["view"].forward_ms == found["view"].backward_ms == 0


def test_each_kernel_is_launched_and_a_view_is_none():
    found = costs_of(ONLY_LAUNCHES)
    assert [found[name].forward_ms for name in ("linear", "relu", "view", "mean")] == pytest.approx(
        [1e-3, 1e-3, 0, 1e-3]
    )


def test_nothing_takes_memory():
    """6.4 GB a layer, and as much of gradients, twice over."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = costs_of(ONLY_FLOPS, width=40_000, samples=3)
    assert found["linear_1"].backward_ms == pytest.approx(2 * 2 * 3 * 40_000**2 / 1e9)
    assert found["linear_1"].saved_bytes == 0 and found["relu"].saved_bytes == 3 * 40_000 * 4
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 1e9


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_flops_are_those_of_the_whole_model(kind):
    model, ours = captured(kind)
    batch = KINDS[kind].batch(3)
    costs = estimate(ours, batch, ONLY_FLOPS)
    with FlopCounterMode(display=False) as forward:
        loss = model(**batch).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    model.zero_grad()
    counted = forward.get_total_flops(), backward.get_total_flops()
    assert counted[0] > 0
    ours = sum(each.forward_ms for each in costs) * 1e9, sum(each.backward_ms for each in costs) * 1e9
    assert ours == pytest.approx(counted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("t5", marks=pytest.mark.full), "plain"])
def test_bytes_are_those_of_a_profile(kind):
    """The bytes of every block are, where nothing is dropped."""
    _, ours = captured(kind, 0.0)
    batch = KINDS[kind].batch(3)
    measured, estimated = profile(ours, batch, repeats=1), estimate(ours, batch, ONLY_FLOPS)
    assert [each.saved_bytes for each in estimated] == [each.saved_bytes for each in measured]
    assert [each.out_bytes for each in estimated] == [each.out_bytes for each in measured]
    assert sum(each.saved_bytes for each in measured) > 0


@pytest.mark.full
def test_dropout_is_one_kernel_that_saves_a_byte_an_element():
    _, ours = captured("gpt2", 0.1)
    batch = KINDS["gpt2"].batch(2)
    by_name = {ours.nodes[block[0]].name: place for place, block in enumerate(blocks_of(ours))}
    cost = estimate(ours, batch, ONLY_LAUNCHES)[by_name["seeded_dropout"]]
    assert cost.forward_ms == pytest.approx(1e-3) and cost.saved_bytes == 2 * 9 * 32


def test_rates_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"teraflops is 0; give what the device reaches"):
        Roofline(0, 100)
    with pytest.raises(ValueError, match=r"launch_microseconds is -1"):
        Roofline(1, 100, -1)
