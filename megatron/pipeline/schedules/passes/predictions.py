"""Predict the weights of the batch to come.

PREDICT@t stands where a stage is about to begin batch t: behind STEP@(t-1), whose weights it starts from, before the
first forward of batch t, and also where the run drains instead, so that both compute the same. It reads the gradients
of those microbatches of batch t-1 that are done at the stage. Three things follow:

- Where more are done than it may read, because all stages shall read as many, HOLD keeps the gradients as they are
  after those that it reads.
- Where all are done (the last stage), the chain that reduces them in place waits until PREDICT has read them.
- What stages or replicas add up before they predict is reduced in the chain: REDUCE_PARTIAL, the sums that are kept,
  over the replicas; REDUCE_PARTIAL_EMBED, of tied embeddings, over the two stages (and over the replicas, where that is
  wanted): it keeps and reads as many microbatches as both stages have done, so that their copies stay equal.
"""

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import ENDS_BACKWARD, REDUCTIONS, Instruction, Kind
from megatron.pipeline.schedules.passes import Segment, Segments


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
