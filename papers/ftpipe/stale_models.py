"""Two small models, each cut into eight stages by hand, and the texts on which they are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

_ROWS = {"reviews": 16, "characters": 8}  # number of rows in a microbatch
_WORDS, _CHARACTERS, _WIDTH = 32, 64, 64  # a row's tokens, or characters; the hidden size of the model of characters


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Attributes:
        stages: modules for `ReplayedStage`.
        microbatch: number -> training microbatch, by a seed.
        microbatches_of_epoch: number of microbatches in an epoch.
        validation: the microbatches of the validation data.
    """

    stages: list[nn.Module]
    microbatch: Callable[[int], tuple]
    microbatches_of_epoch: int
    validation: list[tuple]

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Evaluate on the validation data. Returns (mean loss, accuracy)."""
        for stage in self.stages:
            stage.eval()
        loss = right = counted = 0.0
        for data in self.validation:
            handed = ()
            for stage in self.stages:
                handed = stage(data, handed)
            wanted = data[-1]
            loss += handed[0].item() * wanted.numel()
            right += (handed[1].argmax(-1) == wanted).sum().item()
            counted += wanted.numel()
        return loss / counted, right / counted


class Seeded(nn.Module):
    """A stage whose dropout depends only on the microbatch and the stage."""

    def __init__(self, module: nn.Module, place: int) -> None:
        super().__init__()
        self.module, self.place = module, place

    def forward(self, data: tuple, handed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.training:
            torch.manual_seed(data[0] * 8 + self.place)
        return self.module(data, *handed)


def task_of(name: str, folder: Path, seed: int) -> Task:
    """Make a task. `name`: "reviews" or "characters". `folder`: the folder that examples/sentiment.py has made."""
    modules, train, validation = (_reviews if name == "reviews" else _characters)(folder, seed)
    rows = len(train[0])
    taken = _ROWS[name]
    per_epoch = rows // taken
    orders: dict[int, Tensor] = {}

    def microbatch(number: int) -> tuple:
        epoch, place = divmod(number, per_epoch)
        if epoch not in orders:
            orders[epoch] = torch.randperm(rows, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        chosen = orders[epoch][place * taken : (place + 1) * taken]
        return (1_000_000 * seed + number, *(each[chosen] for each in train))

    held_back = [(0, *parts) for parts in zip(*(each.split(250) for each in validation), strict=True)]
    stages = [Seeded(module, place).train() for place, module in enumerate(modules)]
    return Task(stages, microbatch, per_epoch, held_back)


# --- reviews: a pretrained BERT classifies reviews as positive or negative


class _Embeddings(nn.Module):
    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.embeddings = bert.embeddings

    def forward(self, data: tuple) -> tuple[Tensor, ...]:
        return (self.embeddings(data[1]),)


class _Attention(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention = layer.attention

    def forward(self, data: tuple, hidden: Tensor) -> tuple[Tensor, ...]:
        return (self.attention(hidden, data[2])[0],)


class _Intermediate(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.intermediate = layer.intermediate

    def forward(self, data: tuple, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.intermediate(hidden), hidden


class _Output(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.output = layer.output

    def forward(self, data: tuple, wide: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return (self.output(wide, hidden),)


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pooler, self.dropout, self.classifier = model.bert.pooler, model.dropout, model.classifier

    def forward(self, data: tuple, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = self.classifier(self.dropout(self.pooler(hidden)))
        return functional.cross_entropy(logits, data[-1]), logits


def _reviews(folder: Path, seed: int) -> tuple[list[nn.Module], tuple[Tensor, ...], tuple[Tensor, ...]]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    model = transformers.BertForSequenceClassification.from_pretrained(folder / "bert")
    torch.manual_seed(seed)
    model.classifier.reset_parameters()  # the seed decides the classifier, the order of samples, and dropout
    first, second = model.bert.encoder.layer
    halves = [part for layer in (first, second) for part in (_Attention(layer), _Intermediate(layer), _Output(layer))]

    def tensors(name: str) -> tuple[Tensor, ...]:
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        texts = [line["text"] for line in lines]
        found = tokenizer(texts, truncation=True, max_length=_WORDS, padding="max_length", return_tensors="pt")
        mask = torch.where(found["attention_mask"].bool(), 0.0, -torch.inf)[:, None, None, :]
        return found["input_ids"], mask, torch.tensor([int(line["label"] == "positive") for line in lines])

    return [_Embeddings(model.bert), *halves, _Classifier(model)], tensors("train"), tensors("validation")


# --- characters: a model of three layers, trained from scratch, predicts the next character of a review


class _Characters(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, _WIDTH), nn.Embedding(_CHARACTERS, _WIDTH)

    def forward(self, data: tuple) -> tuple[Tensor, ...]:
        return (self.characters(data[1]) + self.places.weight,)


class _CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.project, self.output = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, data: tuple, hidden: Tensor) -> tuple[Tensor, ...]:
        heads = self.project(self.norm(hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return (hidden + self.output(mixed.transpose(1, 2).flatten(2)),)


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.wide, self.output = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, data: tuple, hidden: Tensor) -> tuple[Tensor, ...]:
        return (hidden + self.output(functional.gelu(self.wide(self.norm(hidden)))),)


class _NextCharacter(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, vocabulary)

    def forward(self, data: tuple, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = self.output(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), data[-1].flatten()), logits


def _characters(folder: Path, seed: int) -> tuple[list[nn.Module], tuple[Tensor, ...], tuple[Tensor, ...]]:
    def text(name: str) -> str:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return "\n".join(json.loads(line)["text"] for line in lines)

    known = sorted(each for each in set(text("train")) if each.isascii())
    number = {each: place for place, each in enumerate(known, start=1)}  # 0: any other

    def rows(name: str) -> tuple[Tensor, ...]:
        numbers = torch.tensor([number.get(each, 0) for each in text(name)])
        count = (len(numbers) - 1) // _CHARACTERS
        shape = (count, _CHARACTERS)
        return numbers[: count * _CHARACTERS].view(shape), numbers[1 : count * _CHARACTERS + 1].view(shape)

    torch.manual_seed(seed)
    vocabulary = len(known) + 1
    layers = [part for _ in range(3) for part in (_CausalAttention(), _FeedForward())]
    stages = [_Characters(vocabulary), *layers, _NextCharacter(vocabulary)]
    return stages, rows("train"), tuple(each[:500] for each in rows("validation"))
