"""The output of the drop-in for users: lines on rank 0, and errors that end the job with one sentence.

Problem: Megatron-LM's training does not catch this project's errors, and a traceback from every rank hides the reason.

Solution: in the block `errors_end_the_job` a ValueError is an error of the user. It ends every rank with status 2, and
rank 0 prints its sentence, whether the launcher or an import has installed the schedules.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.pipeline.runtime.failure.errors import end, number_of

PROG = "megatron.pipeline.dropin"


def say(line: str) -> None:
    """Write a line on rank 0."""
    if number_of("RANK", 0) == 0:
        sys.stdout.write(f"{PROG}: {line}\n")
        sys.stdout.flush()


@contextmanager
def errors_end_the_job() -> Iterator[None]:
    """A block in which a ValueError is printed once and ends each rank with status 2 (SystemExit).

    The error must be raised on every rank alike.
    """
    try:
        yield
    except ValueError as error:
        raise SystemExit(end(PROG, error)) from None
