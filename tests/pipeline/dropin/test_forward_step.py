"""What surrounds the user's forward step: marks of the first microbatch, and the losses that go back."""

import pytest
import torch

from megatron import backend

backend.install()

from megatron.pipeline.dropin.forward_step import ForwardStep


class Chunk(torch.nn.Module):
    """Notes each batch's first microbatch."""

    def __init__(self):
        super().__init__()
        self.firsts = 0

    def set_is_first_microbatch(self):
        self.firsts += 1


def user(data, model):
    """As a user's: the loss function hands back what it is told to."""
    outputs = next(data)
    return torch.tensor(1.0), lambda output: outputs


def run(step, model, *outputs):
    step.begin_batch(user)
    data = iter(outputs)
    for _ in outputs:
        output, loss_function = step(data, model)
        loss_function(output)


@pytest.mark.parametrize("is_last", [True, False])
def test_losses_of_a_batch_in_their_order(is_last):
    """On the last stage, a list for each batch; nowhere else."""
    model = Chunk()
    step = ForwardStep(model, chunk=None, is_last=is_last)
    run(step, model, (1.0, {"a": 1}), (2.0, {"a": 2}))
    first = step.losses
    run(step, model, (3.0, {"a": 3}))
    assert (first, step.losses) == (([{"a": 1}, {"a": 2}], [{"a": 3}]) if is_last else ([], []))
    assert model.firsts == 2


def test_tokens_are_counted_where_a_loss_function_says_them():
    """Summed over the batch, and begun anew with the next."""
    model = Chunk()
    step = ForwardStep(model, chunk=None, is_last=True)
    run(step, model, (1.0, torch.tensor(5), {}), (1.0, torch.tensor(7), {}))
    assert int(step.num_tokens) == 12
    run(step, model, (1.0, {}))
    assert step.num_tokens == 0
