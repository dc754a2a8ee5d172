"""Reduce the gradients of each batch, and step.

The chain that leads to version v is posted right after the last backward of batch v-1, and runs while the rank goes on
computing; only the STEP waits for it. So the STEP stands as late as the weight policy allows: at the end of a segment,
just before the first forward that uses the new version. Where no such forward comes, it closes the program.

A rank with several stages has one chain for all of them, since one optimizer owns their parameters, and one norm and
one overflow decide about them. It stands at the rank's lowest stage, after the batch's last backward on the rank.

A rank whose stages are all frozen has no gradients. It makes its versions, which are all the same, behind the last
forward of each batch, and its part of the norm behind that: so it waits for nobody and begins the next batch at once.

Where each stage uses its newest version (`delay` None) each stage has its own, and the STEP follows the reductions that
it needs at once. The norm comes after the last of them on the rank, for the report alone, and nobody waits for it.
"""

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import ENDS_BACKWARD, Instruction, Kind
from megatron.pipeline.schedules.passes import Segment, Segments


def add_updates(segments: Segments, rank: int, extent: Extent) -> Segments:
    """The segments of a rank with the chain after each batch's last backward, and the STEPs."""
    is_frozen = extent.is_frozen(rank)
    ends = {Kind.FORWARD} if is_frozen else ENDS_BACKWARD
    chains = [_ChainOfStages(rank, stages, extent) for stages in extent.owners(rank)]
    chain_of = {stage: chain for chain in chains for stage in chain.stages}
    left = dict.fromkeys(range(extent.first_batch, extent.first_batch + len(extent.batches)), len(chains))
    result = []
    for segment in segments:
        extended: Segment = []
        for instruction in segment:
            extended.append(instruction)
            if instruction.kind in ends:
                links = chain_of[instruction.stage].after(instruction)
                if links is None:
                    continue
                batch = extent.batch_of(instruction.microbatch)
                left[batch] -= 1
                if not left[batch] and extent.global_norm:
                    links.append(chains[0].link(Kind.REDUCE_NORM, batch + 1))
                extended += links
        result.append(extended)
    delay = extent.weights.delay
    if delay is not None and not is_frozen:
        num_batches = len(extent.batches)
        for index in range(num_batches):
            last_segment_without = min(
                index + delay, num_batches
            )  # the segment after it begins with the version's first use
            result[last_segment_without].append(chains[0].link(Kind.STEP, extent.first_batch + index + 1))
    return result


class _ChainOfStages:
    """What a rank posts when a batch has ended there, at all of the `stages` that step at once."""

    def __init__(self, rank: int, stages: tuple[int, ...], extent: Extent) -> None:
        self.stages = stages
        self._extent, self._rank = extent, rank
        sizes = enumerate(extent.batches, start=extent.first_batch)
        self._is_frozen = extent.is_frozen(rank)
        trained = [stage for stage in stages if self._is_frozen or not extent.graph.is_forward_only(stage)]
        self._left = {batch: size * len(trained) for batch, size in sizes}

    def after(self, end: Instruction) -> Segment | None:
        """What follows this end of a backward (without backwards: a forward), but for the norm, if it is the batch's
        last at these stages; else None.
        """
        extent = self._extent
        batch = extent.batch_of(end.microbatch)
        self._left[batch] -= 1
        if self._left[batch]:
            return None
        if self._is_frozen:
            return [self.link(Kind.STEP, batch + 1)]
        kinds = [Kind.REDUCE_GRAD] if extent.data_parallel else []
        if extent.reduces_embeddings(self._rank):
            kinds.append(Kind.REDUCE_EMBED)
        if extent.weights.updates_alone:
            kinds.append(Kind.STEP)
        return [self.link(kind, batch + 1) for kind in kinds]

    def link(self, kind: Kind, version: int) -> Instruction:
        return Instruction(kind, self.stages[0], version=version)
