"""What counts as a loss, and which names a batch may have."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.capture.wrapper import LossOnly


class Returns(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


LOSS = torch.tensor(3.0)


@pytest.mark.parametrize("output", [LOSS, (LOSS, 1), {"loss": LOSS, "x": 2}, SimpleNamespace(loss=LOSS)])
def test_a_loss_is_found(output):
    """A scalar, the first of a tuple, or what is called loss."""
    assert LossOnly(Returns(output), ["x"])(x=torch.ones(2)) == (LOSS,)


def test_a_loss_of_the_users_own():
    """It gets the output and the whole batch; the model gets what its forward takes."""
    model = LossOnly(Returns(LOSS), ["x", "labels"], loss=lambda output, batch: output + batch["labels"].sum())
    assert model(x=torch.ones(2), labels=torch.ones(2))[0] == 5


@pytest.mark.parametrize("name", ["input.ids", "self", "class", "1st"])
def test_names_that_no_argument_can_have(name):
    with pytest.raises(ValueError, match=r"give it a name that an argument can have"):
        LossOnly(Returns(LOSS), [name])
