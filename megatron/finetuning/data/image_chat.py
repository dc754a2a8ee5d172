"""Conversations about an image: prediction of the assistant's answers, as LLaVA is trained.

Source: Liu et al. (2023), "Visual instruction tuning".
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron.documents import counted
from megatron.documents.files import require_characters
from megatron.finetuning.data.batches import IGNORED, Rows
from megatron.finetuning.data.chat import ASSISTANT, Message, Template, answer_metrics, columns_of, messages_of
from megatron.finetuning.data.classification import IMAGE, image_of
from megatron.finetuning.data.files import File, Sample
from megatron.finetuning.data.packing import Tokens, notes_on, require_some, rows_of
from megatron.finetuning.data.task import Prepared, Task, config_of, most_likely, parts_of

_INPUTS = {"input_ids", "attention_mask", "pixel_values"}


def _prepare(args: argparse.Namespace, processor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    folder = args.model_name_or_path
    _require_no_token_types(folder)
    _, tokenizer, mark = parts_of(processor, ("image_processor", "tokenizer", "image_token"), folder)
    image, columns = file.column(args.image_column, IMAGE, "image"), columns_of(args, file)
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    template = Template(args, tokenizer)

    def rows(file: File) -> Rows:
        for name, what in {**columns, image: "image"}.items():
            file.column(name, (), what)
        sequences, pixels, num_cut, num_left_out = [], [], 0, 0
        for number, sample in enumerate(file.samples, start=1):
            where = f"{file.path}, sample {number}"
            messages = _messages(sample, list(columns), where)
            tools = sample.get("tools") or None
            plain, text = template.tokens(messages, tools, where), template.rendered(messages, tools, where)
            picture = image_of(sample[image], file, number)
            found, begins, after, own = _expanded(processor, mark, plain, text, picture, where)
            if args.train_on_prompt:  # with the special tokens that the processor adds
                found = Tokens(found.ids, [*found.ids[:begins], *[IGNORED] * (after - begins), *found.ids[after:]])
            if after > args.max_seq_length:
                raise ValueError(
                    f"{where}: its image ends at token {after}, which --max_seq_length {args.max_seq_length} cuts off; "
                    "give a larger --max_seq_length"
                )
            num_cut += len(found.ids) > args.max_seq_length
            kept = found.cut(args.max_seq_length)
            if not kept.num_counted:
                num_left_out += 1
                continue
            if pixels and own.shape != pixels[0].shape:
                raise ValueError(
                    f"{where}: the processor makes its image {tuple(own.shape)} and others {tuple(pixels[0].shape)}, "
                    "and a batch has one size; bring the images to one size"
                )
            sequences.append(kept)
            pixels.append(own)
        require_some(sequences, file, args.max_seq_length)
        notes = notes_on(file, "conversation", args.max_seq_length, num_cut=num_cut, num_left_out=num_left_out)
        return rows_of(sequences, args, tokenizer, answer_metrics, notes, {"pixel_values": torch.cat(pixels)})

    return Prepared(rows)


def _require_no_token_types(folder: str) -> None:
    """Raise ValueError if the model lets tokens attend by their types, which each model means in its own way."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = config_of(folder)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model is not None and "token_type_ids" in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{folder}: tokens of {model.__name__} attend by their token_type_ids, and --task image-text-to-text makes "
            "none, so the model would attend in another way than it has learned; take another model, such as LLaVA"
        )


def _expanded(
    processor: Any, mark: str, plain: Tokens, text: str, image: numpy.ndarray, where: str
) -> tuple[Tokens, int, int, Tensor]:
    """A conversation's tokens with the placeholders of its image, the place of these, and the image's pixels.

    The processor makes them; its tokens have to be those of the text, in which others stand for the image's mark.

    Args:
        plain: the tokens of the text, with one mark in the image's place.

    Returns the tokens, the numbers of the image's first token and of the one after it, and float32 [1, channels,
    rows, columns].

    Raises ValueError for a text without exactly one mark, and for a processor of another kind.
    """
    place_of = [at for at, token in enumerate(plain.ids) if token == processor.tokenizer.convert_tokens_to_ids(mark)]
    if len(place_of) != 1:
        raise ValueError(
            f"{where}: the chat template writes {counted(len(place_of), 'image')} ({mark!r}), and a sample has one; "
            "mend the template or the conversation"
        )
    begins = processor.tokenizer.bos_token
    special = begins is None or not text.startswith(begins)  # as the processor's own apply_chat_template
    made = processor(text=[text], images=[image], add_special_tokens=special, return_tensors="pt")
    if set(made) - {"token_type_ids", "mm_token_type_ids"} != _INPUTS or made["pixel_values"].shape[0] != 1:
        raise ValueError(
            f"{where}: the model's processor makes {', '.join(sorted(made))}, and --task image-text-to-text takes "
            "models of input_ids, attention_mask and one image of pixel_values, such as LLaVA; take another model"
        )
    ids, before, behind = made["input_ids"][0].tolist(), plain.ids[: place_of[0]], plain.ids[place_of[0] + 1 :]
    alone = processor.tokenizer(text, add_special_tokens=special)["input_ids"]
    starts = [at for at in range(len(alone)) if alone[at : at + len(plain.ids)] == plain.ids]
    first = starts[0] if starts else 0
    num_last = len(alone) - first - len(plain.ids)
    after = len(ids) - num_last - len(behind)
    if not starts or ids[first : first + len(before)] != before or ids[after : len(ids) - num_last] != behind:
        raise ValueError(
            f"{where}: the model's processor changes more of the text than {mark!r}, so it does not show which tokens "
            "the answer has; take another model"
        )
    num_placeholders = after - first - len(before)
    labels = [*plain.labels[: place_of[0]], *[IGNORED] * num_placeholders, *plain.labels[place_of[0] + 1 :]]
    return (
        Tokens(ids, [*[IGNORED] * first, *labels, *[IGNORED] * num_last]),
        first + len(before),
        after,
        made["pixel_values"],
    )


def _messages(sample: Sample, columns: Sequence[str], where: str) -> list[Message]:
    """The messages of a sample, whose contents are lists of parts. An image that no message names begins the first of
    the user's. Raises ValueError for anything else.
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
