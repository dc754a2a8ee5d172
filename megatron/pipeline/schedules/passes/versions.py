"""Give every computation the weight version that the policy says.

The forward decides; recompute and backward use what their forward used, whatever has been stepped since. Where weights
refresh they use the newest of their stage instead, and where policies look ahead a forward goes towards that: it is
predicted up to the version of its own batch, or stepped with the gradients that are there and that no STEP has taken.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import ENDS_BACKWARD, Instruction, Kind, Row, Rows
from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.schedules.passes import Segment, Segments


def set_versions(segments: Segments, extent: Extent) -> Segments:
    """The segments of a rank, which hold their updates already, with a version for each computation."""
    rule = extent.weights
    newest = dict.fromkeys(range(extent.num_stages), max(extent.entry_versions))
    unstepped = dict.fromkeys(range(extent.num_stages), 0)  # backwards since the last STEP, where that is asked
    version_of: dict[tuple[int, int], int] = {}
    result = []
    for segment in segments:
        versioned: Segment = []
        for instruction in segment:
            kind, stage, microbatch = instruction.kind, instruction.stage, instruction.microbatch
            if kind is rule.maker:
                rank = extent.rank_of_stage[stage]
                made_for = next(stages for stages in extent.owners(rank) if stage in stages)
                newest |= dict.fromkeys(made_for, instruction.version)
                unstepped |= dict.fromkeys(made_for, 0)
            elif kind is Kind.FORWARD:
                version_of[stage, microbatch] = rule.version_of(extent.batch_of(microbatch), newest=newest[stage])
            elif rule.refreshes and kind.is_computation:
                version_of[stage, microbatch] = newest[stage]
            if kind.is_computation:
                version = version_of.get((stage, microbatch))  # none: its forward is to come, which the checker says
                instruction = Instruction(kind, stage, microbatch, version)
                if rule.looks_ahead:
                    horizon = extent.batch_of(microbatch) - version if kind is Kind.FORWARD else 0
                    if horizon and rule.ahead is Ahead.PREDICTION:
                        instruction = replace(instruction, horizon=horizon)
                    elif horizon:
                        instruction = replace(instruction, unstepped=unstepped[stage])
                    unstepped[stage] += kind in ENDS_BACKWARD
            versioned.append(instruction)
        result.append(versioned)
    return result


def without_versions(rows: Rows) -> Rows:
    """The rows, with nothing said of the weights that computations use: that follows from the policy."""
    return tuple(tuple(_bare(row)) for row in rows)


def _bare(row: Row) -> Iterator[Instruction]:
    for each in row:
        yield Instruction(each.kind, each.stage, each.microbatch, peer=each.peer) if each.kind.is_computation else each
