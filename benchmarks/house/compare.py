"""The differences between two frozen folders: by group, their number, and the first differing key with both values."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

_AROUND = 60  # number of characters shown on each side of the first difference of two texts


def differences(before: Path, after: Path, *, tolerance: float = 0.0) -> list[str]:
    """A line for each group that differs between the two folders.

    Raises:
        ValueError: a folder has no JSON file, so that nothing would be compared.
    """
    names = []
    for folder in (before, after):
        names.append({path.name for path in folder.glob("*.json")})
        if not names[-1]:
            raise ValueError(f"{folder} holds no JSON file; give a folder that `freeze` has written")
    found = []
    for name in sorted(names[0] | names[1]):
        absent = [str(folder) for folder, there in zip((before, after), names, strict=True) if name not in there]
        if absent:
            found.append(f"{name}: missing in {absent[0]}")
            continue
        one, other = (json.loads((folder / name).read_text(encoding="utf-8")) for folder in (before, after))
        parted = list(_parted(one, other, (), tolerance))
        if parted:
            key, left, right = parted[0]
            found.append(f"{name}: {len(parted)} values differ; first {' / '.join(key)}:\n  {left}\n  {right}")
    return found


def _parted(one: object, other: object, key: tuple[str, ...], tolerance: float) -> Iterator[tuple]:
    """Yield each key at which two values differ, with both values as text."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(each for each in other if each not in one)]:
            if name in one and name in other:
                yield from _parted(one[name], other[name], (*key, name), tolerance)
            else:
                values = (_text(each[name]) if name in each else "(missing)" for each in (one, other))
                yield ((*key, name), *values)
    elif isinstance(one, list) and isinstance(other, list):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from _parted(left, right, (*key, str(index)), tolerance)
        if len(one) != len(other):
            index = min(len(one), len(other))
            values = (_text(each[index]) if index < len(each) else "(missing)" for each in (one, other))
            yield ((*key, str(index)), *values)
    elif not _equal(one, other, tolerance):
        if isinstance(one, str) and isinstance(other, str):
            alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
            at = sum(1 for _ in alike)
            yield key, *(_window(each, at) for each in (one, other))
        else:
            yield key, _text(one), _text(other)


def _equal(one: object, other: object, tolerance: float) -> bool:
    """Whether two values are equal. Floats may differ by the relative tolerance; 1 is not equal to True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=0.0) or (math.isnan(one) and math.isnan(other))
    return one == other


def _window(text: str, at: int) -> str:
    begin, end = max(0, at - _AROUND), at + _AROUND
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def _text(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 2 * _AROUND else f"{text[: 2 * _AROUND]}..."
