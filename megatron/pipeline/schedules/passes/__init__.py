"""From the order of computations to a complete program, one concern a pass.

A pass reads and returns the row of one rank, cut into *segments*: what the rank does between the first forward of a
batch and the first forward of the next one, and at last what remains for the drain. `extent` is what the
program to be spans: its batches, weight policy and chain.

    balance         the moves of saved activations between pairs of ranks; this one takes all ranks at once
    recompute       an R before each backward
    updates         the reductions after each batch, and the STEPs
    residency       where weights live on the host: what brings those of each stage to the device in time
    stash           and where inputs wait there, too: what takes them there and back
    host_updates    and, in place of updates, what takes its gradients to the host and makes the next version there
    versions        the weight version of each computation
    communication   the transfers between ranks; this one, too
"""

from megatron.pipeline.program.instruction import Instruction

Segment = list[Instruction]
Segments = list[Segment]  # of one rank: one for each batch, then the drain
