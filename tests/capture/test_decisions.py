"""What a forward decides by its data is captured as decided, and checked for every batch of a run."""

import random

import numpy
import pytest
import torch
from torch import nn

from megatron.capture.cut import StageData, cut
from megatron.capture.export import capture
from megatron.capture.randomness import Draw, mixed, seeded_drop_path
from tests.capture.cuts import contiguous
from tests.capture.in_turn import train_in_turn


class Chooses(nn.Module):
    """It checks its labels, and treats padding only where there is some."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x, mask, labels):
        if labels.max() >= 5:
            raise ValueError("a label is too large")
        hidden = self.first(x).relu()
        if not (mask == 1).all().item():
            hidden = hidden * mask[:, None] * 3
        return nn.functional.cross_entropy(self.last(hidden), labels)


def _batch(samples, mask=0):
    return {
        "x": torch.randn(samples, 4),
        "mask": torch.tensor([1] * (samples - 1) + [mask]),
        "labels": torch.randint(5, (samples,)),
    }


def test_batches_that_are_decided_alike_are_equal_and_others_are_refused():
    model = Chooses()
    ours = capture(model, _batch(3))
    stages = cut(ours, contiguous(ours, 2, random.Random(1)))
    for samples in (2, 5):
        batch = _batch(samples)
        loss, _ = train_in_turn(stages, StageData(batch))
        assert torch.equal(loss, model(**batch))
    large = {**_batch(3), "labels": torch.full((3,), 7)}
    for batch, line in ((_batch(3, mask=1), "if not .mask == 1"), (large, "if labels.max")):
        with pytest.raises(
            ValueError, match=rf"takes another branch than .*\[test_decisions.py:[0-9]+: {line}.*leave such"
        ):
            train_in_turn(stages, StageData(batch))


class DecidesUnseen(Chooses):
    def forward(self, x, mask, labels):
        with torch.no_grad():
            scale = mask * 2 if (mask == 1).all() else mask
        return super().forward(x * scale[:, None], mask, labels)


class DecidesAtRandom(Chooses):
    def forward(self, x, mask, labels):
        return super().forward(x if torch.rand(()) < 0.5 else x * 2, mask, labels)


@pytest.mark.parametrize("kind", [DecidesUnseen, DecidesAtRandom])
def test_decisions_that_cannot_be_checked_are_refused(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} decides by the values of a tensor what it computes"):
        capture(kind(), _batch(3))


class DrawsWithNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return (self.layer(x) * float(numpy.random.rand() > 0.5)).square().mean()


def test_other_generators_are_refused():
    with pytest.raises(ValueError, match=r"^DrawsWithNumpy draws from Python's or numpy's generator.*Dropout$"):
        capture(DrawsWithNumpy(), {"x": torch.randn(3, 4)})


def test_drop_path_is_that_of_transformers():
    """With the generator seeded alike, bit for bit; whole samples are dropped, and an evaluation drops none."""
    from transformers.models.dinov2.modeling_dinov2 import Dinov2DropPath

    x = torch.randn(40, 3, 2)
    ours = seeded_drop_path(Draw(seed=1, sample=2), 3, x, 1 - 0.3)
    torch.manual_seed(mixed(1, 2, 3))
    assert torch.equal(ours, Dinov2DropPath(0.3).train()(x))
    dropped = (ours == 0).flatten(1)
    assert 5 < dropped.all(1).sum() < 20 and torch.equal(dropped.all(1), dropped.any(1))
    assert seeded_drop_path(Draw(seed=1, sample=2, training=False), 3, x, 1 - 0.3) is x
