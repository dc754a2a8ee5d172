"""What a run writes beside its checkpoints: where that fails, training goes on.

Problem: a full disk would end training for the sake of a line of its log, hours after it last saved.

Solution: a by-product that cannot be written is told once, with the reason, and again when it can be written.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class ByProduct:
    """One thing that is written: `name` is for the user, `consequence` what its failure means to him. `failures` are
    what it may raise; a library that talks to a service raises more than OSError."""

    def __init__(self, name: str, *, consequence: str, failures: tuple[type[Exception], ...] = (OSError,)) -> None:
        self.name, self.consequence, self._failures = name, consequence, failures
        self.fails = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """The block writes it. A failure is a warning, unless the attempt before failed, too."""
        try:
            yield
        except self._failures as error:
            if not self.fails:
                logger.warning("%s cannot be written: %s; training goes on, %s", self.name, _reason(error),
                               self.consequence)  # fmt: skip
            self.fails = True
        else:
            if self.fails:
                logger.warning("%s is written again", self.name)
            self.fails = False


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
