"""Segments and extents that are written down, for the passes' tests."""

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.weight_policies import weight_policy
from megatron.pipeline.schedules.passes import Segments
from tests.pipeline.strategies import text


def segments(*words: str) -> Segments:
    """The segments of a rank; each argument is one."""
    return [[Instruction.parse(word) for word in segment.split()] for segment in words]


def texts(result: Segments) -> list[str]:
    return [text(segment) for segment in result]


def extent(weights: str, *, num_stages: int = 1, batches: tuple[int, ...] = (1, 1), **fields: object) -> Extent:
    """What a program spans; one stage a rank unless `rank_of_stage` says otherwise."""
    fields.setdefault("rank_of_stage", tuple(range(num_stages)))
    return Extent(batches=batches, weights=weight_policy(weights), **fields)
