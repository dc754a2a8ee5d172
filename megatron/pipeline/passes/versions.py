"""Give every computation the weight version that the policy says.

The forward decides; recompute and backward use what their forward used, whatever has been stepped since. Where weights
refresh they use the newest of their stage instead, and where policies look ahead a forward is predicted up to there:
to the version of its own batch.
"""

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program


def set_versions(legs: Legs, outline: Program) -> Legs:
    """The legs of a rank, which hold their updates already, with a version for each computation."""
    rule = outline.weights
    newest = dict.fromkeys(range(outline.num_stages), max(outline.entry_versions))
    version_of: dict[tuple[int, int], int] = {}
    result = []
    for leg in legs:
        versioned: Leg = []
        for instruction in leg:
            kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
            if kind is rule.maker:
                rank = outline.rank_of_stage[stage]
                made_for = next(stages for stages in outline.owners(rank) if stage in stages)
                newest |= dict.fromkeys(made_for, instruction.version)
            elif kind is Kind.FORWARD:
                version_of[stage, microbatch] = rule.version_of(outline.batch_of(microbatch), newest=newest[stage])
            elif rule.refreshes and kind.is_computation:
                version_of[stage, microbatch] = newest[stage]
            if kind.is_computation:
                version, horizon = version_of[stage, microbatch], 0
                if rule.looks_ahead and kind is Kind.FORWARD:
                    horizon = outline.batch_of(microbatch) - version
                instruction = Instruction(kind, stage, microbatch, version, horizon=horizon)
            versioned.append(instruction)
        result.append(versioned)
    return result
