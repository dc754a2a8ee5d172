"""Reduce the gradients of each batch, and step.

The chain that leads to version v is posted right after the last backward of batch v-1, and runs while the rank goes on
computing; only the STEP waits for it. So the STEP stands as late as the weight policy allows: at the end of a leg,
just before the first forward that uses the new version. Where no such forward comes, it closes the program.

Where each stage uses its newest version (`delay` None) the STEP follows the reductions that it needs at once. The norm
comes after it, for the report alone, and nobody waits for it.
"""

from megatron.pipeline.instruction import Instruction, Kind
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program

_ENDS_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def add_updates(legs: Legs, rank: int, outline: Program) -> Legs:
    """The legs of a rank with the chain after each batch's last backward, and the STEPs."""
    chain = _Chain(rank, outline)
    result = []
    for leg in legs:
        extended: Leg = []
        for instruction in leg:
            extended.append(instruction)
            if instruction.kind in _ENDS_BACKWARD:
                extended += chain.after(instruction)
        result.append(extended)
    delay = outline.weights.rule.delay
    if delay is not None:
        num_batches = len(outline.batches)
        for index in range(num_batches):
            last_leg_without = min(index + delay, num_batches)  # the leg after it begins with the version's first use
            result[last_leg_without] += chain.steps(outline.first_batch + index + 1)
    return result


class _Chain:
    """What a rank posts when a batch has ended there.

    A rank with several stages takes part in the norm once, at its lowest stage, when all of them have ended the batch.
    """

    def __init__(self, rank: int, outline: Program) -> None:
        self._outline = outline
        self._stages = outline.stages_of(rank)
        sizes = dict(enumerate(outline.batches, start=outline.first_batch))
        self._backwards_left = {(stage, batch): size for stage in self._stages for batch, size in sizes.items()}
        self._stages_left = dict.fromkeys(sizes, len(self._stages))

    def after(self, backward: Instruction) -> Leg:
        """What follows this backward: nothing, unless it is the batch's last."""
        batch = self._outline.batch_of(backward.microbatch)
        place = backward.stage, batch
        self._backwards_left[place] -= 1
        if self._backwards_left[place]:
            return []
        version = batch + 1
        chain = [Instruction(kind, backward.stage, version=version) for kind in self._stage_reductions(backward.stage)]
        self._stages_left[batch] -= 1
        if not self._stages_left[batch]:
            if self._outline.weights.rule.updates_alone:
                chain += self.steps(version)
            if self._outline.global_norm:
                chain.append(Instruction(Kind.REDUCE_NORM, self._stages[0], version=version))
        return chain

    def steps(self, version: int) -> Leg:
        return [Instruction(Kind.STEP, stage, version=version) for stage in self._stages]

    def _stage_reductions(self, stage: int) -> list[Kind]:
        outline, last = self._outline, self._outline.num_stages - 1
        kinds = [Kind.REDUCE_GRAD] if outline.data_parallel else []
        if outline.tied_embeddings and outline.crosses(0, last) and stage in (0, last):
            kinds.append(Kind.REDUCE_EMBED)
        return kinds
