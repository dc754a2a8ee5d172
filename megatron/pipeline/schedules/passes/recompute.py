"""Recompute the activations of a microbatch from its stored input before its backward.

R stands directly before the backward, so a stage holds the full activations of only one microbatch at a time. R needs
no tensor from the next stage. So while the gradient of the output is on its way, the recompute runs, and only the
backward waits for the gradient.
"""

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, Instruction, Kind
from megatron.pipeline.schedules.passes import Segment, Segments


def add_recompute(segments: Segments, extent: Extent) -> Segments:
    """Add an R before each B, and before each I of a backward in halves, at the stages that recompute."""
    result = []
    for segment in segments:
        extended: Segment = []
        for instruction in segment:
            if instruction.kind in BEGINS_BACKWARD and extent.recomputes(instruction.stage):
                extended.append(Instruction(Kind.RECOMPUTE, instruction.stage, instruction.microbatch))
            extended.append(instruction)
        result.append(extended)
    return result
