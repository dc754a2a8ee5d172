"""Small models of each kind with random weights, and batches for them: nothing is downloaded."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron.capture.export import Captured, capture

VOCABULARY = 61
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

transformers.logging.set_verbosity_error()


def tokens(samples: int, length: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (samples, length))


def padding(samples: int, length: int) -> Tensor:
    """An attention mask that hides the end of every second sample, from the first on: transformers leaves a mask out
    that hides nothing, and then sums in another order than what was captured.
    """
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[::2, length - 3 :] = 0
    return mask


def t5(dropout: float) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=dropout,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, **_SHAPE, max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2(dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(dropout: float) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, **_SHAPE, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=dropout
    )
    return transformers.LlamaForCausalLM(config)


def vit(dropout: float) -> nn.Module:
    config = transformers.ViTConfig(
        **_SHAPE, image_size=16, patch_size=8, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class Plain(nn.Module):
    """No transformer: convolutions, an in-place activation, a skip, and a weight that is used twice."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout2d(dropout)
        self.mix = nn.Linear(8, 8)
        self.thin = nn.Dropout(dropout, inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.first(image)))
        hidden = self.drop(self.act(self.second(hidden))) + hidden
        hidden = hidden.mean((2, 3))
        return self.head(self.mix(self.thin(self.mix(hidden) + 1)))


def cross_entropy(output: Tensor, batch) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"])


def _text(samples: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(samples, 9), "attention_mask": padding(samples, 9)}


@dataclass(frozen=True)
class Kind:
    """`build(dropout)`: the model. `batch(samples)`: data for it. `loss`: where the model has none. `tied`: a weight
    has several names. `kept`: what is wanted beside the loss.
    """

    build: Callable[[float], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    loss: Callable | None = None
    tied: bool = False
    kept: tuple[str, ...] = ("logits",)


def _images(samples: int, name: str) -> dict[str, Tensor]:
    return {name: torch.randn(samples, 3, 16, 16), "labels": torch.randint(0, 3, (samples,))}


KINDS = {
    "t5": Kind(t5, lambda samples: {**_text(samples), "labels": tokens(samples, 6)}, tied=True),
    "bert": Kind(bert, lambda samples: {**_text(samples), "labels": torch.randint(0, 2, (samples,))}),
    "gpt2": Kind(gpt2, lambda samples: {**_text(samples), "labels": tokens(samples, 9)}, tied=True),
    "llama": Kind(llama, lambda samples: {**_text(samples), "labels": tokens(samples, 9)}),
    "vit": Kind(vit, lambda samples: _images(samples, "pixel_values")),
    "plain": Kind(Plain, lambda samples: _images(samples, "image"), loss=cross_entropy, kept=()),
}

USUAL = [
    pytest.param(kind, marks=() if kind in ("t5", "gpt2", "plain") else pytest.mark.full, id=kind) for kind in KINDS
]
"""All kinds, of which the usual selection of tests takes those that differ most."""


@functools.cache
def captured(kind: str, dropout: float = 0.1) -> tuple[nn.Module, Captured]:
    """A model and its capture, in training mode, made once: tests leave no gradients behind."""
    torch.manual_seed(5)
    model = KINDS[kind].build(dropout).train()
    batch = KINDS[kind].batch(2)
    return model, capture(model, batch, loss=KINDS[kind].loss, keep=KINDS[kind].kept)


def eager_loss(kind: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the model itself says, without a capture."""
    if KINDS[kind].loss is None:
        return model(**batch).loss
    return KINDS[kind].loss(model(batch["image"]), batch)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Name -> gradient of every parameter that has one, as tensors that stay."""
    model.zero_grad()
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
