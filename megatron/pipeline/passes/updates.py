"""Reduce the gradients of each batch, and step.

The chain that leads to version v+1 is posted right after the last backward of batch v, and runs while the rank goes on computing; the STEP waits for
it. So the STEP stands as late as the weight policy allows: at the end of a leg, just before the first forward that uses the new version. The last
STEPs of a program have no such forward; they close its drain.

Where each stage uses its newest version (`delay` None), the STEP comes first and the norm after it, for the report alone: nobody waits for it.
"""

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program

_ENDS_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def add_updates(legs: Legs, rank: int, outline: Program) -> Legs:
    """The legs of a rank with the chain after each batch's last backward, and the STEPs.

    A rank with several stages takes part in the norm once, at its lowest stage, when all of them have ended the batch.
    """
    stages = outline.stages_of(rank)
    delay = outline.weights.rule.delay
    batches = range(outline.first_batch, outline.first_batch + len(outline.batches))
    backwards_left = {(stage, batch): size for stage in stages for batch, size in zip(batches, outline.batches, strict=True)}
    stages_left = dict.fromkeys(batches, len(stages))

    def chain_after(backward: Instruction) -> Leg:
        batch = outline.batch_of(backward.microbatch)
        version = batch + 1
        backwards_left[backward.stage, batch] -= 1
        if backwards_left[backward.stage, batch]:
            return []
        chain = [Instruction(kind, backward.stage, version=version) for kind in _stage_reductions(backward.stage, outline)]
        stages_left[batch] -= 1
        if not stages_left[batch]:
            chain += steps(version) if delay is None else []
            chain += [Instruction(Kind.REDUCE_NORM, stages[0], version=version)] if outline.global_norm else []
        return chain

    def steps(version: int) -> Leg:
        return [Instruction(Kind.STEP, stage, version=version) for stage in stages]

    result = []
    for leg in legs:
        extended = []
        for instruction in leg:
            extended.append(instruction)
            if instruction.kind in _ENDS_BACKWARD:
                extended += chain_after(instruction)
        result.append(extended)
    if delay is not None:
        for version in range(outline.first_batch + 1, batches.stop + 1):
            first_user = version + delay  # a batch; its first forward opens the leg after this one
            result[min(first_user - 1 - outline.first_batch, len(batches))] += steps(version)
    return result


def _stage_reductions(stage: int, outline: Program) -> list[Kind]:
    kinds = [Kind.REDUCE_GRAD] if outline.data_parallel else []
    if outline.tied_embeddings and outline.num_stages > 1 and stage in (0, outline.num_stages - 1):
        kinds.append(Kind.REDUCE_EMBED)
    return kinds
