"""Conversations: prediction of the assistant's answers, in the form of the tokenizer's own chat template."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.documents import counted
from megatron.documents.files import require_characters
from megatron.finetuning.data.batches import IGNORED, Metrics, Rows
from megatron.finetuning.data.files import File, Sample
from megatron.finetuning.data.generation import perplexity
from megatron.finetuning.data.packing import Sequences, Tokens, rows_of
from megatron.finetuning.data.task import Prepared, Prompts, Task, most_likely, require_fast

MESSAGES = ("messages", "conversations", "conversation")
PROMPT, COMPLETION = ("prompt",), ("completion",)
ASSISTANT = "assistant"

_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
"""ShareGPT's names of roles."""
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, object]


def _prepare(args: argparse.Namespace, tokenizer: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    columns = columns_of(args, file)
    template = Template(args, tokenizer)

    def rows(file: File) -> Rows:
        file.require(columns)
        sequences = Sequences(file, "conversation", args.max_seq_length)
        for number, sample in enumerate(file.samples, start=1):
            where = f"{file.path}, sample {number}"
            messages = _messages(sample, list(columns), where)
            sequences.add(template.tokens(messages, sample.get("tools") or None, where))
        return rows_of(sequences.only(), args, tokenizer, answer_metrics, sequences.notes())

    def prompts(file: File) -> Prompts:
        texts, references, num_left_out = [], [], 0
        for number, sample in enumerate(file.samples, start=1):
            where = f"{file.path}, sample {number}"
            messages = _messages(sample, list(columns), where)
            answers = [at for at, each in enumerate(messages) if at and each["role"] == ASSISTANT and each["content"]]
            if answers:
                texts.append(template.prompt(messages[: answers[-1]], sample.get("tools") or None, where))
                references.append(messages[answers[-1]]["content"])
            num_left_out += not answers
        if not texts:
            raise ValueError(
                f"{file.path}: no conversation has an answer to generate; leave --predict_with_generate out"
            )
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        if not all(ids):
            raise ValueError(
                f"{file.path}: the chat template writes no token before the answer {references[ids.index([])]!r}, so "
                "there is nothing to generate from; give another --chat_template"
            )
        lost = f"{counted(num_left_out, 'conversation')} without an answer that is a text: none is generated"
        return Prompts(texts, references, ids, notes=[f"{file.path}: {lost}"] if num_left_out else [])

    return Prepared(rows, prompts=prompts)


def answer_metrics(labels: Tensor) -> Metrics:
    """A function that computes the perplexity and the share of correct tokens, each predicted from the true ones
    before it. `labels`: int64 [rows, tokens]."""
    expected = labels[:, 1:]

    def metrics(predictions: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        counts = expected != IGNORED
        right = (predictions["logits"][:, :-1] == expected) & counts
        return {**perplexity(predictions, loss), "token_accuracy": (right.sum() / counts.sum()).item()}

    return metrics


# --- conversations of a file


def columns_of(args: argparse.Namespace, file: File) -> dict[str, str]:
    """The columns of conversations, name -> purpose: one of messages, or one of prompts and one of completions.

    Raises ValueError if the file has neither.
    """
    pair = not set(MESSAGES) & set(file.fields) and set(PROMPT + COMPLETION) & set(file.fields)
    if args.messages_column is None and (pair or args.text_column or args.target_column):
        return {
            file.column(args.text_column, PROMPT, "text"): "text",
            file.column(args.target_column, COMPLETION, "target"): "target",
        }
    return {file.column(args.messages_column, MESSAGES, "messages"): "messages"}


def _messages(sample: Sample, columns: Sequence[str], where: str) -> list[Message]:
    """The messages of a sample, with `role` and `content`. Raises ValueError for anything else."""
    if len(columns) == 1:
        return messages_of(sample, columns[0], None, where)
    return [
        message
        for column, role in zip(columns, ("user", ASSISTANT), strict=True)
        for message in messages_of(sample, column, role, where)
    ]


def messages_of(sample: Sample, column: str, role: str | None, where: str) -> list[Message]:
    """The messages of a column, with `role` and `content`. Raises ValueError for anything else.

    `role`: whose message a text is; None: a text is refused.
    """
    value = sample[column]
    if role is not None and isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        form = "a list of messages" if role is None else "a text or a list of messages"
        raise ValueError(f"{where}: {column!r} is {value!r}, and {form} is wanted; mend it")
    return [_message(each, f"{where}, message {number} of {column!r}") for number, each in enumerate(value, 1)]


def _message(value: object, where: str) -> Message:
    fields = {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {}
    if "role" not in fields and "from" in fields:  # ShareGPT's form
        fields["role"] = _ROLES.get(fields.pop("from"), value["from"])
        fields["content"] = fields.pop("value", None)
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and "tool_calls" in fields)):
        raise ValueError(
            f'{where} is {value!r}, and {{"role": ..., "content": ...}} or {{"from": ..., "value": ...}} with texts is '
            "wanted; mend it"
        )
    for text in (role, content or ""):
        require_characters(text, where)
    return fields


# --- the template


class Template:
    """A tokenizer with its chat template, which finds the tokens of answers.

    Raises ValueError if there is no template, or the tokenizer does not say which characters a token is.
    """

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        if args.chat_template is not None:
            try:
                tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--chat_template {args.chat_template} cannot be read ({error}); mend it") from error
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {args.model_name_or_path} has no chat template; name a file with one with "
                "--chat_template"
            )
        require_fast(tokenizer, f"--task {args.task}")
        self._tokenizer, self._all = tokenizer, args.train_on_prompt

    def tokens(self, messages: list[Message], tools: object, where: str) -> Tokens:
        """The tokens of a conversation; tokens of answers count in the loss, or all tokens with --train_on_prompt.

        Raises ValueError if the template refuses the conversation, or does not show where answers are.
        """
        text = self.rendered(messages, tools, where)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        if self._all:
            return Tokens(ids, list(ids))
        template = self._tokenizer.get_chat_template(tools=tools)
        if _MARKS_ANSWERS.search(template):
            marked = self._tokenizer.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)
            ids, counts = list(marked["input_ids"]), marked["assistant_masks"]
        else:
            spans = self._spans(messages, tools, text, where)
            counts = [any(a < end and b > begin for begin, end in spans) for a, b in encoded["offset_mapping"]]
        return Tokens(ids, [token if count else IGNORED for token, count in zip(ids, counts, strict=True)])

    def prompt(self, messages: list[Message], tools: object, where: str) -> str:
        """The text before the answer to a conversation. Raises ValueError if the template refuses it."""
        return self.rendered(messages, tools, where, add_generation_prompt=True)

    def completion(self, prompt: list[Message], answer: list[Message], tools: object, where: str) -> Tokens:
        """The tokens of a prompt and an answer to it; only the answer's tokens count in the loss.

        Raises ValueError if the template refuses them, or writes the prompt in another way once the answer follows.
        """
        before, text = self.prompt(prompt, tools, where), self.rendered([*prompt, *answer], tools, where)
        if not text.startswith(before):
            raise ValueError(
                f"{where}: the chat template writes the prompt in another way once its answer follows, so it does not "
                "show which tokens the answer has; give another --chat_template"
            )
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        labels = [token if end > len(before) else IGNORED for token, (_, end) in pairs]
        return Tokens(list(encoded["input_ids"]), labels)

    def rendered(self, messages: list[Message], tools: object, where: str, **options: bool) -> str:
        """A conversation as a text. Raises ValueError if the template refuses it."""
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        except Exception as error:  # templates raise errors of any class
            raise ValueError(
                f"{where}: the chat template does not take the conversation ({type(error).__name__}: {error}); mend "
                "it, leave it out, or give another --chat_template"
            ) from error

    def _spans(self, messages: list[Message], tools: object, text: str, where: str) -> list[tuple[int, int]]:
        """The first and the last + 1 character of each answer, found by rendering the messages up to it.

        An answer that begins the conversation replies to nothing and has no span.

        Raises ValueError if the template renders the first messages of the conversation in another way than alone.
        """
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT or number == 0:
                continue
            before = self.rendered(messages[:number], tools, where, add_generation_prompt=True)
            after = self.rendered(messages[: number + 1], tools, where)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"{where}: the chat template writes what stands before message {number + 1} or its answer in "
                    "another way once more follows, so it does not show which tokens the answer has; give a "
                    "--chat_template that marks answers with {% generation %}, or --train_on_prompt"
                )
            spans.append((len(before), len(after)))
        return spans


TASK = Task("AutoModelForCausalLM", _prepare, keep=("logits",), summary=most_likely, new_head=False)
