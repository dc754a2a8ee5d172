"""A few conversations in a file, for tests."""

import json
import random
from pathlib import Path


def conversations(number: int = 40, seed: int = 0) -> list[list[dict[str, str]]]:
    """Different conversations of one to three questions with answers, some behind a system message."""
    draw, found = random.Random(seed), []
    for index in range(number):
        messages = [{"role": "system", "content": "Add"}] * (index % 3 == 0)
        for _ in range(1 + index % 3):
            first, times = draw.randrange(100), draw.randrange(1, 9)
            messages.append({"role": "user", "content": f"{first}+{index}"})
            messages.append({"role": "assistant", "content": str(first + index) * times})
        found.append(messages)
    return found


def write_chats(path: Path, lines: list[list[dict[str, str]]]) -> str:
    """Write a line for each list of messages; returns the path."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    return str(path)
