"""The notice board of a job's failure: what the ranks of a job tell each other through the store.

It holds the story of the first failure (the first writer wins), what every rank does now, and who has read and left.
The board has a connection of its own, so that looking at it never waits behind another user of the store. A store
that fails once has lost its host and stays lost: nothing is asked of it again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import Store


class FailureBoard:
    """Reads and writes the notices of one guarded block, under `scope`."""

    def __init__(self, store: Store, *, scope: str) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._scope = scope
        self.is_lost = False

    def _ask(self, question: Callable[[Store], Any], default: Any) -> Any:
        if self.is_lost:
            return default
        try:
            return question(self._store)
        except Exception:  # whatever the store raises, its host cannot be reached
            self.is_lost = True
            return default

    def _key(self, name: str) -> str:
        return f"{self._scope}/{name}"

    def _read(self, name: str) -> str | None:
        key = self._key(name)
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None, None)

    def story(self) -> str | None:
        """The root cause, if a rank has told one."""
        return self._read("story")

    def wait_for_story(self, patience: float) -> str | None:
        """The root cause, if one is told within `patience` seconds."""
        deadline = time.monotonic() + patience
        while (story := self.story()) is None and time.monotonic() < deadline and not self.is_lost:
            time.sleep(0.05)
        return story

    def tell(self, story: str) -> str:
        """Make `story` the root cause unless another is there; return the one that counts."""
        return self._ask(lambda store: store.compare_set(self._key("story"), "", story).decode(), story)

    def set_doing(self, rank: int, name: str, doing: str, waits_for: int | None) -> None:
        """Tell what a rank is called, what it does, and which rank it waits for."""
        text = json.dumps([name, doing, waits_for])
        self._ask(lambda store: store.set(self._key(f"doing/{rank}"), text), None)

    def doing(self, rank: int) -> tuple[str, str, int | None]:
        """(name, doing, rank it waits for) as a rank told last."""
        text = self._read(f"doing/{rank}")
        return (f"rank {rank}", "", None) if text is None else tuple(json.loads(text))

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share; 0 when the store is lost."""
        return self._ask(lambda store: store.add(self._key(name), amount), 0)
