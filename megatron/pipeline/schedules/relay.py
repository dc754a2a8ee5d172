"""The relay: one stage after another, each on the whole batch, so that a rank needs the weights of few stages at once.

L2L (Pudipeddi et al., 2020, section 2.2 and Algorithm 2) turns the two loops of training around: the outer one goes
over stages, up and then down, and the inner one over the microbatches of the batch. One rank with three stages, `a` to
`c`:

    rank 0   Fa0 Fa1 Fb0 Fb1 Fc0 Bc0 Fc1 Bc1 Bb0 Bb1 Ba0 Ba1

On the last stage of the pipeline each backward follows its forward at once, so nothing is recomputed there; all other
stages keep their inputs and recompute.

On several ranks, which the paper does not have, stages are dealt out in turn, and this is `Interleaved` with the whole
batch as one group. So a batch smaller than the pipeline is taken, too: every forward of a rank depends on none of its
backwards but those of its last stage, which wait for nothing that stands behind them. It leaves bubbles, no circle.
"""

from megatron.pipeline.schedules.interleaved import Interleaved


class Relay(Interleaved):
    relays = True

    def validate(self, num_microbatches: int) -> None:
        """Any batch is one full group."""

    def max_in_flight(self, stage: int) -> int | None:
        """A whole batch, but on a rank's last stage: it turns to backwards as soon as the first one comes."""
        chunk, rank = divmod(stage, self.num_ranks)
        return self._ahead(rank, 0) + 1 if chunk == self.num_virtual_stages - 1 else None

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        return self._ahead(rank, 0) + 1 if self.num_virtual_stages == 1 else None

    def recomputes(self, stage: int) -> bool:
        return stage != self.num_stages - 1

    # --- parts

    def _group_of(self, batch: range) -> int:
        return len(batch)
