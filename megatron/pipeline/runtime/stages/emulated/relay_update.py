"""A weight update on the host that sleeps instead of copying and stepping.

Problem: whether lanes overlap as a program promises cannot be seen on two cores with real copies and a real optimizer:
they take the cores and the memory from the computation.

Solution: fetch, store, update and reduction sleep for their times on the threads on which the real ones work, in the
real lanes. What is measured is the program, the executor and the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.runtime.stages.emulated.stage import EmulatedUpdate, sleep_for


class EmulatedRelayUpdate(EmulatedUpdate):
    """Each stage's words take the seconds that `seconds[kind][stage]` says, as `Costs.seconds` gives them, for FETCH,
    STORE_GRAD, UPDATE and REDUCE_GRAD. A STEP takes those of all `stages` of this rank.

    `job_group`: all ranks of the job, for the norm reduction; None skips it.
    """

    residency = None

    def __init__(
        self, seconds: Mapping[Kind, Sequence[float]], *, stages: Sequence[int], job_group: Any = None
    ) -> None:
        super().__init__(job_group=job_group, step_seconds=sum(seconds[Kind.STEP][stage] for stage in stages))
        self._seconds = seconds

    def reduce_grad(self, version: int, stage: int) -> None:
        sleep_for(self._seconds[Kind.REDUCE_GRAD][stage])

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        return self._sleep(Kind.FETCH, stage)

    def free(self, stage: int) -> Callable[[], None]:
        return self._sleep(Kind.FREE, stage)

    def accumulate(self, stage: int) -> None:
        """No gradients."""

    def store_grad(self, stage: int, version: int) -> Callable[[], None]:
        return self._sleep(Kind.STORE_GRAD, stage)

    def update(self, stage: int, version: int) -> Callable[[], None]:
        return self._sleep(Kind.UPDATE, stage)

    def _sleep(self, kind: Kind, stage: int) -> Callable[[], None]:
        return partial(sleep_for, self._seconds[kind][stage])
