"""Meetings of ranks at a store: unique names for the groups that they form, and a barrier with a time limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from torch.distributed import Store

num_named: Counter[tuple] = Counter()  # (purpose, ranks) -> names given for them in this process


def fresh_name(purpose: str, ranks: Sequence[int]) -> str:
    """Return a new name in the store for these ranks and this purpose.

    All these ranks must call this function the same number of times.
    """
    key = (purpose, *ranks)
    num_named[key] += 1
    return f"{purpose}/{'-'.join(map(str, ranks))}/{num_named[key]}"


def forget_names() -> None:
    """Restart the numbers in the names, for a new store: ranks may have used different numbers of names before."""
    num_named.clear()


def meets(store: Store, key: str, size: int, patience: float) -> bool:
    """Count this rank at `key`, then wait until `size` ranks are counted. Return False after `patience` seconds."""
    deadline = time.monotonic() + patience
    count = store.add(key, 1)
    while count < size and time.monotonic() < deadline:
        time.sleep(0.02)
        count = store.add(key, 0)
    return count >= size
