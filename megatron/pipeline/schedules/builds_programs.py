"""What every schedule can do that says where its stages are, which weights they use, and what its segments hold."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron.pipeline.program.program import Program
from megatron.pipeline.program.stages import stages_of
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.building import build_evaluation
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.segments import ProgramInSegments
from megatron.pipeline.schedules.stream import ProgramStream


class BuildsPrograms(ABC):
    """Builds programs of batches, each of which `validate` takes."""

    rank_of_stage: tuple[int, ...]
    weights: WeightPolicy

    @abstractmethod
    def validate(self, num_microbatches: int) -> None:
        """Raises ValueError where a batch of this size cannot be run."""

    @abstractmethod
    def _build(self, batches: Sequence[int], first_batch: int, first_microbatch: int) -> ProgramInSegments:
        """The program of batches that can be run."""

    @property
    @abstractmethod
    def _evaluation_order(self) -> Order:
        """The order whose forwards an evaluation has."""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, ascending."""
        return stages_of(self.rank_of_stage, rank)

    @property
    def first_settled_batch(self) -> int:
        """From this batch of a run on, the versions of all batches lie equally far behind."""
        return self.weights.first_settled_batch

    def runs(self, num_microbatches: int) -> bool:
        """Whether `validate` takes a batch of this size."""
        try:
            self.validate(num_microbatches)
        except ValueError:
            return False
        return True

    def build(self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0) -> Program:
        """The program of `batches`, the number of microbatches of each, from a drained state to a drained state.

        Raises:
            ValueError: no batches, or a batch that the schedule cannot run.
        """
        return self.build_in_segments(batches, first_batch=first_batch, first_microbatch=first_microbatch).program

    def build_in_segments(
        self, batches: Sequence[int], *, first_batch: int = 0, first_microbatch: int = 0
    ) -> ProgramInSegments:
        """What `build` builds, with the places at which a run could be drained."""
        if not batches:
            raise ValueError("a program needs a batch; give the number of microbatches of each")
        for num_microbatches in batches:
            self.validate(num_microbatches)
        return self._build(batches, first_batch, first_microbatch)

    def returns_to_batches(self, batches: Sequence[int]) -> bool:
        """Whether in the program of these batches some rank has a backward of a batch, or a half of one, after one of a
        later batch. Raises ValueError as `build`.
        """
        return self.build(batches).returns_to_batches

    def build_evaluation(self, num_microbatches: int, *, version: int, first_microbatch: int = 0) -> Program:
        """Forwards of one batch, of any size, with one weight version, the newest of a drained state.

        Raises:
            ValueError: no microbatches.
        """
        if num_microbatches < 1:
            raise ValueError(f"an evaluation cannot have {num_microbatches} microbatches; give 1 and more")
        return build_evaluation(self, self._evaluation_order, num_microbatches, version, first_microbatch)

    def stream(self, *, first_batch: int = 0, first_microbatch: int = 0) -> ProgramStream:
        """The batches of a run one at a time, from a drained state before `first_batch` on."""
        return ProgramStream(self, first_batch=first_batch, first_microbatch=first_microbatch)
