"""What a user may give to a `Pipeline`: refusals of what would fail only in the first batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def is_duration(timeout: Any) -> bool:
    """Whether `timeout` is a duration above 0."""
    return isinstance(timeout, timedelta) and timeout > timedelta(0)


def require_duration(timeout: Any) -> timedelta:
    """`timeout`. Raises ValueError if it is no duration, or not above 0."""
    if not is_duration(timeout):
        raise ValueError(f"timeout is {timeout!r}; give a datetime.timedelta above 0")
    return timeout


def require_makers(**makers: Callable[..., Any] | None) -> None:
    """Raise ValueError if an argument, by name, is given and cannot be called."""
    for name, maker in makers.items():
        if maker is not None and not callable(maker):
            what = "function of an output and targets" if name == "loss" else "function that makes it"
            raise ValueError(f"{name} is a {type(maker).__name__}, which cannot be called; give a {what}")


def require_steps(name: str, made: Any) -> Any:
    """`made`, the optimizer or the scheduler that a user's function has made.

    Raises ValueError if it has no `step` that can be called without arguments.
    """
    step = getattr(made, "step", None)
    if not callable(step):
        raise ValueError(f"{name} returns a {type(made).__name__}, which has no step; return a torch {name}")
    try:
        parameters = inspect.signature(step).parameters.values()
    except ValueError:  # a function in C need not tell its parameters
        return made
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"the step of {type(made).__name__} needs {', '.join(needed)}, which a pipeline does not have when it "
            f"steps; use another {name}"
        )
    return made
