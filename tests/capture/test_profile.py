"""Profiles say what blocks cost, with memory for one block's parameters at a time."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from megatron.capture.blocks import blocks_of
from megatron.capture.export import capture
from megatron.capture.profile import parameters_of, profile
from megatron.capture.randomness import Draw
from megatron.capture.tensors import fake_parameters
from tests.capture.models import KINDS, captured


class Uneven(nn.Module):
    """A cheap block and one that costs at least a hundred times as much."""

    def __init__(self):
        super().__init__()
        self.thin = nn.Linear(512, 8)
        self.wide = nn.Linear(8, 512)
        self.heavy = nn.Linear(512, 512)

    def forward(self, x):
        wide = self.wide(self.thin(x))
        return self.heavy(wide.repeat(4, 1)).relu().square().mean()


def by_operator(ours, costs, name):
    blocks = blocks_of(ours)
    return next(
        cost for block, cost in zip(blocks, costs, strict=True) if name in [ours.nodes[each].name for each in block]
    )


def test_times_and_bytes():
    """What is heavy takes longer; bytes out and saved are those of the tensors."""
    with fake_parameters():
        model = Uneven().train()
    ours = capture(model, {"x": torch.randn(2, 512)})
    costs = profile(ours, {"x": torch.randn(64, 512)}, repeats=5)
    thin, wide, heavy, relu = (by_operator(ours, costs, name) for name in ("linear", "linear_1", "linear_2", "relu"))
    assert (thin.out_bytes, wide.out_bytes, heavy.out_bytes) == (64 * 8 * 4, 64 * 512 * 4, 256 * 512 * 4)
    assert heavy.forward_ms > 3 * thin.forward_ms and heavy.backward_ms > thin.backward_ms > 0
    assert wide.saved_bytes == 64 * 8 * 4  # its input
    assert heavy.saved_bytes == 256 * 512 * 4
    assert relu.saved_bytes == 256 * 512 * 4  # its output, which the square saves, too
    assert by_operator(ours, costs, "square").saved_bytes == 0


@pytest.mark.parametrize("kind", [pytest.param("t5", marks=pytest.mark.full), "gpt2", "plain"])
def test_saved_bytes_are_those_of_the_whole_model(kind):
    """All blocks together save what a forward of the model saves, but for data and what depends on it alone."""
    model, ours = captured(kind)
    batch = KINDS[kind].batch(4)
    saved = {}

    def pack(tensor):
        if tensor.is_floating_point() or tensor.dtype is torch.uint8:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, kept = ours.run(batch, Draw(0, 0))
    for each in (*model.parameters(), *model.buffers(), *batch.values()):
        saved.pop(each.untyped_storage().data_ptr(), None)
    total = sum(cost.saved_bytes for cost in profile(ours, batch, repeats=1))
    assert total == pytest.approx(sum(saved.values()), rel=0.05)
    del loss, kept


def test_layers_that_are_alike_are_measured_once():
    """And so cost the same; each block is reported."""
    _, ours = captured("gpt2")
    seen = []
    costs = profile(ours, KINDS["gpt2"].batch(2), repeats=1, progress=lambda done, all: seen.append((done, all)))
    assert seen == [(number + 1, len(costs)) for number in range(len(costs))]
    layers = [
        [cost for block, cost in zip(blocks_of(ours), costs, strict=True) if any(
            name.startswith(f"transformer.h.{layer}.mlp") for name in parameters_of(ours, block))]
        for layer in (0, 1)
    ]  # fmt: skip
    assert len(layers[0]) == 2 and layers[0] == layers[1]


def test_nothing_is_left_behind():
    """No gradients, and parameters without memory stay so."""
    model, ours = captured("plain")
    profile(ours, KINDS["plain"].batch(2), repeats=1)
    assert all(each.grad is None for each in model.parameters())


T5_3B = """
import resource, time, torch
from transformers import T5Config, T5ForConditionalGeneration
from megatron.capture.export import capture
from megatron.capture.tensors import fake_parameters
from megatron.capture.profile import profile
with fake_parameters():
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32, decoder_start_token_id=0))
batch = {"input_ids": torch.randint(1, 64, (2, 128)), "labels": torch.randint(1, 64, (2, 4))}
captured = capture(model, batch)
before = time.process_time()
costs = profile(captured, batch, repeats=1)
print(len(costs), time.process_time() - before, sum(each.recorded_forward_ms + each.backward_ms for each in costs))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.full
@pytest.mark.alone
def test_t5_3b_is_profiled_in_2_gb():
    """Its parameters take 11.4 GB; here each block's are there while it is measured."""
    output = subprocess.run([sys.executable, "-c", T5_3B], check=True, capture_output=True, text=True).stdout.split()
    print(f"{output[0]} blocks, {float(output[1]):.1f} CPU s, {float(output[2]):.0f} ms, {int(output[3]) / 1e6:.0f} MB")
    assert int(output[3]) < 2e9
