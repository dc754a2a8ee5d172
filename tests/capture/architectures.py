"""The architectures of ``architectures.csv``: small models with random weights, and batches for them."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from tests.capture.models import VOCABULARY, padding, tokens

CAPTURED = "captured"
_FILE = Path(__file__).with_name("architectures.csv")


@dataclass(frozen=True)
class Architecture:
    """A row. `class_name`: of transformers. `configuration`: as JSON. `inputs`: a key of `BATCHES`. `expected`:
    `CAPTURED`, or a part of the refusal's sentence.
    """

    name: str
    class_name: str
    configuration: str
    inputs: str
    expected: str

    def model(self) -> nn.Module:
        kind = getattr(transformers, self.class_name)
        torch.manual_seed(5)
        return kind(kind.config_class(**json.loads(self.configuration)))

    def batch(self, samples: int) -> dict[str, Tensor]:
        torch.manual_seed(6)
        return BATCHES[self.inputs](samples, json.loads(self.configuration))


def _read() -> list[Architecture]:
    with _FILE.open(encoding="utf-8", newline="") as file:
        return [Architecture(*row) for row in list(csv.reader(file))[1:]]


ALL = _read()


_HEAD = "| a batch has | architectures | outcome |"


def table() -> str:
    """The architectures as a table of ``docs/capture.md``: those with the same inputs and outcome in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in ALL:
        rows.setdefault((each.inputs, each.expected), []).append(each.name)
    lines = (f"| {_COLUMNS[inputs]} | {'; '.join(names)} | {said} |" for (inputs, said), names in rows.items())
    return f"{_HEAD}\n|---|---|---|\n" + "\n".join(lines) + "\n"


def _text(samples: int, length: int = 9) -> dict[str, Tensor]:
    return {"input_ids": tokens(samples, length), "attention_mask": padding(samples, length)}


def _images(samples: int, configuration: dict) -> dict[str, Tensor]:
    side = configuration.get("image_size", 32)
    return {"pixel_values": torch.randn(samples, 3, side, side)}


def _pairs(samples: int, configuration: dict) -> dict[str, Tensor]:
    return {**_text(samples), **_images(samples, configuration["vision_config"])}


def _dialogues(samples: int, configuration: dict) -> dict[str, Tensor]:
    """Two images in every dialogue, four places for each."""
    texts, place = _text(samples, 16), configuration["image_token_index"]
    texts["input_ids"][texts["input_ids"] == place] = 2
    texts["input_ids"][:, 1:9] = place
    return {**texts, **_images(2 * samples, configuration["vision_config"]), "labels": tokens(samples, 16)}


def _captions(samples: int, configuration: dict) -> dict[str, Tensor]:
    """One image in every text, four places for it."""
    texts, place = _text(samples, 16), configuration["image_token_id"]
    texts["input_ids"][texts["input_ids"] == place] = 2
    texts["input_ids"][:, 1:5] = place
    return {**texts, "labels": tokens(samples, 16), "token_type_ids": (texts["input_ids"] == place).long()}


def _grids(samples: int, configuration: dict) -> dict[str, Tensor]:
    texts, side = _captions(samples, configuration), configuration["vision_config"]["patch_size"]
    texts["mm_token_type_ids"] = texts.pop("token_type_ids")
    pixels = torch.randn(4 * samples, 3 * side**2)
    return {**texts, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]] * samples)}


def _tiles(samples: int, configuration: dict) -> dict[str, Tensor]:
    texts, images = _captions(samples, configuration), _images(samples, configuration["vision_config"])
    del texts["token_type_ids"]
    return {**texts, "pixel_values": images["pixel_values"][:, None]}


def _sound(samples: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(samples, 400)}


BATCHES: dict[str, Callable[[int, dict], dict[str, Tensor]]] = {
    "tokens": lambda samples, _: {**_text(samples), "labels": tokens(samples, 9)},
    "texts": lambda samples, _: {**_text(samples), "labels": tokens(samples, 6)},
    "classes": lambda samples, _: {**_text(samples), "labels": torch.randint(2, (samples,))},
    "word classes": lambda samples, _: {**_text(samples), "labels": torch.randint(2, (samples, 9))},
    "spans": lambda samples, _: {
        **_text(samples),
        "start_positions": torch.randint(9, (samples,)),
        "end_positions": torch.randint(9, (samples,)),
    },
    "images": lambda samples, its: {**_images(samples, its), "labels": torch.randint(2, (samples,))},
    "segments": lambda samples, its: {**_images(samples, its), "labels": torch.randint(3, (samples, 32, 32))},
    "instances": lambda samples, its: {
        **_images(samples, its),
        "mask_labels": torch.randint(2, (samples, 2, 32, 32)).float(),
        "class_labels": torch.randint(3, (samples, 2)),
    },
    "pairs": _pairs,
    "dialogues": _dialogues,
    "captions": lambda samples, its: {**_captions(samples, its), **_images(samples, its["vision_config"])},
    "tiles": _tiles,
    "grids": _grids,
    "spectrum": lambda samples, its: {
        "input_features": torch.randn(samples, its["num_mel_bins"], 2 * its["max_source_positions"]),
        "labels": tokens(samples, 6),
    },
    "sound": lambda samples, _: {**_sound(samples), "labels": tokens(samples, 5)},
    "sound classes": lambda samples, _: {**_sound(samples), "labels": torch.randint(2, (samples,))},
}
assert VOCABULARY == 61, "the configurations' own"
_COLUMNS = {
    "tokens": "tokens, each with a label",
    "texts": "a text and its answer",
    "classes": "tokens with a class",
    "word classes": "tokens, each with a class",
    "spans": "tokens with a span",
    "images": "images with a class",
    "segments": "images, each pixel with a class",
    "instances": "images with masks of instances",
    "pairs": "texts and their images, contrasted",
    "dialogues": "texts with several images each",
    "captions": "texts with an image each",
    "tiles": "texts with images in tiles",
    "grids": "texts with images of any size",
    "spectrum": "spectra and their text",
    "sound": "waves and their text",
    "sound classes": "waves with a class",
}

if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "capture.md"
    before, _, after = page.read_text(encoding="utf-8").partition(_HEAD)
    rest = after[after.index("\n\n") + 1 :]
    page.write_text(before + table() + rest, encoding="utf-8")
