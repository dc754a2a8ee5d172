"""Directories that a run writes into, tried at its start.

Problem: a path that cannot be written would end a run at its first checkpoint, or after its last iteration.

Solution: rank 0 makes the directories and creates a file in each before anything is built; all ranks learn the verdict.
"""

import argparse
import os
import tempfile

from megatron.training.checkpoint import directory
from megatron.training.checkpoint.agreement import on_rank_zero


def prepare_outputs(args: argparse.Namespace) -> None:
    """Make the directories of `--save` and `--pipeline-timeline`, and mend what a killed save left in the first.

    Collective. Raises ValueError on every rank where rank 0 cannot write into one. A run that does not train saves
    nothing, so its `--save` may be read-only.
    """
    problem = on_rank_zero(lambda: _problem_with_outputs(args))
    if problem is not None:
        raise ValueError(problem)


def _problem_with_outputs(args: argparse.Namespace) -> str | None:
    save = None if args.skip_train else args.save
    for flag, path in (("--save", save), ("--pipeline-timeline", args.pipeline_timeline)):
        if path is not None and (problem := problem_with_directory(flag, path)) is not None:
            return problem
    if save is None:
        return None
    try:
        directory.recover(save)
    except OSError as error:
        return f"--save {save} cannot be mended after a killed save: {error}; remove or rename that file yourself"
    return None


def problem_with_directory(flag: str, path: str) -> str | None:
    """Make the directory that `flag` names and create a file there; returns why that fails, in one sentence."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable_"):
            pass
    except OSError as error:
        return f"{flag} {path} cannot be written: {error.strerror}; name a directory where files can be created"
    return None
