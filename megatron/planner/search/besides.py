"""What rows of a search change besides what it compares, so that nobody takes that for the schedule's doing.

A schedule may take other layers than the others (`--transformer-impl`), with other attention, and where batches may
grow it may have a larger one. Such a row is marked: it says in which of these it is unlike the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron.planner.search.outcome import Kept

_BESIDES: dict[str, Callable[[Kept], str]] = {
    "layers": lambda each: each.layers,
    "batches": lambda each: f"of {each.choice.global_batch_size}",
}


def differences(each: Kept, best: Kept) -> tuple[str, ...]:
    """What one has otherwise than the best, a clause each."""
    values = ((what, value(each), value(best)) for what, value in _BESIDES.items())
    return tuple(f"other {what} than the best ({mine}, not {its})" for what, mine, its in values if mine != its)


def marked(kept: Sequence[Kept]) -> tuple[Kept, ...]:
    """The same, from the best on, with what each has otherwise than the best in its notes."""
    found = ((each, differences(each, kept[0])) for each in kept)
    return tuple(replace(each, notes=(*each.notes, *new)) if new else each for each, new in found)


def sentences(kept: Iterable[Kept]) -> tuple[str, ...]:
    """What there is to know where not all of these have the same layers."""
    schedules: dict[str, list[str]] = {}
    for each in kept:
        names = schedules.setdefault(each.layers, [])
        if each.choice.schedule not in names:
            names.append(each.choice.schedule)
    if len(schedules) < 2:
        return ()
    parts = "; ".join(f"{what} of {', '.join(names)}" for what, names in schedules.items())
    return (
        f"not all have the same layers and attention ({parts}), so their times compare these, too, and not schedules "
        "alone; --transformer-impl local gives all of them the same",
    )
