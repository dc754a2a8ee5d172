"""Extractive question answering: finding the position of the answer in a context.

A long context is split into several windows that overlap by `--doc_stride` tokens, and the best answer over all windows
of a question is taken. The label of a window that does not contain the whole answer is the window's first token.
"""

from __future__ import annotations

import argparse
import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.finetuning.data.batches import Metrics, Rows
from megatron.finetuning.data.files import File
from megatron.finetuning.data.task import Prepared, Task, give_padding, require_fast

LONGEST_ANSWER = 30
"""The largest number of tokens of an answer, as in SQuAD's scripts."""
BEST = 20
"""The number of starts, and of ends, that are tried in a window."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class _Window:
    """A window of a context.

    Attributes:
        question: the number of the question.
        offsets: first and last + 1 character of each token in the context; None for a token outside the context.
    """

    question: int
    offsets: list[tuple[int, int] | None]


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    question = file.column(args.question_column, ("question",), "question")
    context = file.column(args.context_column, ("context", "passage"), "context")
    answer = file.column(args.answers_column, ("answers", "answer"), "answers")
    require_fast(tokenizer, "question answering")
    give_padding(tokenizer)

    def rows(file: File) -> Rows:
        questions, contexts = file.texts(question, "question"), file.texts(context, "context")
        file.column(answer, (), "answers")
        answers = [
            _answers(sample, answer, text, f"{file.path}, sample {number}")
            for number, (sample, text) in enumerate(zip(file.samples, contexts, strict=True), start=1)
        ]
        if args.doc_stride >= args.max_seq_length // 2:
            raise ValueError(
                f"--doc_stride {args.doc_stride} makes windows of --max_seq_length {args.max_seq_length} share "
                "half of their tokens or more; give less than half of it"
            )
        _require_room(tokenizer, questions, args, file)
        encoded = tokenizer(
            [question.lstrip() for question in questions], contexts, truncation="only_second",
            max_length=args.max_seq_length, padding="max_length", stride=args.doc_stride, return_tensors="pt",
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        offsets, question_of = encoded["offset_mapping"].tolist(), encoded["overflow_to_sample_mapping"].tolist()
        windows = [_Window(number, _of_context(encoded, i, offsets[i])) for i, number in enumerate(question_of)]
        tensors = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
        spans = torch.tensor([_span(window, *answers[window.question][0]) for window in windows])
        labels = {"start_positions": spans[:, 0], "end_positions": spans[:, 1]}
        texts = [[text for text, _ in found] for found in answers]
        return Rows(
            {**tensors, **labels}, ignored=dict.fromkeys(labels, args.max_seq_length),
            num_terms=torch.ones_like(spans[:, 0]), metrics=_scores(windows, contexts, texts),
        )  # fmt: skip

    return Prepared(rows)


def _require_room(tokenizer: Any, questions: Sequence[str], args: argparse.Namespace, file: File) -> None:
    """Check that each question leaves room in a window for more tokens than neighbouring windows share.

    Raises ValueError for a question that is too long.
    """
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for number, ids in enumerate(tokenizer(questions, add_special_tokens=False)["input_ids"], start=1):
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


def _answers(sample: Mapping[str, object], name: str, context: str, where: str) -> list[tuple[str, int]]:
    """The answers of a sample as (text, first character); a single empty text if there is no answer.

    Raises ValueError for a value that is neither a text nor of SQuAD's form.
    """
    value = sample[name]
    if isinstance(value, str):  # a column of a CSV file
        value = {"text": [value] if value else [], "answer_start": [context.find(value)] if value else []}
    if not isinstance(value, Mapping) or not {"text", "answer_start"} <= value.keys():
        found = f"has the fields {', '.join(map(repr, value))}" if isinstance(value, Mapping) else f"is {value!r}"
        raise ValueError(
            f'{where}: {name!r} {found}, and a text or {{"text": [...], "answer_start": [...]}} is wanted; write one '
            "of them"
        )
    texts, starts = value["text"], value["answer_start"]
    if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
        raise ValueError(f"{where}: the text and answer_start of {name!r} are no lists of one length; mend it")
    found = list(zip(texts, starts, strict=True))
    for text, start in found:
        if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int):
            raise ValueError(f"{where}: the answer {text!r} at {start!r} is no text at a whole number; mend it")
        if context[start : start + len(text)] != text or start < 0:
            raise ValueError(
                f"{where}: the answer {text!r} does not stand at character {start} of its context; mend it"
            )
    return found or [("", 0)]


def _span(window: _Window, text: str, first: int) -> tuple[int, int]:
    """The first and the last token of an answer that begins at character `first`; 0, 0 if the window lacks it."""
    last = first + len(text)
    inside = [token for token, at in enumerate(window.offsets) if at is not None and at[0] < last and at[1] > first]
    if not text or not inside:
        return 0, 0
    if window.offsets[inside[0]][0] > first or window.offsets[inside[-1]][1] < last:
        return 0, 0
    return inside[0], inside[-1]


def _scores(windows: Sequence[_Window], contexts: Sequence[str], answers: Sequence[Sequence[str]]) -> Metrics:
    """A function that computes F1 and exact match, with the best answer over all windows of each question.

    If some questions have no answer, an answer is given only if it scores more than "no answer", whose score is the
    least score of the first token over the question's windows.
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
    """The score and the text of the most likely answer in a window. `starts`, `ends`: logits, float32 [tokens]."""
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


# --- SQuAD's scores of one answer


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals one of the answers, or is empty and there are no answers; otherwise 0."""
    return float(_normalised(predicted) in map(_normalised, answers or ("",)))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, for the answer that agrees best."""
    return max(_f1(_normalised(predicted).split(), _normalised(answer).split()) for answer in answers or ("",))


def _f1(predicted: list[str], true: list[str]) -> float:
    if not predicted or not true:
        return float(predicted == true)
    return 2 * sum((Counter(predicted) & Counter(true)).values()) / (len(predicted) + len(true))


def _normalised(text: str) -> str:
    """The text in lower case, without punctuation and articles, with single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


TASK = Task("AutoModelForQuestionAnswering", _prepare, keep=("start_logits", "end_logits"))
