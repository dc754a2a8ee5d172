"""Give every computation the weight version that the policy says.

The forward decides; recompute and backward use what their forward used, whatever has been stepped since.
"""

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program


def set_versions(legs: Legs, outline: Program) -> Legs:
    """The legs of a rank, which hold their updates already, with a version for each computation."""
    rule = outline.weights
    newest = max(outline.entry_versions)  # of the rank: what makes a version makes it for all its stages
    version_of: dict[tuple[int, int], int] = {}
    result = []
    for leg in legs:
        versioned: Leg = []
        for instruction in leg:
            kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
            if kind is rule.maker:
                newest = instruction.version
            elif kind is Kind.FORWARD:
                version_of[stage, microbatch] = rule.version_of(outline.batch_of(microbatch), newest=newest)
            if kind.is_computation:
                instruction = Instruction(kind, stage, microbatch, version_of[stage, microbatch])
            versioned.append(instruction)
        result.append(versioned)
    return result
