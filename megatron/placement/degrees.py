"""Where a logical rank stands in the model: Megatron's rank order, without torch.

megatron.core derives every process group from the logical rank, in the order "tp-cp-ep-dp-pp"
(`parallel_state.initialize_model_parallel`): the tensor rank changes fastest, then the data rank, then the stage.
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
    """Tensor, pipeline and data parallel size (t, p, d). Raises ValueError where one is below 1."""

    tensor: int
    pipeline: int
    data: int

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} parallel size {getattr(self, name)} is below 1; give 1 or more")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def rank(self, *, tensor: int, data: int, stage: int) -> int:
        """The logical rank at these coordinates."""
        return tensor + self.tensor * (data + self.data * stage)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a logical rank."""
        rest, tensor = divmod(rank, self.tensor)
        stage, data = divmod(rest, self.data)
        return Coordinates(tensor, data, stage)
