"""Which known flag did the user mean? Asked only where a word is a slip of the pen.

Problem: similar letters are no similar meaning. The flag nearest to one of another program (`--data-impl`) is some
other flag (`--data-path`), and a hint that names it sends the user astray.

Solution: a hint needs the same flag with a slip: other separators or capitals, a letter or two, or one word left out.
"""

from collections.abc import Iterable

_LONG = 9  # letters from which on two of them may be wrong
_NEGATIONS = frozenset({"no", "non", "disable"})


def meant(name: str, known: Iterable[str]) -> str | None:
    """The flag that `name` is a slip of, or None."""
    typed = _plain(name)
    allowed = 2 if len(typed.replace("-", "")) >= _LONG else 1
    best: tuple[int, str] | None = None
    for flag in known:
        plain = _plain(flag)
        distance = 0 if typed == plain else allowed if _lacks_a_word(typed, plain) else _distance(typed, plain, allowed)
        if distance <= allowed and (best is None or (distance, flag) < best):
            best = distance, flag
    return best and best[1]


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _lacks_a_word(typed: str, flag: str) -> bool:
    """`pipeline-parallel-size` for `pipeline-model-parallel-size`; a word that turns the meaning round is no such."""
    words, there = typed.split("-"), flag.split("-")
    if len(words) < 2 or len(there) != len(words) + 1:
        return False
    return any(there[:place] + there[place + 1 :] == words and there[place] not in _NEGATIONS
               for place in range(len(there)))  # fmt: skip


def _distance(one: str, other: str, most: int) -> int:
    """Letters to insert, leave out, replace, or swap with the next; above `most` only that it is more."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before, row = [], list(range(len(other) + 1))
    for place, letter in enumerate(one, start=1):
        earlier, before, row = before, row, [place]
        for index, compared in enumerate(other, start=1):
            least = min(before[index] + 1, row[-1] + 1, before[index - 1] + (letter != compared))
            if place > 1 and index > 1 and letter == other[index - 2] and one[place - 2] == compared:
                least = min(least, earlier[index - 2] + 1)
            row.append(least)
        if min(row) > most and min(before) > most:
            return most + 1
    return row[-1]
