"""The stop signal of a job's ranks, and the seeds of their random numbers.

A cluster ends jobs by SIGTERM, to one rank or to all, at any moment. A handler that saved at once would save in the
middle of a step, on one rank alone. So the handler only notes a stop request. The request travels with the next
reduction of all ranks; all ranks read it at the same batch, drain, save once and exit with status 0.

A program handles SIGTERM from its start, before it imports torch.
"""

import random
import signal
from collections.abc import Callable

from megatron.pipeline.runtime.failure.errors import end_at_once

# Requests, as bits that travel with the norm of a batch: all ranks read the same bits in its report.
STOP = 1
"""Save and end the run."""
MADE = 2
"""Drain, and switch to the program that was made during training (`--pipeline-schedule auto`)."""
ADMIT = 4
"""Drain, and admit the new processes of lost ranks."""


class StopSignal:
    """Note SIGTERM; install it early, so that a signal during start-up is kept until the training loop asks."""

    def __init__(self) -> None:
        self.received = False
        self.on_receipt: Callable[[], None] | None = None
        """Called from the signal handler, so it must do next to nothing."""
        self.means_loss: Callable[[], bool] = lambda: False
        """Whether SIGTERM ends this process alone while the job continues without it."""

    def install(self) -> "StopSignal":
        """Handle SIGTERM from now on (main thread only)."""
        signal.signal(signal.SIGTERM, self._handle)
        return self

    def _handle(self, signum: int, frame: object) -> None:
        if not self.received and self.means_loss():
            end_at_once("its launcher ends all ranks of a node of which one is lost")
        self.received = True
        if self.on_receipt is not None:
            self.on_receipt()


def set_seeds(seed: int) -> None:
    """Seed every generator, with the same seed on all pipeline and data parallel ranks.

    Weights must not depend on the parallel degrees, and dropout sets its own state per layer and sample.
    """
    import numpy
    import torch

    from megatron.core import tensor_parallel

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
