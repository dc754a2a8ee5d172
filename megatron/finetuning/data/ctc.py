"""Recognition of speech by connectionist temporal classification (CTC): a letter or none for each frame of a sound.

transformers' loss counts a row without a text, and rows that only fill up a microbatch must count nothing. So the loss
is computed here, as with transformers' ctc_loss_reduction "mean": a sample's loss is divided by the length of its text,
and the mean over samples is taken. Source: Graves et al. (2006), "Connectionist temporal classification".
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megatron.finetuning.data.batches import IGNORED, Metrics, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.sound import Sounds
from megatron.finetuning.data.task import Prepared, Task, config_of, most_likely, parts_of

TEXT = ("text", "sentence", "transcription", "transcript", "target")


def forward(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scores of a frame's letters, `logits` [rows, frames, letters], and the loss over the rows with a text."""
    labels, mask = batch["labels"], batch.get("attention_mask")
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    lengths = (labels != IGNORED).sum(1)
    if mask is None:
        frames = torch.full_like(lengths, logits.shape[1])
    else:
        frames = model._get_feat_extract_output_lengths(mask.sum(1)).long()
    losses = torch.nn.functional.ctc_loss(
        logits.float().log_softmax(-1).transpose(0, 1), labels.clamp(min=0), frames, lengths,
        blank=model.config.pad_token_id, reduction="none", zero_infinity=model.config.ctc_zero_infinity,
    )  # fmt: skip
    counts = lengths > 0
    mean = torch.where(counts, losses / lengths.clamp(min=1), 0.0).sum() / counts.sum().clamp(min=1)
    return {"loss": mean, "logits": logits}


def num_frames(config: Any, num_points: Tensor) -> Tensor:
    """The number of frames that a model's convolutions make of sounds. `num_points`: int64 [sounds]."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        num_points = (num_points - kernel) // stride + 1
    return num_points


def _prepare(args: argparse.Namespace, processor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    extractor, tokenizer = parts_of(processor, ("feature_extractor", "tokenizer"), args.model_name_or_path)
    sounds, text = Sounds(args, extractor, file), file.column(args.target_column or args.text_column, TEXT, "text")
    config = config_of(args.model_name_or_path)
    if tokenizer.pad_token_id is None or not hasattr(config, "conv_kernel"):
        raise ValueError(
            f"{args.model_name_or_path} is a {config.model_type}, and ctc is for models with convolutions over a wave "
            "and a padding token that says that a frame has no letter, such as wav2vec2; choose another --task"
        )

    def rows(file: File) -> Rows:
        ids = [tokenizer(each)["input_ids"] for each in file.texts(text, "text")]
        inputs, notes = sounds.inputs(file)
        points = next(iter(inputs.values())).shape[1]
        mask = inputs.get("attention_mask", torch.ones(len(ids), points, dtype=torch.int64))
        frames = num_frames(config, mask.sum(1))
        for number, (tokens, count) in enumerate(zip(ids, frames.tolist(), strict=True), start=1):
            _require_fit(tokens, count, args.max_target_length, f"{file.path}, sample {number}")
        labels = torch.full((len(ids), args.max_target_length), IGNORED)
        for row, tokens in enumerate(ids):
            labels[row, : len(tokens)] = torch.tensor(tokens)
        return Rows(
            {**inputs, "labels": labels}, ignored={"labels": IGNORED}, notes=notes,
            num_terms=torch.ones(len(ids), dtype=torch.int64), metrics=_metrics(tokenizer, ids, frames),
        )  # fmt: skip

    changes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "ctc_loss_reduction": "mean"}
    return Prepared(rows, changes, forward=forward)


def _require_fit(tokens: Sequence[int], num_frames: int, most: int, where: str) -> None:
    """Raise ValueError for a text without a token, with more than `most`, or with more than the sound has frames for: a
    frame for each token, and one between two that are the same."""
    needed = len(tokens) + sum(one == other for one, other in pairwise(tokens))
    if not tokens:
        raise ValueError(f"{where}: the text has no token; leave it out")
    if len(tokens) > most:
        raise ValueError(f"{where}: the text has {len(tokens)} tokens; give a --max_target_length of as many")
    if needed > num_frames:
        raise ValueError(
            f"{where}: the text needs {needed} frames, and its sound has {num_frames}; give a longer --max_seconds, or "
            "leave it out"
        )


def _metrics(tokenizer: Any, ids: Sequence[Sequence[int]], frames: Tensor) -> Metrics:
    """A function that computes the rates of wrong words and of wrong characters: edits over the number of true ones."""
    true = tokenizer.batch_decode(ids, group_tokens=False)

    def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        found = predictions["logits"].clone()
        found[torch.arange(found.shape[1]) >= frames[:, None]] = tokenizer.pad_token_id
        return error_rates(tokenizer.batch_decode(found.tolist()), true)

    return metrics


def error_rates(found: Sequence[str], true: Sequence[str]) -> dict[str, float]:
    """The edits (insertions, deletions, replacements) that turn found texts into true texts, by words and by
    characters, over the number of words and of characters of all true texts."""
    words = [(one.split(), other.split()) for one, other in zip(found, true, strict=True)]
    pairs = {"wer": words, "cer": list(zip(found, true, strict=True))}
    return {
        name: sum(edits(*pair) for pair in each) / max(sum(len(other) for _, other in each), 1)
        for name, each in pairs.items()
    }


def edits(one: Sequence, other: Sequence) -> int:
    """The least number of insertions, deletions and replacements that turn `one` into `other` (Levenshtein)."""
    row = list(range(len(other) + 1))
    for number, item in enumerate(one, start=1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(other, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (item != wanted))
    return row[-1]


TASK = Task("AutoModelForCTC", _prepare, keep=("logits",), summary=most_likely, auto_processor="AutoProcessor")
