"""A model without memory for its parameters is captured as the same graph."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from megatron.capture.blocks import blocks_of
from megatron.capture.cut import cut
from megatron.capture.export import capture, signature
from megatron.capture.stage import StageData
from megatron.capture.tensors import fake_parameters, give_values, is_fake
from tests.capture.cuts import spread
from tests.capture.in_turn import train_in_turn
from tests.capture.models import KINDS, captured, eager_loss, gradients

MARKS = {"plain": ()}
"""Kinds for the usual selection of tests."""


@pytest.mark.parametrize("kind", [pytest.param(each, marks=MARKS.get(each, pytest.mark.full)) for each in KINDS])
def test_the_graph_is_the_same(kind):
    """And buffers are real: no checkpoint has those that are not persistent."""
    with fake_parameters():
        model = KINDS[kind].build(0.1).train()
    assert all(is_fake(each) for each in model.parameters())
    assert not any(is_fake(each) for each in model.buffers())
    ours = capture(model, KINDS[kind].batch(2), loss=KINDS[kind].loss, keep=KINDS[kind].kept)
    assert signature(ours) == signature(captured(kind)[1])
    assert not any(is_fake(each) for each in ours.graph_module.buffers())


def test_stages_with_values_compute():
    """Cut without values and given them, stages compute what a model does that has had them from the beginning."""
    torch.manual_seed(0)
    kind = KINDS["plain"]
    model = kind.build(0.0).train()
    with fake_parameters():
        fake = kind.build(0.0).train()
    batch = kind.batch(2)
    ours = capture(fake, batch, loss=kind.loss)
    blocks = blocks_of(ours)
    stages = cut(ours, spread({block: int(2 * place > len(blocks)) for place, block in enumerate(blocks)}))
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    for stage in stages.values():
        give_values(stage, values)
    loss, _ = train_in_turn(stages, StageData(batch))
    expected = eager_loss("plain", model, batch)
    assert torch.equal(loss, expected)
    found = {name: each.grad for stage in stages.values() for name, each in stage.named_parameters()}
    for name, gradient in gradients(expected, model).items():
        assert torch.equal(found[name], gradient)


def test_a_model_that_reads_its_parameters_is_refused():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.norm = float(self.weight.detach().norm())

    with pytest.raises(ValueError, match="reads values of its parameters while it is built"), fake_parameters():
        Reads()
    assert not is_fake(nn.Linear(2, 2).weight)


T5_3B = """
import resource, time, torch
from transformers import T5Config, T5ForConditionalGeneration
from megatron.capture.export import capture
from megatron.capture.tensors import fake_parameters
before = time.process_time()
with fake_parameters():
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32, decoder_start_token_id=0))
assert sum(each.numel() for each in model.parameters()) == 2851598336
batch = {"input_ids": torch.randint(1, 64, (2, 512)), "labels": torch.randint(1, 64, (2, 4))}
print(len(capture(model, batch).nodes), time.process_time() - before)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.full
@pytest.mark.alone
def test_t5_3b_is_captured_in_25_seconds_and_1_gb():
    """2.85 billion parameters, of which none has memory: CPU seconds, and the peak of the process."""
    output = subprocess.run([sys.executable, "-c", T5_3B], check=True, capture_output=True, text=True).stdout.split()
    print(f"{output[0]} operators, {float(output[1]):.1f} CPU s, {int(output[2]) / 1e6:.0f} MB")
    assert float(output[1]) < 25 and int(output[2]) < 1e9
