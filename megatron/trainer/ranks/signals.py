"""SIGTERM as a stop request.

A cluster ends jobs by SIGTERM, to one rank or to all, at any moment. A handler that saved there and then would save
half a step, and alone. So the handler only notes the stop request. It travels with the next reduction that all ranks
take part in; all read it at the same batch, drain, save once and exit with status 0.
"""

import signal
from collections.abc import Callable


class StopSignal:
    """Notes SIGTERM. Install it early: what arrives during start-up is kept until the loop asks."""

    def __init__(self) -> None:
        self.received = False
        self.on_receipt: Callable[[], None] | None = None
        """Called from the handler; it must do next to nothing."""

    def install(self) -> "StopSignal":
        """Handle SIGTERM from now on (main thread only)."""
        signal.signal(signal.SIGTERM, self._handle)
        return self

    def _handle(self, signum: int, frame: object) -> None:
        self.received = True
        if self.on_receipt is not None:
            self.on_receipt()
