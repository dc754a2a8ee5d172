"""The passes of an update: reduce the gradients of each batch and step, give every computation its weight version, and
predict the weights of the next batch.

**Updates (`add_updates`).** The chain that leads to version v is posted right after the last backward of batch v-1, and
runs while the rank goes on computing; only the STEP waits for it. So the STEP stands as late as the weight policy
allows: at the end of a segment, just before the first forward that uses the new version. Where no such forward comes,
it closes the program.

A rank with several stages has one chain for all of them, since one optimizer owns their parameters, and one norm and
one overflow decide about them. It stands at the rank's lowest stage, after the batch's last backward on the rank.

A rank whose stages are all frozen has no gradients. It makes its versions, which are all the same, behind the last
forward of each batch, and its part of the norm behind that: so it waits for nobody and begins the next batch at once.

Where each stage uses its newest version (`delay` None) each stage has its own, and the STEP follows the reductions that
it needs at once. The norm comes after the last of them on the rank, for the report alone, and nobody waits for it.

**Versions (`set_versions`).** The forward decides; recompute and backward use what their forward used, whatever has
been stepped since. Where weights refresh they use the newest of their stage instead, and where policies look ahead a
forward goes towards that: it is predicted up to the version of its own batch, or stepped with the gradients that are
there and that no STEP has taken.

**Predictions (`add_predictions`).** PREDICT@t stands where a stage is about to begin batch t: behind STEP@(t-1), whose
weights it starts from, before the first forward of batch t, and also where the run drains instead, so that both compute
the same. It reads the gradients of those microbatches of batch t-1 that are done at the stage. Three things follow:

- Where more are done than it may read, because all stages shall read as many, HOLD keeps the gradients as they are
  after those that it reads.
- Where all are done (the last stage), the chain that reduces them in place waits until PREDICT has read them.
- What stages or replicas add up before they predict is reduced in the chain: REDUCE_PARTIAL, the sums that are kept,
  over the replicas; REDUCE_PARTIAL_EMBED, of tied embeddings, over the two stages (and over the replicas, where that is
  wanted): it keeps and reads as many microbatches as both stages have done, so that their copies stay equal.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import ENDS_BACKWARD, REDUCTIONS, Instruction, Kind, Row, Rows
from megatron.pipeline.program.weight_policies import Ahead
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
                if rule.ahead:
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


def add_predictions(segments: Segments, rank: int, extent: Extent) -> Segments:
    """The segments of a rank with one stage, which hold their chains and STEPs, with a prediction at the end of each
    batch's own segment.
    """
    (stage,) = extent.stages_of(rank)
    result = list(segments)
    for index, segment in enumerate(segments[: len(extent.batches)]):
        batch = extent.first_batch + index
        chain = [each for each in segment if each.kind in REDUCTIONS and each.version == batch + 1]
        before = [each for each in segment if each not in chain]
        predict = Instruction(Kind.PREDICT, stage, version=batch + 1)
        result[index] = [*_with_partial_gradients(before, stage, batch, extent), predict, *chain]
    return result


def _with_partial_gradients(segment: Segment, stage: int, batch: int, extent: Extent) -> Segment:
    """A segment with what a prediction needs before it: kept gradients, and their reductions."""
    num_read = extent.num_read(stage, batch)
    of_batch = [each.kind in ENDS_BACKWARD and extent.batch_of(each.microbatch) == batch for each in segment]
    behind: dict[int, list[Kind]] = {}  # number of backwards -> what follows the last of them
    if extent.reduce_partial or num_read < sum(of_batch):
        behind[num_read] = [Kind.HOLD]
    if extent.reduce_partial:
        behind[num_read].append(Kind.REDUCE_PARTIAL)
    if extent.reads_ties(stage):
        behind.setdefault(extent.num_read_of_ties(batch), []).append(Kind.REDUCE_PARTIAL_EMBED)
    extended: Segment = []
    num_done = 0
    for each, is_of_batch in zip(segment, of_batch, strict=True):
        extended.append(each)
        if is_of_batch:
            num_done += 1
            extended += [Instruction(kind, stage, version=batch + 1) for kind in behind.get(num_done, ())]
    return extended
