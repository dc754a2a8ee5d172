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

from megatron.pipeline.instruction import ENDS_BACKWARD, REDUCTIONS, Instruction, Kind
from megatron.pipeline.passes import Leg, Legs
from megatron.pipeline.program import Program


def add_predictions(legs: Legs, rank: int, outline: Program) -> Legs:
    """The legs of a rank, which hold their chains and STEPs, with a prediction at the end of each batch's own leg."""
    result = list(legs)
    for index, leg in enumerate(legs[: len(outline.batches)]):
        batch = outline.first_batch + index
        chain = [each for each in leg if each.kind in REDUCTIONS and each.version == batch + 1]
        predict = Instruction(Kind.PREDICT, outline.stages_of(rank)[0], version=batch + 1)
        before = [each for each in leg if each not in chain]
        result[index] = [*_with_partial_gradients(before, rank, batch, outline), predict, *chain]
    return result


def _with_partial_gradients(leg: Leg, rank: int, batch: int, outline: Program) -> Leg:
    """A leg with what a prediction needs before it: kept gradients, and their reductions."""
    version, stages = batch + 1, outline.stages_of(rank)
    backwards = [
        position
        for position, each in enumerate(leg)
        if each.kind in ENDS_BACKWARD and outline.batch_of(each.microbatch) == batch
    ]
    at_stage = {stage: [place for place in backwards if leg[place].stage == stage] for stage in stages}
    behind: dict[int, Leg] = {}  # position in the leg -> what follows it
    for stage in stages:
        num_read = outline.num_read(stage, batch)
        if outline.reduce_partial or num_read < len(at_stage[stage]):
            hold = Instruction(Kind.HOLD, stage, version=version)
            behind.setdefault(at_stage[stage][num_read - 1], []).append(hold)
    if outline.reduce_partial:
        last = max(behind)
        behind[last].append(Instruction(Kind.REDUCE_PARTIAL, stages[0], version=version))
    if reads_ties(outline, rank):
        num_read = outline.num_read_of_ties(batch)
        end = max(at_stage[stage][num_read - 1] for stage in stages if stage in (0, outline.num_stages - 1))
        behind.setdefault(end, []).append(Instruction(Kind.REDUCE_PARTIAL_EMBED, stages[0], version=version))
    return [each for position, read in enumerate(leg) for each in (read, *behind.get(position, ()))]


def reads_ties(outline: Program, rank: int) -> bool:
    """Whether a rank's predictions read a gradient of tied embeddings that another rank has a part of."""
    last = outline.num_stages - 1
    return outline.tied_embeddings and outline.crosses(0, last) and bool({0, last} & set(outline.stages_of(rank)))
