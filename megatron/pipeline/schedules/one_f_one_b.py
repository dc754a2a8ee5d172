"""The orders GPipe and 1F1B.

GPipe: all forwards of a batch, then all of its backwards (Huang et al., 2019; PipeDream-2BW, Figures 1a and 3).

    stage 0   F0 F1 F2 F3  .     .  B0    B1    B2    B3
    stage 1    . F0 F1 F2 F3 B0    B1    B2    B3

The backwards run in ascending order, so gradients are summed in the same order as under 1F1B. A stage saves the
activations of a whole batch.

1F1B: some forwards ahead, then one forward and one backward in turn (PipeDream; PipeDream-2BW, Figures 2 and 3).

    stage 0   F0 F1 F2  .  .     B0 F3    B1 ...
    stage 1    . F0 F1  .  B0    F2 B1    F3 ...
    stage 2    .  . F0 B0  F1 B1    F2 B2    ...

Stage s is p-s-1 forwards ahead, because the first gradient needs that long to come back from the last stage. So stage s
saves the activations of p-s microbatches. If the stages are no chain, a stage is as many forwards ahead as its depth,
the number of edges from it to the end. The turns go on across the borders of batches. With `extra_warmup` a stage is
twice as many forwards ahead. Then gradients may come later, which hides the time of transfers, and stage s of a chain
saves 2(p-s)-1 microbatches.
"""

from collections.abc import Sequence

from megatron.pipeline.schedules.order import Order, backward, forward, in_turns
from megatron.pipeline.schedules.passes import Segments


class GPipe(Order):
    drains = True
    follows_edges = True

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        forwards = [[forward(stage, microbatch) for microbatch in batch] for batch in batches]
        backwards = [[backward(stage, microbatch) for microbatch in batch] for batch in batches]
        return [*map(list.__add__, forwards, backwards), []]

    def max_in_flight(self, stage: int) -> int | None:
        return None


class OneForwardOneBackward(Order):
    extends_warmup = True
    follows_edges = True

    def segments(self, stage: int, batches: Sequence[range]) -> Segments:
        return in_turns(stage, batches, (forward, 0), (backward, self._ahead(stage)))

    def max_in_flight(self, stage: int) -> int | None:
        return self._ahead(stage) + 1

    def _ahead(self, stage: int) -> int:
        """Return how many forwards a stage is ahead; one more forward stands directly before its first backward."""
        return self.graph.depth(stage) * (2 if self.extra_warmup else 1)
