"""Answers that a model generates in an evaluation: greedy decoding by the pipeline's evaluation forwards.

Problem: a captured graph has one length, computes a loss, and has no cache of keys and values. The graph of an encoder
and a decoder takes labels, and not the decoder's tokens.

Solution: each round runs the unfinished rows forward with all their tokens so far. They are padded on the right, where
no token sees the padding, and the next token is read at the last token of each row. A decoder's tokens are its labels
shifted by one, so the tokens generated so far are given as labels. All ranks hold all rows; a round's tokens come from
the last stage. So an answer costs a forward of the whole row for each of its tokens.

The settings of the folder's generation_config.json are transformers' own processors of scores, made and applied for
each row. Settings that need something else than scores are refused.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.documents import counted
from megatron.documents.files import problem_with_directory, write_whole
from megatron.finetuning.assembly import BuiltPipeline
from megatron.finetuning.data.batches import IGNORED
from megatron.finetuning.data.task import Prompts
from megatron.finetuning.data.text_metrics import TEXT_METRICS
from megatron.finetuning.generation_arguments import metrics_of, predictions_of
from megatron.finetuning.plan import GENERATION
from megatron.finetuning.pretrained import first_line
from megatron.finetuning.trainer import forward
from megatron.pipeline.runtime.failure.agreement import agreed

REFUSED: dict[str, Callable[[Any], bool]] = {
    "guidance_scale": lambda value: value not in (None, 1),
    "watermarking_config": lambda value: value is not None,
    "stop_strings": lambda value: value is not None,
    "max_time": lambda value: value is not None,
    "penalty_alpha": lambda value: bool(value),
    "dola_layers": lambda value: value is not None,
    "token_healing": lambda value: bool(value),
    "constraints": lambda value: value is not None,
    "force_words_ids": lambda value: value is not None,
    "num_return_sequences": lambda value: value not in (None, 1),
}
"""Setting of a generation -> whether its value asks for more than scores."""

UNLIKE = {"xlnet": "reads a mask token at the place of the next one", "reformer": "hashes tokens by the row's length"}
"""Kinds of models whose `generate` computes something else than their forward of a row."""


class Decoder:
    """The rows of an evaluation's prompts with the answers so far.

    Args:
        model: the model of the folder; it needs no memory for its parameters.
        pad: the token that fills up rows.

    Attributes:
        notes: sentences for the user on how answers are generated.

    Raises ValueError for a model or a setting with which transformers' `generate` would answer otherwise.
    """

    lengths = None  # rows are padded to full length

    def __init__(self, args: argparse.Namespace, model: nn.Module, prompts: Prompts, pad: int) -> None:
        self._model, self._prompts, self._pad = model, prompts, pad
        self._size, self._has_encoder = args.per_device_train_batch_size, bool(model.config.is_encoder_decoder)
        self._length = args.max_target_length if self._has_encoder else args.max_seq_length
        _require_same(model, args)
        self._settings = _settings(model, args.model_name_or_path)
        ends = self._settings.eos_token_id
        self._ends = frozenset(() if ends is None else [ends] if isinstance(ends, int) else ends)
        self._begun = [[_start_of(model, self._settings)]] * len(prompts.ids) if self._has_encoder else prompts.ids
        self._room = [self._room_of(len(begun), args) for begun in self._begun]
        self._rows: list[list[int]] = []
        self._processors: dict[int, Any] = {}
        self.notes = list(self._notes(args))

    def _room_of(self, begun: int, args: argparse.Namespace) -> int:
        """The most tokens of an answer to a row that begins with `begun` tokens."""
        most = args.max_new_tokens or args.max_target_length
        if args.generation_max_length is not None:
            most = args.generation_max_length - begun
        return max(min(most, self._length - (0 if self._has_encoder else begun)), 0)

    def _notes(self, args: argparse.Namespace):
        if not self._ends:
            yield f"{args.model_name_or_path} names no end token, so each answer has as many tokens as it may"
        if (self._settings.num_beams or 1) > 1:
            yield f"{GENERATION} asks for {self._settings.num_beams} beams, and evaluations take the likeliest token"
        if not self._has_encoder and args.generation_max_length is None:
            most = args.max_new_tokens or args.max_target_length
            if short := sum(room < most for room in self._room):
                yield (
                    f"{counted(short, 'prompt')} of {len(self._room)} with room for fewer than {most} tokens of an "
                    f"answer in --max_seq_length {args.max_seq_length}, {self._room.count(0)} with room for none"
                )

    def decode(self, pipeline: BuiltPipeline) -> list[list[int]]:
        """Generate an answer to each prompt. Returns their tokens, with the end token if there is one.

        Collective: every rank must call it. Precondition: the pipeline is drained.
        """
        self._rows = [list(begun) for begun in self._begun]
        left = [number for number, room in enumerate(self._room) if room]
        summary, pipeline.results.summary = pipeline.results.summary, self._next_tokens
        try:
            while left:
                microbatches = [left[first : first + self._size] for first in range(0, len(left), self._size)]
                _, found = forward(pipeline, self, microbatches)
                for number, token in zip(left, found["logits"].tolist(), strict=True):
                    self._rows[number].append(token)
                left = [number for number in left if not self._is_finished(number)]
        finally:
            pipeline.results.summary = summary
        return [row[len(begun) :] for row, begun in zip(self._rows, self._begun, strict=True)]

    def _is_finished(self, number: int) -> bool:
        row = self._rows[number]
        return row[-1] in self._ends or len(row) - len(self._begun[number]) >= self._room[number]

    def batch(self, indices: Sequence[int], size: int) -> dict[str, Tensor]:
        """The rows `indices` as the model reads them, filled up to `size` with copies of the last one.

        Besides, `number` and `last`, int64 [size]: the row's number, and the place of the scores of its next token.
        """
        chosen = [*indices, *[indices[-1]] * (size - len(indices))]
        known = [self._rows[number][1:] if self._has_encoder else self._rows[number] for number in chosen]
        lengths = torch.tensor([len(tokens) for tokens in known])
        tokens = torch.full((size, self._length), self._pad)
        for row, each in zip(tokens, known, strict=True):
            row[: len(each)] = torch.tensor(each)
        places = torch.arange(self._length).expand(size, -1)
        mask = (places < lengths[:, None]).long()
        found = {"labels": tokens.masked_fill(mask == 0, IGNORED), "number": torch.tensor(chosen)}
        if self._has_encoder:
            return {**found, **{name: each[chosen] for name, each in self._prompts.encoded.items()}, "last": lengths}
        return {**found, "input_ids": tokens, "attention_mask": mask, "position_ids": places, "last": lengths - 1}

    def _next_tokens(self, name: str, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The next token of each row, int64 [rows]. `logits`: [rows, tokens, words], `batch`: as `batch` makes it."""
        scores = logits[torch.arange(len(logits), device=logits.device), batch["last"]].float()
        for place, number in enumerate(batch["number"].tolist()):
            if number not in self._processors:
                self._processors[number] = self._processors_of(number, logits.device)
            if self._processors[number]:
                ids = torch.tensor([self._rows[number]], device=logits.device)
                scores[place] = self._processors[number](ids, scores[place : place + 1])[0]
        return scores.argmax(-1)

    def _processors_of(self, number: int, device: torch.device):
        """transformers' processors of a row's scores, as `generate` makes them for the prompt alone."""
        settings, begun = copy.deepcopy(self._settings), len(self._begun[number])
        settings.update(do_sample=False, num_beams=1, max_length=begun + self._room[number])
        if settings.min_new_tokens is not None:
            settings.min_length = begun + settings.min_new_tokens
        self._model._prepare_special_tokens(settings, device=device)
        return self._model._get_logits_processor(
            settings, input_ids_seq_length=begun, device=str(device),
            encoder_input_ids=torch.tensor([self._prompts.ids[number]], device=device),
        )  # fmt: skip


class Generation:
    """The answers that --predict_with_generate adds to an evaluation, with their metrics and their file.

    Raises ValueError if `Decoder` does, or the file cannot be written.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module, prompts: Prompts, tokenizer: Any) -> None:
        self.decoder = Decoder(args, model, prompts, tokenizer.pad_token_id)
        self._prompts, self._tokenizer, self._metrics = prompts, tokenizer, metrics_of(args)
        self._path = predictions_of(args)
        flag = "--output_dir" if args.predictions_file is None else "the folder of --predictions_file"
        writes = args.rank == 0 and self._path is not None
        if writes and (problem := problem_with_directory(flag, str(self._path.parent))):
            raise ValueError(problem)

    def evaluate(self, pipeline: BuiltPipeline) -> dict[str, float]:
        """Generate, write the file, and return the metrics, the same on every rank.

        Collective: every rank must call it. Precondition: the pipeline is drained. Raises ValueError if the file cannot
        be written.
        """
        answers = self.decoder.decode(pipeline)
        texts = [self._tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        with agreed():  # the first rank alone writes
            self._write(texts)
        found = {"generated_tokens": sum(map(len, answers)) / len(answers)}
        for name in self._metrics:
            found |= TEXT_METRICS[name].compute(texts, self._prompts.references)
        return found

    def _write(self, texts: Sequence[str]) -> None:
        if torch.distributed.get_rank() > 0 or self._path is None:
            return
        samples = zip(self._prompts.texts, texts, self._prompts.references, strict=True)
        lines = [json.dumps(dict(zip(("prompt", "generated", "reference"), each, strict=True))) for each in samples]
        try:
            write_whole(self._path, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise ValueError(
                f"{self._path} cannot be written: {error.strerror}; name another --predictions_file"
            ) from error


def _require_same(model: nn.Module, args: argparse.Namespace) -> None:
    """Check that a row's forward computes what `generate` computes. Raises ValueError otherwise."""
    folder, config = args.model_name_or_path, model.config
    if not model.can_generate():
        raise ValueError(f"{folder} is a {type(model).__name__}, which transformers does not let generate; leave "
                         "--predict_with_generate out")  # fmt: skip
    if config.model_type in UNLIKE:
        raise ValueError(
            f"{folder} is a {config.model_type}, which {UNLIKE[config.model_type]}, so --predict_with_generate would "
            "not say what it generates; leave it out"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and args.max_seq_length > (short or args.max_seq_length):
        raise ValueError(
            f"{folder} has other rotary frequencies for rows of more than {short} tokens, and --max_seq_length "
            f"{args.max_seq_length} pads short ones to more; give {short} or less with --predict_with_generate"
        )


def _settings(model: nn.Module, folder: str):
    """The settings of a folder's generations as `from_pretrained` finds them. Raises ValueError for those refused."""
    from transformers import GenerationConfig

    if (Path(folder) / GENERATION).is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # a field of the wrong type can raise an error of any class
            raise ValueError(f"{folder}/{GENERATION} cannot be read: {first_line(error)}; save it anew") from error
    settings, _ = model._prepare_generation_config(None)
    for name, asks in REFUSED.items():
        if asks(value := getattr(settings, name, None)):
            raise ValueError(
                f"{folder} generates with {name} {value}, which is not done with the scores of one forward; remove it "
                f"from its {GENERATION}, or leave --predict_with_generate out"
            )
    return settings


def _start_of(model: nn.Module, settings: Any) -> int:
    """The first token of the decoder.

    Raises ValueError if the model's forward does not make the decoder's tokens from labels as `generate` has them.
    """
    start = settings.decoder_start_token_id
    start = settings.bos_token_id if start is None else start
    labels, shift = torch.tensor([[5, 6, IGNORED]]), getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        config = model.config
        of_module = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
        shift = of_module and (lambda labels: of_module(labels, config.pad_token_id, config.decoder_start_token_id))
    try:
        found = None if shift is None else shift(labels)[0].tolist()
    except (TypeError, ValueError):  # a shift with other arguments, or without its tokens
        found = None
    if found is None or found[:3] != [start, 5, 6]:
        raise ValueError(
            f"{type(model).__name__} does not make its decoder's tokens of the start token {start} and its labels, so "
            "--predict_with_generate cannot have it generate; leave it out"
        )
    return start
