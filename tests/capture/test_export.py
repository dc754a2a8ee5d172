"""A captured model is the model: its loss, its gradients, its parameters, at any batch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.capture.export import capture
from megatron.capture.randomness import Draw
from megatron.capture.wrapper import LossOnly
from tests.capture.models import (
    KINDS,
    USUAL,
    VOCABULARY,
    captured,
    eager_loss,
    equal,
    gradients,
    llama,
    padding,
    tokens,
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", USUAL)
def test_equals_the_model_at_any_batch(kind):
    """In an evaluation, at batches of 1 (though captured at 2), 2 and 5: loss and all gradients, bit for bit."""
    model, ours = captured(kind)
    assert ours.num_random > 0
    model.eval()
    for samples in (1, 2, 5):
        batch = KINDS[kind].batch(samples)
        loss, kept = ours.run(batch, Draw(seed=1, sample=0, training=False))
        expected = eager_loss(kind, model, batch)
        assert torch.equal(loss, expected)
        assert equal(gradients(loss, model), gradients(expected, model))
        for name, tensor in kept.items():
            assert torch.equal(tensor, getattr(model(**batch), name))
    model.train()


@pytest.mark.parametrize("kind", [pytest.param("t5", marks=pytest.mark.full), "plain"])
def test_equals_the_model_in_training(kind):
    """Without dropout, in training mode."""
    model, ours = captured(kind, 0.0)
    batch = KINDS[kind].batch(3)
    loss, _ = ours.run(batch)
    expected = eager_loss(kind, model, batch)
    assert ours.num_random == 0 and torch.equal(loss, expected)
    assert equal(gradients(loss, model), gradients(expected, model))


def test_parameters_are_the_models_own():
    """Each once, under the first of its names, and with all of them."""
    model, ours = captured("t5")
    assert {id(each) for each in ours.parameters.values()} == {id(each) for each in model.parameters()}
    assert set(ours.parameters) == {name for name, _ in model.named_parameters()}
    assert set(ours.names["shared.weight"]) >= {"shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"}


class Tagger(nn.Module):
    """A word at a time, with positions that depend on the length."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, words, labels):
        hidden = self.embed(words) + torch.arange(words.shape[1])[:, None]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("model", [Tagger, pytest.param(None, marks=pytest.mark.full)], ids=["plain", "llama"])
def test_sequences_of_any_length(model):
    """With dynamic_sequence a batch may be shorter or longer than that of the capture."""
    torch.manual_seed(2)
    masked = model is None

    def batch_of(samples: int, length: int) -> dict[str, torch.Tensor]:
        words = {"input_ids" if masked else "words": tokens(samples, length), "labels": tokens(samples, length)}
        return {**words, "attention_mask": padding(samples, length)} if masked else words

    model = (model() if model else llama(0.0)).eval()
    ours = capture(model, batch_of(2, 9), dynamic_sequence=True)
    assert not model.training  # as it was
    for samples, length in ((1, 5), (3, 17)):
        batch = batch_of(samples, length)
        loss, _ = ours.run(batch)
        output = model(**batch)
        expected = output if isinstance(output, torch.Tensor) else output.loss
        assert torch.equal(loss, expected)
        assert equal(gradients(loss, model), gradients(expected, model))


@pytest.mark.full
def test_without_padding():
    """A mask that hides nothing is left out by the eager model, which then lets attention share a group's keys: the
    captured one sums their gradients in another order.
    """
    model, ours = captured("llama")
    model.eval()
    batch = {name: tokens(3, 9) for name in ("input_ids", "labels")}
    batch["attention_mask"] = torch.ones(3, 9, dtype=torch.long)
    loss, _ = ours.run(batch, Draw(seed=1, sample=0, training=False))
    expected = eager_loss("llama", model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    theirs = gradients(expected, model)
    for name, gradient in gradients(loss, model).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)
    model.train()


def test_a_batch_of_one_is_refused():
    with pytest.raises(ValueError, match=r"input_ids of shape \(1, 9\).*give two samples"):
        capture(llama(0.0), {"input_ids": tokens(1, 9), "labels": tokens(1, 9)})


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(ValueError, match=r"Linear returns no scalar loss for a batch of input; add the labels"):
        capture(nn.Linear(2, 2), {"input": torch.ones(2, 2)})


def test_what_is_not_there_cannot_be_kept():
    class Says(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return {"loss": logits.mean(), "logits": logits}

    batch = {"x": torch.ones(2, 2)}
    _, kept = capture(Says(2, 2), batch, keep=("logits",)).run(batch)
    assert kept["logits"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"Says returns no tensor called logit;"):
        capture(Says(2, 2), batch, keep=("logit",))


# --- what counts as a loss, and which names a batch may have


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
