"""The relay order: each stage takes the whole batch, so a rank needs the weights of only a few stages at once.

L2L (Pudipeddi et al., 2020, section 2.2 and Algorithm 2) swaps the two loops of training. The outer loop goes over the
stages, up and then down, and the inner loop goes over the microbatches of the batch. On one rank with three stages, `a`
to `c`:

    rank 0   Fa0 Fa1 Fb0 Fb1 Fc0 Bc0 Fc1 Bc1 Bb0 Bb1 Ba0 Ba1

On the last stage of the pipeline each backward directly follows its forward, so nothing is recomputed there. All other
stages keep their inputs and recompute.

The paper has one rank. On several ranks, stages are dealt out in turn, and the order is `Interleaved` with the whole
batch as one group. The batch may be smaller than the number of ranks. Such a batch leaves bubbles but no deadlock: the
only backwards that stand before a forward of the rank are those of its last stage, and these wait for no instruction
behind them.
"""

from megatron.pipeline.schedules.interleaved import Interleaved


class Relay(Interleaved):
    relays = True

    def validate(self, num_microbatches: int) -> None:
        """Accept any batch: a batch is one full group."""

    def max_in_flight(self, stage: int) -> int | None:
        """Return None (a whole batch), except for the last stage of a rank, which alternates forwards and backwards."""
        chunk, rank = divmod(stage, self.num_ranks)
        return self._ahead(rank, 0) + 1 if chunk == self.num_virtual_stages - 1 else None

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        return self._ahead(rank, 0) + 1 if self.num_virtual_stages == 1 else None

    def recomputes(self, stage: int) -> bool:
        return stage != self.num_stages - 1

    # --- parts

    def _group_of(self, batch: range) -> int:
        return len(batch)
