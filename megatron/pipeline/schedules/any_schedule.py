"""What is asked of a schedule, whoever made it: by the stream, the runtime, the planner, the trainer.

`Schedule` builds programs from choices, `ProgramSchedule` from a program that somebody brings. Nothing else has to know
which of them it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.move_order import Pairs
from megatron.pipeline.program.periodic import PeriodicProgram
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.segments import ProgramInSegments

if TYPE_CHECKING:
    from megatron.pipeline.schedules.stream import ProgramStream


class AnySchedule(Protocol):
    """Stages on ranks, rules, and programs of any number of batches. What each member says stands at `Schedule`."""

    # --- stages and rules

    @property
    def num_stages(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_virtual_stages(self) -> int: ...

    @property
    def rank_of_stage(self) -> tuple[int, ...]: ...

    @property
    def edges(self) -> tuple[Edge, ...]: ...

    @property
    def graph(self) -> StageGraph: ...

    @property
    def pairs(self) -> Pairs: ...

    @property
    def num_frozen(self) -> int: ...

    @property
    def weights(self) -> WeightPolicy: ...

    @property
    def name_of_weights(self) -> str: ...

    @property
    def residency(self) -> Residency | None: ...

    @property
    def recompute(self) -> bool: ...

    @property
    def balance(self) -> bool: ...

    @property
    def splits_backward(self) -> bool: ...

    @property
    def tied_embeddings(self) -> bool: ...

    @property
    def data_parallel(self) -> bool: ...

    @property
    def provisional_microbatches(self) -> int | None: ...

    @property
    def reduce_partial(self) -> bool: ...

    def stages_of(self, rank: int) -> tuple[int, ...]: ...

    def recomputes(self, stage: int) -> bool: ...

    # --- what it takes and demands

    def validate(self, num_microbatches: int) -> None: ...

    def runs(self, num_microbatches: int) -> bool: ...

    @property
    def max_in_flight(self) -> int | None: ...

    def max_saved_microbatches(self, batches: Sequence[int]) -> tuple[int, ...]: ...

    def max_saved_on_rank(self, batches: Sequence[int]) -> tuple[int, ...]: ...

    def evicting_ranks(self, batches: Sequence[int]) -> tuple[int, ...]: ...

    def unread(self, num_microbatches: int) -> tuple[int, ...]: ...

    @property
    def report_lag(self) -> int: ...

    @property
    def settling_batches(self) -> int: ...

    @property
    def first_settled_batch(self) -> int: ...

    def window(self, batches: Sequence[int]) -> tuple[int, ...]: ...

    # --- programs

    def build(self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0) -> Program: ...

    def build_in_segments(
        self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0
    ) -> ProgramInSegments: ...

    def build_periodic(self, num_microbatches: int) -> PeriodicProgram: ...

    def returns_to_batches(self, batches: Sequence[int]) -> bool: ...

    def build_evaluation(self, num_microbatches: int, *, version: int, first_microbatch: int = 0) -> Program: ...

    def stream(self, *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramStream: ...
