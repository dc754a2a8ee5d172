"""The passes for updates: reduce gradients and step, set weight versions, and predict the weights of the next batch.

**Updates (`add_updates`).** The chain that leads to version v is posted directly after the last backward of batch v-1.
The chain runs while the rank goes on computing, and only the STEP waits for it. So the STEP stands as late as the
weight policy allows: at the end of a segment, directly before the first forward that uses the new version. If no such
forward comes, the STEP stands at the end of the program.

A rank with several stages has one chain for all of them, because one optimizer owns their parameters, and one norm and
one overflow decide about them. The chain is written at the lowest stage of the rank, and stands after the rank's last
backward of the batch.

A rank with only frozen stages has no gradients, and all its versions are the same. Its STEP stands after the last
forward of each batch, and its REDUCE_NORM after the STEP. So the rank waits for no other rank, and begins the next
batch at once.

If steps are optimistic, the STEP stands before REDUCE_NORM, which only its VALIDATE waits for (`passes.validation`).

If each stage uses its newest version (`delay` None), each stage has a chain of its own, and its STEP directly follows
the reductions that the STEP needs. One REDUCE_NORM follows on the rank, after the last of these. It serves only the
report, and no instruction waits for it.

**Versions (`set_versions`).** Recompute and backward use the version of their forward, even if later versions have been
made since. If the policy refreshes, they use the newest version of their stage instead. If the policy also looks ahead,
a forward gets weights ahead of its version. They are predicted up to the version of its own batch, or stepped with the
gradients that no STEP has applied yet.

**Predictions (`add_predictions`).** PREDICT@t stands where a stage is about to begin batch t. This is after STEP@(t-1),
whose weights it starts from, and before the first forward of batch t. It stands there even if the run drains instead,
so that both ways compute the same. PREDICT@t reads the gradients of the microbatches of batch t-1 whose backwards are
done at the stage; if predictions read 0 microbatches, it takes the update of STEP@(t-1) again. Three rules follow:

- With `provisional_microbatches`, all stages read the same number of microbatches. If more are done at a stage, HOLD
  copies the gradients when that number is done.
- On the last stage all backwards of batch t-1 are done. The chain, which reduces the gradients in place, stands after
  PREDICT, so that PREDICT can read them first. PREDICT waits for the posted part of the chain, so the chain stands
  there even if PREDICT reads nothing: its REDUCE_EMBED may wait for a rank that waits for this one.
- Sums over replicas or stages for a prediction are reduced in the chain. REDUCE_PARTIAL reduces the copied gradients
  over the replicas. REDUCE_PARTIAL_EMBED reduces the gradients of tied embeddings over the two stages, and over the
  replicas if that is wanted. It copies and reads as many microbatches as both stages have done, so that the embeddings
  of both stages stay equal.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import ENDS_BACKWARD, REDUCTIONS, Instruction, Kind, Row, Rows
from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.schedules.passes import Segment, Segments


def add_updates(segments: Segments, rank: int, extent: Extent) -> Segments:
    """Add the chain after the last backward of each batch, and the STEPs, to the segments of a rank."""
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
    if delay is not None and not is_frozen and not extent.optimistic:
        num_batches = len(extent.batches)
        for index in range(num_batches):
            last_segment_without = min(
                index + delay, num_batches
            )  # the next segment begins with the first use of the version
            result[last_segment_without].append(chains[0].link(Kind.STEP, extent.first_batch + index + 1))
    return result


class _ChainOfStages:
    """Makes the chains of the `stages` of a rank that step together."""

    def __init__(self, rank: int, stages: tuple[int, ...], extent: Extent) -> None:
        self.stages = stages
        self._extent, self._rank = extent, rank
        batches = range(extent.first_batch, extent.first_batch + len(extent.batches))
        self._is_frozen = extent.is_frozen(rank)
        trained = [stage for stage in stages if self._is_frozen or not extent.graph.is_forward_only(stage)]
        self._left = {batch: sum(extent.num_taken(stage, batch) for stage in trained) for batch in batches}

    def after(self, end: Instruction) -> Segment | None:
        """Return the chain after `end` without REDUCE_NORM; None if `end` is not the last one of its batch here.

        Args:
            end: an instruction that ends a backward at these stages; on a rank with only frozen stages, a forward.
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
        if extent.weights.updates_alone or extent.optimistic:
            kinds.append(Kind.STEP)
        return [self.link(kind, batch + 1) for kind in kinds]

    def link(self, kind: Kind, version: int) -> Instruction:
        return Instruction(kind, self.stages[0], version=version)


def set_versions(segments: Segments, extent: Extent) -> Segments:
    """Set the weight version of each computation in the segments of a rank, which have their updates already."""
    rule = extent.weights
    newest = dict.fromkeys(range(extent.num_stages), max(extent.entry_versions))
    unstepped = dict.fromkeys(range(extent.num_stages), 0)  # backwards since the last STEP
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
                version = version_of.get((stage, microbatch))  # None before its forward; the checker reports that
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
    """Remove the weight versions of all computations from the rows; the weight policy implies them."""
    return tuple(tuple(_bare(row)) for row in rows)


def _bare(row: Row) -> Iterator[Instruction]:
    for each in row:
        yield Instruction(each.kind, each.stage, each.microbatch, peer=each.peer) if each.kind.is_computation else each


def add_predictions(segments: Segments, rank: int, extent: Extent) -> Segments:
    """Add a prediction at the end of each batch's segment, on a rank with one stage.

    The segments have their chains and STEPs already. A batch's chain moves behind the prediction from that batch.
    """
    (stage,) = extent.stages_of(rank)
    result = list(segments)
    for index, segment in enumerate(segments[: len(extent.batches)]):
        batch = extent.first_batch + index
        chain = [each for each in segment if each.kind in REDUCTIONS and each.version == batch + 1]
        before = [each for each in segment if each not in chain]
        predict = Instruction(extent.weights.maker, stage, version=batch + 1)
        result[index] = [*_with_partial_gradients(before, stage, batch, extent), predict, *chain]
    return result


def _with_partial_gradients(segment: Segment, stage: int, batch: int, extent: Extent) -> Segment:
    """Add what the prediction at the end of a segment needs: HOLD, and the reductions of partial gradients."""
    num_read = extent.num_read_here(stage, batch)
    of_batch = [each.kind in ENDS_BACKWARD and extent.batch_of(each.microbatch) == batch for each in segment]
    behind: dict[int, list[Kind]] = {}  # number of backwards done -> words that follow
    if extent.reduce_partial or 0 < num_read < sum(of_batch):
        behind[num_read] = [Kind.HOLD]
    if extent.reduce_partial:
        behind[num_read].append(Kind.REDUCE_PARTIAL)
    if extent.reads_ties(stage):
        of_ties = extent.num_read_here(stage, batch, extent.num_read_of_ties(batch))
        behind.setdefault(of_ties, []).append(Kind.REDUCE_PARTIAL_EMBED)
    extended: Segment = []
    num_done = 0
    for each, is_of_batch in zip(segment, of_batch, strict=True):
        extended.append(each)
        if is_of_batch:
            num_done += 1
            extended += [Instruction(kind, stage, version=batch + 1) for kind in behind.get(num_done, ())]
    return extended
