"""A decorator that puts a function in the place of one that a module or a class has."""

import functools
from collections.abc import Callable
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """A decorator: puts a function in the place of `owner.name`. It gets the original as its first argument."""
    original = getattr(owner, name)

    def put(function: Callable) -> Callable:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return put
