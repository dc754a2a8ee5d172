"""Conversations in JSON lines, and their texts in a prompt format. Imports no torch.

Problem: a chat model learns the answers, not the questions. So each token must be known to belong to an answer or not,
and a text that is assembled first and tokenized then no longer shows that.

Solution: a format is an entry of `PROMPT_FORMATS`: the texts before and after a message, by its role. A conversation is
a sequence of texts that are tokenized one by one; each is an answer with its ending, or contains no answer.

A line is an object whose `messages` are a list of objects with `role` (system, user or assistant) and `content`. As in
Megatron-LM, a line may contain several conversations: each one after the first begins with a system message.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.documents.files import open_text, read_json, require_characters

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_MESSAGES = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'

Conversation = list[tuple[str, str]]
"""Messages as (role, content)."""


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """The text form of a conversation.

    Attributes:
        around: role -> the texts before and after a message. The text after an answer is learned, too.
        begin: the text before the first message.
        removed: words that are removed from messages other than answers.
    """

    around: Mapping[str, tuple[str, str]]
    begin: str = ""
    removed: tuple[str, ...] = ()

    def texts(self, conversation: Conversation) -> Iterator[tuple[str, bool]]:
        """Yield (text, whether it is an answer) in order; neighbouring texts without an answer are joined."""
        pieces = [(self.begin, False)]
        for role, content in conversation:
            before, behind = self.around[role]
            if role == ASSISTANT:
                pieces += [(before, False), (content.strip() + behind, True)]
                continue
            for word in self.removed:
                content = content.replace(word, "")
            pieces.append((before + content.strip() + behind, False))
        for is_answer, neighbours in groupby(pieces, key=lambda piece: piece[1]):
            if text := "".join(text for text, _ in neighbours):
                yield text, is_answer


def _alike(before: str, behind: str) -> dict[str, tuple[str, str]]:
    """The texts around messages that differ only in the message's role."""
    return {role: (before.format(role=role), behind) for role in (SYSTEM, USER, ASSISTANT)}


PROMPT_FORMATS: Mapping[str, PromptFormat] = {
    "nemotron-h-aligned": PromptFormat(
        around={
            SYSTEM: ("<SPECIAL_10>System\n", "\n"),
            USER: ("<SPECIAL_11>User\n", "\n<SPECIAL_11>Assistant\n"),
            ASSISTANT: ("", "\n"),
        }
    ),
    "nemotron-nano-v2": PromptFormat(
        around={
            SYSTEM: ("<SPECIAL_10>System\n", "\n"),
            USER: ("<SPECIAL_11>User\n", "\n"),
            ASSISTANT: ("<SPECIAL_11>Assistant\n", "\n<SPECIAL_12>\n"),
        },
        removed=("/think", "/no_think"),
    ),
    "chatml": PromptFormat(around=_alike("<|im_start|>{role}\n", "<|im_end|>\n")),
    "llama3": PromptFormat(
        around=_alike("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"), begin="<|begin_of_text|>"
    ),
}
"""Value of `--sft-tokenizer-prompt-format` -> format. The first two formats are Megatron-LM's."""


def read(path: str) -> list[list[Conversation]]:
    """Read the conversations of each line of a file, plain or compressed; empty lines are skipped.

    Raises ValueError for a file that is missing or has no conversations, and for a line without conversations, a
    message without a text, or an answer without a question.
    """
    lines = []
    with open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                lines.append(_conversations(line, f"{path}, line {number}"))
    if not lines:
        raise ValueError(f"{path} has no conversations; write lines such as {_MESSAGES}")
    return lines


def _conversations(line: str, where: str) -> list[Conversation]:
    try:
        found = read_json(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; --sft reads lines such as {_MESSAGES}") from error
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where} has no messages; write lines such as {_MESSAGES}")
    conversations: list[Conversation] = []
    for message in _checked(messages, where):
        if not conversations or message[0] == SYSTEM:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def _checked(messages: Sequence[object], where: str) -> Iterator[tuple[str, str]]:
    before = None
    for number, message in enumerate(messages, start=1):
        message = message if isinstance(message, dict) else {}
        role, content = message.get("role"), message.get("content")
        if role not in (SYSTEM, USER, ASSISTANT):
            raise ValueError(
                f"{where}: message {number} has the role {role!r}, which no prompt format writes; use {SYSTEM}, {USER} "
                f"or {ASSISTANT}"
            )
        if not isinstance(content, str):
            raise ValueError(f"{where}: message {number} has the content {content!r}, which is no text; write a text")
        if role == ASSISTANT and before != USER:
            raise ValueError(
                f"{where}: message {number} is an answer, and none of a user stands before it; write the question, or "
                "leave the answer out"
            )
        if role == ASSISTANT and not content.strip():
            raise ValueError(f"{where}: message {number} is an empty answer; write one, or leave the message out")
        yield role, require_characters(content, f"{where}: message {number}")
        before = role


# --- several conversations in one sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute numbered items of given lengths over sequences of `capacity` by best fit decreasing.

    Returns the numbers in each sequence. No length may exceed `capacity`. Equal input gives equal output.
    """
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (remaining room, sequence), ascending
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect_left(rooms, (lengths[number], 0))
        room, sequence = rooms.pop(place) if place < len(rooms) else (capacity, len(sequences))
        if sequence == len(sequences):
            sequences.append([])
        sequences[sequence].append(number)
        insort(rooms, (room - lengths[number], sequence))
    return sequences
