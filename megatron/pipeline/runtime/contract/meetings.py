"""Meetings of ranks at a store: unique names for what they make together, and counts of the ranks that have come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from torch.distributed import Store

num_named: Counter[tuple] = Counter()  # (purpose, ranks) -> names given for them in this process


def fresh_name(purpose: str, ranks: Sequence[int]) -> str:
    """A new name in the store for these ranks and this purpose. All these ranks must ask equally often."""
    key = (purpose, *ranks)
    num_named[key] += 1
    return f"{purpose}/{'-'.join(map(str, ranks))}/{num_named[key]}"


def forget_names() -> None:
    """Start the names anew, for a new store: ranks may have made different numbers of names before."""
    num_named.clear()


def meets(store: Store, key: str, size: int, patience: float) -> bool:
    """Count this rank at `key`, and wait until `size` ranks have come. Return whether they have within `patience` s."""
    deadline = time.monotonic() + patience
    count = store.add(key, 1)
    while count < size and time.monotonic() < deadline:
        time.sleep(0.02)
        count = store.add(key, 0)
    return count >= size
