"""What worker processes do in test_agreement.py."""

from datetime import timedelta

import torch.distributed as dist

from megatron.pipeline.runtime.failure.agreement import agreed, control_group
from megatron.pipeline.runtime.failure.errors import CheckpointError


def _verdict(function) -> str | None:
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return None


def fails_between_inner_blocks(error: Exception) -> list:
    """Rank 1 does, behind the first of two; what each rank has heard, how far it came, and what it hears next."""
    reached = []

    def nested() -> None:
        with agreed():
            with agreed():
                reached.append("first")
            if dist.get_rank() == 1:
                raise error
            with agreed():
                reached.append("second")
            reached.append("behind")

    def succeeds() -> None:
        with agreed(), agreed():
            dist.barrier(group=control_group())

    return [_verdict(nested), reached, _verdict(succeeds)]


def fails_alone(patience: float) -> str | None:
    """Rank 1, while the others do not come to a verdict."""
    control_group()
    if dist.get_rank() != 1:
        return None
    try:
        with agreed(patience=timedelta(seconds=patience)):
            raise OSError("no files")
    except OSError as error:
        return str(error)
