"""Which known flag did the user mean? Asked only where a word is a slip of the pen.

Problem: similar letters are no similar meaning. The flag nearest to one of another program (`--data-impl`) is some
other flag (`--data-path`), and a hint that names it sends the user astray.

Solution: a hint needs the same flag with a slip: other separators or capitals, a letter or two, or one word left out
after the first. Of flags that are as near, one that works goes before one that is refused, and one that begins alike
before others; where two are left, none is named.
"""

from collections.abc import Collection, Iterable

_LONG = 9  # letters from which on two of them may be wrong
_NEGATIONS = frozenset({"no", "non", "disable"})


def meant(name: str, known: Iterable[str], refused: Collection[str] = ()) -> str | None:
    """The flag that `name` is a slip of, or None; `refused` are those of `known` that cannot be used."""
    typed = _plain(name)
    allowed = 2 if len(typed.replace("-", "")) >= _LONG else 1
    best: tuple[int, bool, bool] | None = None
    nearest: list[str] = []
    for flag in known:
        plain = _plain(flag)
        distance = 0 if typed == plain else allowed if _lacks_a_word(typed, plain) else _distance(typed, plain, allowed)
        if distance > allowed:
            continue
        rank = (distance, flag in refused, typed.split("-")[0] != plain.split("-")[0])
        if best is None or rank < best:
            best, nearest = rank, [flag]
        elif rank == best:
            nearest.append(flag)
    return nearest[0] if len(nearest) == 1 else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _lacks_a_word(typed: str, flag: str) -> bool:
    """`pipeline-parallel-size` for `pipeline-model-parallel-size`. A flag that begins with another word says another
    thing (`max-position-embeddings`), and so does one with a word that turns the meaning round."""
    words, there = typed.split("-"), flag.split("-")
    if len(words) < 2 or len(there) != len(words) + 1:
        return False
    return any(there[:place] + there[place + 1 :] == words and there[place] not in _NEGATIONS
               for place in range(1, len(there)))  # fmt: skip


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
