"""Recompute a microbatch's activations from its stored input before its backward.

R stands directly before the backward, so one microbatch at a time is there in full. It needs nothing from the next
stage: where the gradient of the output is still on its way, the recompute runs while it travels, for only the backward
waits for it.
"""

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, Instruction, Kind
from megatron.pipeline.schedules.passes import Segment, Segments


def add_recompute(segments: Segments, extent: Extent) -> Segments:
    """The segments with an R before each B, or before the I of a backward in halves, at the stages that recompute."""
    result = []
    for segment in segments:
        extended: Segment = []
        for instruction in segment:
            if instruction.kind in BEGINS_BACKWARD and extent.recomputes(instruction.stage):
                extended.append(Instruction(Kind.RECOMPUTE, instruction.stage, instruction.microbatch))
            extended.append(instruction)
        result.append(extended)
    return result
