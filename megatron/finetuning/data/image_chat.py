"""Conversations about an image: prediction of the assistant's answers, as LLaVA, Gemma 3 and PaliGemma are trained.

Source: Liu et al. (2023), "Visual instruction tuning".
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from megatron.documents import counted
from megatron.documents.files import require_characters
from megatron.finetuning.data.batches import IGNORED, Rows
from megatron.finetuning.data.chat import ASSISTANT, Message, Template, answer_metrics, columns_of, messages_of
from megatron.finetuning.data.classification import IMAGE, image_of
from megatron.finetuning.data.files import File, Sample
from megatron.finetuning.data.packing import Sequences, Tokens, rows_of
from megatron.finetuning.data.task import Prepared, Task, config_of, most_likely, parts_of

_INPUTS = {"input_ids", "attention_mask", "pixel_values"}
_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Inputs that say which tokens attend in both directions, if a model takes them. Padding has 0, as in processors."""


@dataclass(frozen=True)
class _Made:
    """A sample's inputs, as the model's processor makes them.

    Attributes:
        after: the number of the first token behind the image's.
        types: name of `_TYPES` -> a number for each token.
        pixels: float32 [1, channels, rows, columns].
    """

    tokens: Tokens
    after: int
    types: Mapping[str, list[int]]
    pixels: Tensor


_Make = Callable[[list[Message], object, numpy.ndarray, str], _Made]
"""(messages, tools, image, the sample's place for errors) -> its inputs."""


def _prepare(args: argparse.Namespace, processor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    folder, length = args.model_name_or_path, args.max_seq_length
    parts_of(processor, ("image_processor", "tokenizer", "image_token"), folder)
    image, columns = file.column(args.image_column, IMAGE, "image"), columns_of(args, file)
    model, taken = _types_of(folder)
    takes_suffix = "suffix" in inspect.signature(processor.__call__).parameters
    make = (_with_suffix if takes_suffix else _with_template)(args, processor)

    def rows(file: File) -> Rows:
        file.require({**columns, image: "image"})
        sequences, others = Sequences(file, "conversation", length), []
        for number, sample in enumerate(file.samples, start=1):
            where = f"{file.path}, sample {number}"
            picture = image_of(sample[image], file, number)
            made = make(_messages(sample, list(columns), where), sample.get("tools") or None, picture, where)
            if "token_type_ids" in taken and "token_type_ids" not in made.types:
                raise ValueError(
                    f"{folder}: tokens of {model} attend by their token_type_ids, and its processor makes none; save "
                    "the model's own processor there with processor.save_pretrained"
                )
            if made.after > length:
                raise ValueError(
                    f"{where}: its image ends at token {made.after}, which --max_seq_length {length} cuts off; "
                    "give a larger --max_seq_length"
                )
            if not sequences.add(made.tokens):
                continue
            types = {name: torch.tensor(made.types[name][:length]) for name in taken if name in made.types}
            own = {name: functional.pad(each, (0, length - len(each)))[None] for name, each in types.items()}
            own["pixel_values"] = made.pixels
            if others and made.pixels.shape != others[0]["pixel_values"].shape:
                raise ValueError(
                    f"{where}: the processor makes its image {tuple(made.pixels.shape)} and others "
                    f"{tuple(others[0]['pixel_values'].shape)}, and a batch has one size; bring the images to one size"
                )
            others.append(own)
        kept = sequences.only()
        inputs = {name: torch.cat([each[name] for each in others]) for name in others[0]}
        return rows_of(kept, args, processor.tokenizer, answer_metrics, sequences.notes(), inputs)

    return Prepared(rows)


def _types_of(folder: str) -> tuple[str, list[str]]:
    """The name of the folder's model, and which of `_TYPES` its forward takes."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = config_of(folder)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model is None:
        return "", []
    parameters = inspect.signature(model.forward).parameters
    return model.__name__, [name for name in _TYPES if name in parameters]


def _called(processor: Any, text: str, image: numpy.ndarray, where: str, **options: object) -> tuple[list[int], Any]:
    """The token ids that a processor makes, and all that it makes. Raises ValueError for another kind of processor."""
    made = processor(text=[text], images=[image], return_tensors="pt", **options)
    if set(made) - {*_TYPES, "labels"} != _INPUTS or made["pixel_values"].shape[0] != 1:
        raise ValueError(
            f"{where}: the model's processor makes {', '.join(sorted(made))}, and --task image-text-to-text takes "
            "models of input_ids, attention_mask and one image of pixel_values, such as LLaVA; take another model"
        )
    return made["input_ids"][0].tolist(), made


def _types_in(made: Any) -> dict[str, list[int]]:
    return {name: made[name][0].tolist() for name in _TYPES if name in made}


def _with_suffix(args: argparse.Namespace, processor: Any) -> _Make:
    """Return the function for a processor that takes the answer as a suffix, and has no chat template (PaliGemma).

    Beyer et al. (2024), "PaliGemma": the image and the prompt attend in both directions, and the suffix counts.

    Raises ValueError for flags that such a model has no use for.
    """
    for flag, given in (("chat_template", args.chat_template), ("train_on_prompt", args.train_on_prompt)):
        if given:
            raise ValueError(
                f"--{flag} is for models of conversations, and {type(processor).__name__} takes a prompt, which "
                "attends in both directions, and an answer; leave it out"
            )

    def make(messages: list[Message], tools: object, image: numpy.ndarray, where: str) -> _Made:
        parts = [message["content"] for message in messages]
        roles = [message["role"] for message in messages]
        if roles != ["user", ASSISTANT] or tools or any("tool_calls" in message for message in messages):
            raise ValueError(
                f"{where}: {type(processor).__name__} takes one message of the user's and an answer, and the "
                f"conversation has {', '.join(map(str, roles))}; mend it"
            )
        prompt, answer = (
            "".join(processor.image_token if part["type"] == "image" else part["text"] for part in its) for its in parts
        )
        if prompt.count(processor.image_token) != 1 or processor.image_token in answer:
            raise ValueError(
                f"{where}: the prompt has {counted(prompt.count(processor.image_token), 'image')} and the answer "
                f"{answer.count(processor.image_token)}, and one in the prompt is wanted; mend the conversation"
            )
        ids, made = _called(processor, prompt, image, where, suffix=[answer])
        mark = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        after = max(at for at, token in enumerate(ids) if token == mark) + 1
        return _Made(Tokens(ids, made["labels"][0].tolist()), after, _types_in(made), made["pixel_values"])

    return make


def _with_template(args: argparse.Namespace, processor: Any) -> _Make:
    """Return the function for a processor of conversations in the form of a chat template.

    The processor makes the tokens. They must equal the tokens of the text, except for the image's mark, which the
    processor replaces with other tokens. Blanks beside the mark may be merged with these tokens, such as the line
    breaks of Gemma 3.

    The function raises ValueError for a text without exactly one mark, and for a processor of another kind.
    """
    tokenizer, mark = processor.tokenizer, processor.image_token
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    template = Template(args, tokenizer)

    def make(messages: list[Message], tools: object, image: numpy.ndarray, where: str) -> _Made:
        plain, text = template.tokens(messages, tools, where), template.rendered(messages, tools, where)
        place_of = [at for at, token in enumerate(plain.ids) if token == tokenizer.convert_tokens_to_ids(mark)]
        if len(place_of) != 1:
            raise ValueError(
                f"{where}: the chat template writes {counted(len(place_of), 'image')} ({mark!r}), and a sample has "
                "one; mend the template or the conversation"
            )
        begins = tokenizer.bos_token
        special = begins is None or not text.startswith(begins)  # as the processor's own apply_chat_template
        ids, made = _called(processor, text, image, where, add_special_tokens=special)
        before, behind = plain.ids[: place_of[0]], plain.ids[place_of[0] + 1 :]
        alone = tokenizer(text, add_special_tokens=special)["input_ids"]
        starts = [at for at in range(len(alone)) if alone[at : at + len(plain.ids)] == plain.ids]
        first = starts[0] if starts else 0
        num_last = len(alone) - first - len(plain.ids)
        begin = first + _num_alike(before, ids[first:])
        after = len(ids) - num_last - _num_alike(behind[::-1], ids[: len(ids) - num_last][::-1])
        num_before, num_behind = begin - first, len(ids) - num_last - after
        joined = [*range(num_before, place_of[0]), *range(place_of[0] + 1, len(plain.ids) - num_behind)]
        is_blank = not tokenizer.decode([plain.ids[at] for at in joined]).strip()
        counts = not args.train_on_prompt and any(plain.labels[at] != IGNORED for at in joined)
        if not starts or not is_blank or counts:
            raise ValueError(
                f"{where}: the model's processor changes more of the text than {mark!r}, so it does not show which "
                "tokens the answer has; take another model"
            )
        if args.train_on_prompt:  # with the special tokens that the processor adds
            labels = [*ids[:begin], *[IGNORED] * (after - begin), *ids[after:]]
        else:
            labels = [*[IGNORED] * first, *plain.labels[:num_before], *[IGNORED] * (after - begin),
                      *plain.labels[len(plain.ids) - num_behind :], *[IGNORED] * num_last]  # fmt: skip
        return _Made(Tokens(ids, labels), after, _types_in(made), made["pixel_values"])

    return make


def _num_alike(ones: Sequence[int], others: Sequence[int]) -> int:
    """The number of tokens from the first on that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ones, others, strict=False)))


def _messages(sample: Sample, columns: Sequence[str], where: str) -> list[Message]:
    """The messages of a sample, whose contents are lists of parts.

    An image that no message names is put at the beginning of the user's first message. Raises ValueError for anything
    else.
    """
    roles = (None,) if len(columns) == 1 else ("user", ASSISTANT)
    messages = []
    for column, role in zip(columns, roles, strict=True):
        value, contents = sample[column], {}
        if isinstance(value, list):
            value = [dict(each) if isinstance(each, dict) else each for each in value]
            for at, each in enumerate(value):
                if isinstance(each, dict) and isinstance(each.get("content"), list):
                    contents[at] = _parts(each["content"], f"{where}, message {at + 1} of {column!r}")
                    each["content"] = ""
        for at, each in enumerate(messages_of({column: value}, column, role, where)):
            parts = contents.get(at, [{"type": "text", "text": each.get("content") or ""}])
            messages.append({**each, "content": parts})
    if not any(part["type"] == "image" for message in messages for part in message["content"]):
        user = next((message for message in messages if message["role"] == "user"), None)
        if user is None:
            raise ValueError(f"{where}: no message is the user's, so the image has no place; add one")
        user["content"] = [{"type": "image"}, *user["content"]]
    return messages


def _parts(content: list[object], where: str) -> list[dict[str, str]]:
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": require_characters(part["text"], where)})
        elif kind == "image":
            parts.append({"type": "image"})
        else:
            raise ValueError(
                f'{where} has the part {part!r}, and {{"type": "image"}} or {{"type": "text", "text": ...}} is wanted; '
                "mend it"
            )
    return parts


TASK = Task(
    "AutoModelForImageTextToText", _prepare, keep=("logits",), summary=most_likely, auto_processor="AutoProcessor",
    new_head=False,
)  # fmt: skip
