"""Seeded dropout: the same wherever and whenever it runs, and nothing in an evaluation."""

import dataclasses

import pytest
import torch

from megatron.capture.randomness import Draw, mixed, seeded_attention, seeded_dropout
from tests.capture.models import KINDS, captured

DRAW = Draw(seed=3, sample=4)


def test_a_mask_depends_on_seed_microbatch_and_operator():
    """On nothing else: what was drawn before does not matter, and what is drawn after is as if it had not run."""
    x = torch.ones(1000)
    expected = seeded_dropout(DRAW, 5, x, 0.25)
    torch.manual_seed(9)
    before = torch.rand(3)
    torch.manual_seed(9)
    assert torch.equal(seeded_dropout(DRAW, 5, x, 0.25), expected)
    assert torch.equal(torch.rand(3), before)
    for other in (dataclasses.replace(DRAW, seed=4), dataclasses.replace(DRAW, sample=3)):
        assert not torch.equal(seeded_dropout(other, 5, x, 0.25), expected)
    assert not torch.equal(seeded_dropout(DRAW, 4, x, 0.25), expected)
    assert 0.2 < (expected == 0).float().mean() < 0.3 and expected.max() == 1 / 0.75


def test_an_evaluation_drops_nothing():
    quiet = dataclasses.replace(DRAW, training=False)
    x, query = torch.ones(1000), torch.randn(2, 4, 6, 8)
    assert seeded_dropout(quiet, 0, x, 0.5) is x
    attend = torch.nn.functional.scaled_dot_product_attention
    inputs = (0, (True, True, True, False), query, query, query, None)
    assert torch.equal(seeded_attention(quiet, *inputs, dropout_p=0.5), attend(query, query, query))
    dropped = seeded_attention(DRAW, *inputs, dropout_p=0.5)
    assert not torch.equal(dropped, attend(query, query, query))
    assert torch.equal(seeded_attention(DRAW, *inputs, dropout_p=0.5), dropped)


def test_attention_takes_the_same_kernel_without_gradients():
    """Where the mask is trained, as T5's positions are, torch takes a slower kernel, which rounds differently."""
    query, mask = torch.randn(2, 4, 64, 8), torch.randn(2, 4, 64, 64, requires_grad=True)
    inputs = (None, 0, (False, False, False, True), query, query, query, mask)
    expected = seeded_attention(*inputs, dropout_p=0.0)
    with torch.no_grad():
        plain = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask.detach())
        ours = seeded_attention(*inputs[:-1], mask.detach(), dropout_p=0.0)
    assert torch.equal(ours, expected) and not ours.requires_grad
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize("kind", ["gpt2", "plain"])
def test_a_captured_model_repeats_itself(kind):
    """One microbatch, twice: the same loss; another microbatch: another."""
    _, ours = captured(kind)
    batch = KINDS[kind].batch(2)
    losses = [ours.run(batch, Draw(seed=1, sample=sample))[0].item() for sample in (7, 7, 8)]
    assert losses[0] == losses[1] != losses[2]


def test_seeds_of_neighbours_differ():
    """No two of 20,000 are one, and the numbers' order counts."""
    assert len({mixed(*numbers) for numbers in zip([1, 2] * 10_000, range(20_000), strict=True)}) == 20_000
    assert mixed(1, 2) != mixed(2, 1)
