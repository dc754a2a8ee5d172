"""Directories that a run writes into, tried at its start.

Problem: a path that cannot be written would end a run at its first checkpoint, or after its last iteration; a directory
into which another job writes would end with the checkpoints of neither.

Solution: rank 0 makes the directories and creates a file in each before anything is built, and takes that of `--save`
for this job (checkpoint/ownership.py); all ranks learn the verdict.
"""

import argparse
import time

import torch

from megatron.documents.directories import problem_with_directory
from megatron.pipeline.runtime.failure.agreement import on_rank_zero
from megatron.trainer.checkpoint import directory
from megatron.trainer.checkpoint.ownership import OwnerMark

_BETWEEN_LOOKS = 1.0  # seconds between two looks at a job that may be dead


def prepare_outputs(args: argparse.Namespace) -> OwnerMark | None:
    """Make the directories of `--save` and `--pipeline-timeline`, take the first for this job, and mend what a killed
    save left there. Returns, on rank 0, the mark of that; release it in the end.

    Collective. Raises ValueError on every rank where rank 0 cannot write into one, or another job writes into the
    first. A run that does not train saves nothing, so its `--save` may be read-only.
    """
    save = None if args.skip_train else args.save
    outputs = {"--save": save, "--pipeline-timeline": args.pipeline_timeline}
    problem = on_rank_zero(lambda: _problem_with_directories(outputs))
    if problem is not None:
        raise ValueError(problem)
    if save is None:
        return None
    mark = OwnerMark(save) if torch.distributed.get_rank() == 0 else None
    while not on_rank_zero(lambda: mark.try_to_take()):  # in short steps: ranks wait for each other with a limit
        time.sleep(_BETWEEN_LOOKS)
    try:
        problem = on_rank_zero(lambda: _problem_with_leftovers(save))
        if problem is not None:
            raise ValueError(problem)
    except ValueError:
        if mark is not None:
            mark.release()
        raise
    return mark


def _problem_with_directories(outputs: dict[str, str | None]) -> str | None:
    problems = (problem_with_directory(flag, path) for flag, path in outputs.items() if path is not None)
    return next((problem for problem in problems if problem is not None), None)


def _problem_with_leftovers(save: str) -> str | None:
    try:
        directory.recover(save)
    except OSError as error:
        return f"--save {save} cannot be mended after a killed save: {error}; remove or rename that file yourself"
    return None
