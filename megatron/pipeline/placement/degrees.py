"""Where a logical rank stands in the model: Megatron's rank orders, without torch.

megatron.core derives every process group from the logical rank (`parallel_state.initialize_model_parallel`). In the
order "tp-cp-ep-dp-pp" the tensor rank changes fastest, then the data rank, then the stage; in "tp-cp-ep-pp-dp" the
stage changes before the data rank, so a pipeline's ranks stand in a row and not a stage's replicas.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Coordinates(NamedTuple):
    """The place of a rank in the model: tensor rank, data rank, pipeline stage."""

    tensor: int
    data: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Tensor, pipeline and data parallel size (t, p, d), and whether a pipeline's ranks stand in a row. Raises
    ValueError where a size is below 1."""

    tensor: int
    pipeline: int
    data: int
    pipelines_in_a_row: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} parallel size {getattr(self, name)} is below 1; give 1 or more")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def rank(self, *, tensor: int, data: int, stage: int) -> int:
        """The logical rank at these coordinates."""
        if self.pipelines_in_a_row:
            return tensor + self.tensor * (stage + self.pipeline * data)
        return tensor + self.tensor * (data + self.data * stage)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a logical rank."""
        rest, tensor = divmod(rank, self.tensor)
        if self.pipelines_in_a_row:
            data, stage = divmod(rest, self.pipeline)
        else:
            stage, data = divmod(rest, self.data)
        return Coordinates(tensor, data, stage)
