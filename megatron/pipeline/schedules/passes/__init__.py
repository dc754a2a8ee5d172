"""The passes from an order of computations to a complete program, one pass for each concern.

A pass reads and returns the row of one rank, cut into *segments*. A segment reaches from the first forward of a batch
to just before the first forward of the next batch. The last segment is the drain. `extent` is the extent of the program
to be made: its batches, its weight policy and its update chain. `communication` and the moves of activations take
the rows of all ranks at once.

    activations     adds the moves of saved activations between pairs of ranks, and an R before each backward
    updates         adds the reductions after each batch, and the STEPs
    residency       with weights on the host: adds FETCH and FREE, which bring the weights of each stage in time
    stash           with inputs on the host: adds OFFLOAD and RELOAD, which copy inputs to the host and back
    host_updates    with weights on the host, in place of updates: adds reductions, STORE_GRAD, STEP and UPDATE
    predictions     adds PREDICT, HOLD and the reductions of partial gradients
    versions        sets the weight version of each computation
    communication   adds the transfers between ranks
"""

from megatron.pipeline.program.instruction import Instruction

Segment = list[Instruction]
Segments = list[Segment]  # the row of one rank: a segment for each batch, then the drain
