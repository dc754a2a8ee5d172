"""What a user may give to a `Pipeline`: refusals of values that no pipeline takes, or that would fail in a batch."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch


def is_duration(timeout: Any) -> bool:
    """Whether `timeout` is a duration above 0."""
    return isinstance(timeout, timedelta) and timeout > timedelta(0)


def require_values(
    *,
    timeout: Any,
    provisional: bool,
    error_feedback: bool,
    clip_grad: float,
    autocast: torch.dtype | None,
    traced_batches: int,
    **functions: Any,
) -> None:
    """Raise ValueError for a value that no pipeline takes. `functions`: the arguments that have to be callable."""
    if not is_duration(timeout):
        raise ValueError(f"timeout is {timeout!r}; give a datetime.timedelta above 0")
    if provisional and error_feedback:
        raise ValueError("provisional and error_feedback are two guesses of one update; give one of them")
    if not clip_grad >= 0:  # also not a number
        raise ValueError(f"clip_grad is {clip_grad}; give the largest norm, or 0 to clip nothing")
    if autocast not in (None, torch.bfloat16):
        raise ValueError(f"autocast to {autocast} would need a scaled loss; use torch.bfloat16, or None")
    if traced_batches < 0:
        raise ValueError(f"traced_batches is {traced_batches}; give the number of batches to trace, or 0 for none")
    for name, function in functions.items():
        if function is not None and not callable(function):
            what = "function of an output and targets" if name == "loss" else "function that makes it"
            raise ValueError(f"{name} is a {type(function).__name__}, which cannot be called; give a {what}")


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
