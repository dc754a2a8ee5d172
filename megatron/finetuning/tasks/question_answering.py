"""Extractive question answering: where in a context the answer stands.

A long context becomes several windows that overlap by `--doc_stride` tokens, and the best answer over all windows of a
question counts. A window that does not hold the whole answer is taught to point at the first token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.files import column, texts_of
from megatron.finetuning.data.rows import Metrics, Rows
from megatron.finetuning.tasks.answers import exact_match, f1
from megatron.finetuning.tasks.task import File, Prepared, Task
from megatron.finetuning.tasks.tokens import give_padding

LONGEST_ANSWER = 30
"""Tokens, as SQuAD's scripts have it."""
BEST = 20
"""Starts and ends that are tried."""


@dataclass(frozen=True)
class _Window:
    """`question`: which. `offsets`: token -> characters of the context, None where it is no part of it."""

    question: int
    offsets: list[tuple[int, int] | None]


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    names = {
        "question": column(file.samples, file.path, args.question_column, ("question",), "question"),
        "context": column(file.samples, file.path, args.context_column, ("context", "passage"), "context"),
        "answers": column(file.samples, file.path, args.answers_column, ("answers", "answer"), "answers"),
    }
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "question answering has to know which characters a token is, and the model's tokenizer does not say; give "
            "its folder a tokenizer.json"
        )
    give_padding(tokenizer)

    def rows(each: File) -> Rows:
        questions, contexts = (
            texts_of(each.samples, each.path, column(each.samples, each.path, names[what], (), what))
            for what in ("question", "context")
        )
        column(each.samples, each.path, names["answers"], (), "answers")
        answers = [
            _answers(sample, names["answers"], contexts[i], each, i + 1) for i, sample in enumerate(each.samples)
        ]
        if args.doc_stride >= args.max_seq_length // 2:
            raise ValueError(
                f"--doc_stride {args.doc_stride} leaves windows of --max_seq_length {args.max_seq_length} next to "
                "nothing of their own; give less than half of it"
            )
        _require_room(tokenizer, questions, args, each)
        encoded = tokenizer(
            [question.lstrip() for question in questions], contexts, truncation="only_second",
            max_length=args.max_seq_length, padding="max_length", stride=args.doc_stride, return_tensors="pt",
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        offsets, question_of = encoded["offset_mapping"].tolist(), encoded["overflow_to_sample_mapping"].tolist()
        windows = [_Window(question, _of_context(encoded, i, offsets[i])) for i, question in enumerate(question_of)]
        tensors = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
        spans = [_span(window, answers[window.question][0]) for window in windows]
        starts, ends = (torch.tensor([span[end] for span in spans]) for end in (0, 1))
        texts = [[text for text, _ in found] for found in answers]
        return Rows(
            {**tensors, "start_positions": starts, "end_positions": ends},
            ignored={"start_positions": args.max_seq_length, "end_positions": args.max_seq_length},
            num_terms=torch.ones_like(starts), metrics=_scores(windows, contexts, texts),
        )  # fmt: skip

    return Prepared(rows)


def _require_room(tokenizer: Any, questions: Sequence[str], args: argparse.Namespace, file: File) -> None:
    """Raises ValueError for a question that leaves no more of a window than what windows share."""
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for number, ids in enumerate(tokenizer(list(questions), add_special_tokens=False)["input_ids"], start=1):
        room = args.max_seq_length - special - len(ids)
        if room <= args.doc_stride:
            raise ValueError(
                f"{file.path}, sample {number}: its question of {len(ids)} tokens leaves {max(room, 0)} of "
                f"--max_seq_length {args.max_seq_length} for the context, and windows share --doc_stride "
                f"{args.doc_stride}; give a larger --max_seq_length or a smaller --doc_stride"
            )


def _of_context(encoded: Any, window: int, offsets: Sequence[Sequence[int]]) -> list[tuple[int, int] | None]:
    parts = encoded.sequence_ids(window)
    return [tuple(pair) if part == 1 else None for pair, part in zip(offsets, parts, strict=True)]


def _answers(sample: Mapping[str, object], name: str, context: str, file: File, number: int) -> list[tuple[str, int]]:
    """(text, first character) of each; no answer is an empty text. Raises ValueError for another form."""
    value = sample[name]
    if isinstance(value, str):  # a column of a CSV file
        value = {"text": [value] if value else [], "answer_start": [context.find(value)] if value else []}
    if not isinstance(value, Mapping) or not {"text", "answer_start"} <= value.keys():
        found = f"has the fields {', '.join(map(repr, value))}" if isinstance(value, Mapping) else f"is {value!r}"
        raise ValueError(
            f'{file.path}, sample {number}: {name!r} {found}, and a text or {{"text": [...], "answer_start": [...]}} '
            "is wanted; write one of them"
        )
    texts, starts = value["text"], value["answer_start"]
    if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
        raise ValueError(
            f"{file.path}, sample {number}: the text and answer_start of {name!r} are no lists of one length; mend it"
        )
    found = list(zip(texts, starts, strict=True))
    for text, start in found:
        if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int):
            raise ValueError(
                f"{file.path}, sample {number}: the answer {text!r} at {start!r} is no text at a whole number; mend it"
            )
        if context[start : start + len(text)] != text or start < 0:
            raise ValueError(
                f"{file.path}, sample {number}: the answer {text!r} does not stand at character {start} of its "
                "context; mend it"
            )
    return found or [("", 0)]


def _span(window: _Window, answer: tuple[str, int]) -> tuple[int, int]:
    """First and last token of the answer; 0, 0 where the window does not hold it."""
    text, first = answer
    last = first + len(text)
    inside = [token for token, at in enumerate(window.offsets) if at is not None and at[0] < last and at[1] > first]
    if not text or not inside:
        return 0, 0
    if window.offsets[inside[0]][0] > first or window.offsets[inside[-1]][1] < last:
        return 0, 0
    return inside[0], inside[-1]


def _scores(windows: Sequence[_Window], contexts: Sequence[str], answers: Sequence[Sequence[str]]) -> Metrics:
    """The best answer over all windows of a question counts. Where some questions have none, it has to beat that the
    answer is in no window: what the window says of it that is the least sure of that.
    """
    some_have_none = any(not any(texts) for texts in answers)

    def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        best = [(-math.inf, "")] * len(contexts)
        none = [math.inf] * len(contexts)
        for window, starts, ends in zip(
            windows, predictions["start_logits"].float(), predictions["end_logits"].float(), strict=True
        ):
            question = window.question
            best[question] = max(best[question], _best(window, starts, ends, contexts[question]))
            none[question] = min(none[question], (starts[0] + ends[0]).item())
        found = [
            "" if some_have_none and score <= without else text
            for (score, text), without in zip(best, none, strict=True)
        ]
        return {
            "f1": sum(map(f1, found, answers)) / len(found),
            "exact_match": sum(map(exact_match, found, answers)) / len(found),
        }

    return metrics


def _best(window: _Window, starts: Tensor, ends: Tensor, context: str) -> tuple[float, str]:
    """Score and text of the most likely answer in a window."""
    best = -math.inf, ""
    allowed = torch.tensor([at is not None for at in window.offsets])
    count = min(BEST, int(allowed.sum()))
    firsts = starts.masked_fill(~allowed, -torch.inf).topk(count).indices.tolist()
    lasts = ends.masked_fill(~allowed, -torch.inf).topk(count).indices.tolist()
    for first in firsts:
        for last in lasts:
            score = (starts[first] + ends[last]).item()
            if first <= last < first + LONGEST_ANSWER and score > best[0]:
                best = score, context[window.offsets[first][0] : window.offsets[last][1]]
    return best


TASK = Task("AutoModelForQuestionAnswering", _prepare, keep=("start_logits", "end_logits"))
