"""Reduce the gradients of each batch, and step.

The chain that leads to version v is posted right after the last backward of batch v-1, and runs while the rank goes on
computing; only the STEP waits for it. So the STEP stands as late as the weight policy allows: at the end of a leg,
just before the first forward that uses the new version. Where no such forward comes, it closes the program.

A rank with several stages has one chain for all of them, since one optimizer owns their parameters, and one norm and
one overflow decide about them. It stands at the rank's lowest stage, after the batch's last backward on the rank.

Where each stage uses its newest version (`delay` None) the STEP follows the reductions that it needs at once. The norm
comes after it, for the report alone, and nobody waits for it.
"""

from megatron.pipeline.instruction import ENDS_BACKWARD, Instruction, Kind
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program


def add_updates(legs: Legs, rank: int, outline: Program) -> Legs:
    """The legs of a rank with the chain after each batch's last backward, and the STEPs."""
    chain = _Chain(rank, outline)
    result = []
    for leg in legs:
        extended: Leg = []
        for instruction in leg:
            extended.append(instruction)
            if instruction.kind in ENDS_BACKWARD:
                extended += chain.after(instruction)
        result.append(extended)
    delay = outline.weights.delay
    if delay is not None:
        num_batches = len(outline.batches)
        for index in range(num_batches):
            last_leg_without = min(index + delay, num_batches)  # the leg after it begins with the version's first use
            result[last_leg_without].append(chain.step(outline.first_batch + index + 1))
    return result


class _Chain:
    """What a rank posts when a batch has ended there, at all its stages."""

    def __init__(self, rank: int, outline: Program) -> None:
        self._outline, self._rank = outline, rank
        self._stages = outline.stages_of(rank)
        sizes = enumerate(outline.batches, start=outline.first_batch)
        self._backwards_left = {batch: size * len(self._stages) for batch, size in sizes}

    def after(self, backward: Instruction) -> Leg:
        """What follows this backward: nothing, unless it is the batch's last on the rank."""
        outline = self._outline
        batch = outline.batch_of(backward.microbatch)
        self._backwards_left[batch] -= 1
        if self._backwards_left[batch]:
            return []
        kinds = [Kind.REDUCE_GRAD] if outline.data_parallel else []
        if outline.reduces_embeddings(self._rank):
            kinds.append(Kind.REDUCE_EMBED)
        if outline.weights.updates_alone:
            kinds.append(Kind.STEP)
        if outline.global_norm:
            kinds.append(Kind.REDUCE_NORM)
        return [self._link(kind, batch + 1) for kind in kinds]

    def step(self, version: int) -> Instruction:
        return self._link(Kind.STEP, version)

    def _link(self, kind: Kind, version: int) -> Instruction:
        return Instruction(kind, self._stages[0], version=version)
