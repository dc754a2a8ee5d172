"""Architectures of transformers: each is captured, cut and computes what transformers computes, or is refused."""

import random
from pathlib import Path

import pytest
import torch

from megatron.capture.cut import StageData, cut
from megatron.capture.export import capture
from megatron.capture.randomness import Draw
from tests.capture.architectures import ALL, CAPTURED, table
from tests.capture.cuts import contiguous
from tests.capture.in_turn import train_in_turn
from tests.capture.models import equal, gradients

_PAGE = Path(__file__).parents[2] / "docs" / "capture.md"
_USUAL = {"wav2vec2, CTC", "Phi-3, long rope", "DINOv2, drop path", "CLIP"}


@pytest.mark.timeout(240)  # none captures without an end
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row.name in _USUAL else pytest.mark.full, id=row.name) for row in ALL]
)
def test_equals_transformers(row):
    """Three stages, recomputed: in an evaluation, the loss and all gradients of transformers. In training, a microbatch
    repeats itself in a recompute, bit for bit, and another one draws other masks.
    """
    model = row.model()
    if row.expected != CAPTURED:
        with pytest.raises(ValueError) as caught:
            capture(model, row.batch(2))
        assert row.expected in str(caught.value) and "\n" not in str(caught.value)
        return
    ours = capture(model, row.batch(2))
    stages = cut(ours, contiguous(ours, 3, random.Random(1)))
    batch = row.batch(3)
    for each in (model, *stages.values()):
        each.eval()
    theirs = model(**batch, **({"return_loss": True} if row.inputs == "pairs" else {})).loss
    expected = gradients(theirs, model)
    loss, found = _trained(model, stages, batch, sample=3, recompute=True)
    torch.testing.assert_close(loss, theirs.detach(), rtol=1e-5, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        bound = 1e-5 * expected[name].abs().max().item() + 1e-8
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=bound)
    for each in stages.values():
        each.train()
    first, again, other = (
        _trained(model, stages, batch, sample=sample, recompute=recompute)
        for sample, recompute in ((5, False), (5, True), (6, True))
    )
    assert torch.equal(first[0], again[0]) and equal(first[1], again[1])
    assert ours.num_random == 0 or row.name in _STILL or not equal(first[1], other[1])


_STILL = {"ResNet"}  # it depends on the draw by its statistics alone


def _trained(model, stages, batch, *, sample, recompute):
    model.zero_grad()
    loss, _ = train_in_turn(stages, StageData(batch, Draw(seed=1, sample=sample)), recompute=recompute)
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return loss, found


def test_fifty_are_captured_and_the_page_lists_all():
    """`python -m tests.capture.architectures` writes the table again."""
    assert sum(row.expected == CAPTURED for row in ALL) >= 50
    assert table() in _PAGE.read_text(encoding="utf-8")
