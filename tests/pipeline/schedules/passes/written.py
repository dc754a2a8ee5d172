"""Segments and outlines that are written down, for the passes' tests."""

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import weight_policy
from megatron.pipeline.schedules.passes import Segments
from tests.pipeline.strategies import text


def segments(*words: str) -> Segments:
    """The segments of a rank; each argument is one."""
    return [[Instruction.parse(word) for word in segment.split()] for segment in words]


def texts(result: Segments) -> list[str]:
    return [text(segment) for segment in result]


def outline(weights: str, *, num_stages: int = 1, batches: tuple[int, ...] = (1, 1), **fields: object) -> Program:
    """A program without rows; one stage a rank unless `rank_of_stage` says otherwise."""
    fields.setdefault("rank_of_stage", tuple(range(num_stages)))
    return Program(rows=((),) * num_stages, batches=batches, weights=weight_policy(weights), **fields)
