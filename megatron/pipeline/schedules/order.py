"""What a schedule's order is: when each stage computes which microbatch.

An order knows nothing of weights, updates or transfers; the passes add them. To add an order, write a file with a
subclass and enter it into the table in `orders`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.passes import Legs


class Order(ABC):
    """The order of computations at each stage of a pipeline.

    Attributes:
        drains: no stage begins a batch before the one before it is through the pipeline.
        extends_warmup: the order knows how to start further ahead (`extra_warmup`).
    """

    drains: ClassVar[bool] = False
    extends_warmup: ClassVar[bool] = False

    def __init__(self, num_stages: int, *, extra_warmup: bool = False) -> None:
        self.num_stages = num_stages
        self.extra_warmup = extra_warmup

    @abstractmethod
    def legs(self, stage: int, batches: Sequence[range]) -> Legs:
        """What a stage computes on the microbatches of `batches`, which follow one another without a drain.

        Returns:
            For each batch the computations from its first forward up to where the first forward of the next batch
            stands, or would stand; then, in one more list, what is left to do.
        """

    @abstractmethod
    def max_in_flight(self, stage: int) -> int | None:
        """The most microbatches that are between their forward and the end of their backward; None: all of a batch."""


def forward(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Instruction:
    return Instruction(Kind.BACKWARD, stage, microbatch)
