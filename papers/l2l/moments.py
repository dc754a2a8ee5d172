"""What moments of 16 bits do to training: losses of a small language model of bytes, beside those with FP32.

The text is the project's own documentation. All rows of a seed begin with the same weights and have the same batches,
so they differ only in how AdamW keeps its moments. The loss is the mean over the last tenth of the steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common.tables import Row, show_table
from megatron.pipeline.runtime.update.narrow_moments import NarrowMoments

DOCS = Path(__file__).resolve().parents[2] / "docs"
NARROW = (torch.bfloat16, torch.bfloat16)

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "FP32": torch.optim.AdamW,
    "BF16, nearest": lambda parameters, **options: NarrowMoments(parameters, dtypes=NARROW, **options),
    "BF16, dithered": lambda parameters, **options: NarrowMoments(parameters, dtypes=NARROW, dithers=True, **options),
}
GOAL = 0.01
"""The largest difference in loss from FP32 that dithered rounding may have, in nats, as a mean over seeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)


class Bytes(nn.Module):
    """A causal transformer of two layers over bytes: [rows, length] -> logits [rows, length, 256]."""

    def __init__(self, hidden: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, hidden), nn.Embedding(length, hidden)
        layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(self.words(tokens) + self.places.weight[:length], mask=mask, is_causal=True))


def losses_of(kind: str, seed: int, args: argparse.Namespace, text: Tensor) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(seed)
    length, rows, losses = 64, 8, []
    model = Bytes(args.hidden, length)
    optimizer = KINDS[kind](model.parameters(), lr=args.learning_rate, betas=(0.9, 0.999), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (step + 1) / 50) * (1 - step / args.steps)
        starts = torch.randint(len(text) - length - 1, (rows, 1), generator=generator)
        batch = text[starts + torch.arange(length + 1)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measure(args: argparse.Namespace) -> list[Row]:
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))))
    rows = []
    for seed in range(args.seeds):
        for kind in KINDS:
            losses = losses_of(kind, seed, args, text)
            rows.append({"moments": kind, "seed": seed, "loss": statistics.fmean(losses[-(args.steps // 10) :])})
    return rows


def _over_fp32(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Kind -> the differences of the loss from FP32's, one for each seed."""
    rows = list(rows)
    plain = {row["seed"]: row["loss"] for row in rows if row["moments"] == "FP32"}
    return {kind: [row["loss"] - plain[row["seed"]] for row in rows if row["moments"] == kind] for kind in KINDS}


def show(rows: list[Row]) -> None:
    differences = _over_fp32(rows)
    columns = {
        "moments": lambda kind: kind,
        "loss": lambda kind: f"{statistics.fmean(row['loss'] for row in rows if row['moments'] == kind):.4f}",
        "over FP32, by seed": lambda kind: " ".join(f"{each:+.4f}" for each in differences[kind]),
    }
    show_table("AdamW's moments", columns, list(KINDS), left=("moments",))


def complaints(rows: list[Row]) -> list[str]:
    found = statistics.fmean(_over_fp32(rows)["BF16, dithered"])
    return [f"with dithered rounding the loss is {found:+.4f} from FP32's, above {GOAL}"] if abs(found) > GOAL else []
