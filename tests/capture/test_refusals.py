"""What cannot be cut is refused in one sentence with the path of the module."""

import pytest
import torch
from torch import nn

from megatron.capture.export import capture


class Around(nn.Module):
    """A model with `inner` in a place that has a path."""

    def __init__(self, inner):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([inner])

    def forward(self, x):
        return self.blocks[0](self.first(x)).square().mean()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * 2


class CountsThroughAView(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        self.calls[1:].view(-1).add_(1)
        return x + self.calls.sum()


class Decides(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class DropsWithoutGradients(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        return x * mask


class Selects(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Maps(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda row: row * 2)(x)


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("inner", "sentence"),
    [
        (nn.BatchNorm1d(4), r"blocks.0 \(BatchNorm1d\) writes into blocks.0.(running_mean|num_batches_tracked)"),
        (Counts(), r"blocks.0 \(Counts\) writes into blocks.0.calls"),
        (CountsThroughAView(), r"blocks.0 \(CountsThroughAView\) writes into blocks.0.calls"),
        (Decides(), r"blocks.0 \(Decides\) decides by the values of a tensor"),
        (Noise(), r"blocks.0 \(Noise\) draws random numbers \(aten.rand_like"),
        (DropsWithoutGradients(), r"blocks.0 \(DropsWithoutGradients\) draws random numbers .* under torch.no_grad"),
        (Selects(), r"blocks.0 \(Selects\) makes a shape that depends on values"),
        (Maps(), r"blocks.0 \(Maps\) uses torch.vmap.*install transformers>=5"),
        (Fails(), r"blocks.0 \(Fails\) cannot be captured \(RuntimeError: no such luck\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_refused(inner, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        capture(Around(inner), {"x": torch.randn(3, 4)})
    assert "\n" not in str(caught.value)


def test_data_that_is_written_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x[:, 0].zero_()
            return (x * self.weight).sum()

    with pytest.raises(ValueError, match=r"Writes writes into x, which is data.*let it write into a clone"):
        capture(Writes(), {"x": torch.randn(3, 4)})


def test_frozen_statistics_are_captured():
    """A BatchNorm in evaluation mode reads its statistics and writes none."""
    model = Around(nn.BatchNorm1d(4)).train()
    model.blocks[0].eval()
    batch = {"x": torch.randn(3, 4)}
    loss, _ = capture(model, batch).run(batch)
    assert torch.equal(loss, model(**batch))
