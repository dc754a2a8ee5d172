"""A store that calls a function before it first answers: a rank of a gloo group asks for others' addresses then, and
has told its own."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store


class AskedStore(Store):
    """`store`, with `before_answer` called before the first answer."""

    def __init__(self, store: Store, before_answer: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._before_answer = store, before_answer

    def get(self, key: str) -> bytes:
        call, self._before_answer = self._before_answer, None
        if call is not None:
            call()
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._store.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))
