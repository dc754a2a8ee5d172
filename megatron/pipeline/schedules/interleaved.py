"""Interleaved 1F1B, and the relay, which is interleaved by whole batches.

Interleaved 1F1B: several stages on each rank, so that the pipeline fills and drains in smaller steps.

Problem: the first forward of a rank waits until the microbatch has passed all ranks before it, each with its whole
share of the model.

Solution: cut every share into v chunks and deal them out in turn, so that chunk c of rank r is stage c*p + r. Then the
first forward waits for one chunk of each rank. The bubble shrinks v-fold to (p-1)(f+b)/v, with f and b for the whole
share of a rank. The price is v times as many transfers, and more saved activations. This is the order of Megatron-LM
(Narayanan et al., 2021, section 2.2). It equals `forward_backward_pipelining_with_interleaving` of `megatron.core`,
instruction for instruction. On two ranks with two chunks each, called `a` and `b`:

    rank 0   Fa0 Fa1 Fb0 Fb1   .     Fa2 Bb0  Fa3 Bb1  Fb2 Ba0  Fb3 Ba1  Bb2 Bb3 Ba2 Ba3
    rank 1    .  Fa0 Fa1 Fb0  Bb0    Fb1 Bb1  Fa2 Ba0  Fa3 Ba1  Fb2 Bb2  Fb3 Bb3 Ba2 Ba3

A rank takes microbatches in groups, by default of p microbatches. It takes a group through its first chunk, then
through its next chunk, and after the last chunk it begins the next group. Backwards run in the same order with the
chunks reversed. Rank r is 2(p-r-1) + (v-1)*group forwards ahead, or all forwards of the batch if these are fewer. With
one chunk on each rank this is 1F1B.

The relay order: each stage takes the whole batch, so a rank needs the weights of only a few stages at once.

L2L (Pudipeddi et al., 2020, section 2.2 and Algorithm 2) swaps the two loops of training. The outer loop goes over the
stages, up and then down, and the inner loop goes over the microbatches of the batch. On one rank with three stages, `a`
to `c`:

    rank 0   Fa0 Fa1 Fb0 Fb1 Fc0 Bc0 Fc1 Bc1 Bb0 Bb1 Ba0 Ba1

On the last stage of the pipeline each backward directly follows its forward, so nothing is recomputed there. All other
stages keep their inputs and recompute.

The stages of a frozen prefix have only forwards, and the last stage of each rank is trained.

The paper has one rank. On several ranks, stages are dealt out in turn, and the order is `Interleaved` with the whole
batch as one group. The batch may be smaller than the number of ranks. Such a batch leaves bubbles but no deadlock: the
only backwards that stand before a forward of the rank are those of its last stage, and these wait for no instruction
behind them.
"""

from collections.abc import Sequence
from typing import ClassVar

from megatron.pipeline.program.edges import round_robin
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules.order import Order, backward, forward
from megatron.pipeline.schedules.passes import Segment, Segments


class Interleaved(Order):
    drains = True
    interleaves = True
    name: ClassVar[str] = "interleaved"

    def segments(self, rank: int, batches: Sequence[range]) -> Segments:
        return [*(self._segment(rank, batch) for batch in batches), []]

    def validate_placement(self) -> None:
        if self.rank_of_stage != round_robin(self.num_ranks, self.num_virtual_stages):
            raise ValueError(
                f"{self.name} takes stages that are dealt out in turn, not {self.rank_of_stage}; drop rank_of_stage"
            )

    def validate(self, num_microbatches: int) -> None:
        """Raise ValueError unless a batch has a full group, and its last group is full or has at least p microbatches.

        This is Megatron's rule. A smaller last group would leave bubbles inside the batch, and this order exists to
        avoid bubbles.
        """
        if self.num_virtual_stages == 1:
            return
        group, rest = self._group_size, num_microbatches % self._group_size
        if num_microbatches >= group and (rest == 0 or rest >= self.num_ranks):
            return
        or_more = f", or so that {self.num_ranks} and more are left over" if group > self.num_ranks else ""
        raise ValueError(
            f"{self.name} takes microbatches in groups of {group}, which {num_microbatches} microbatches do not fill; "
            f"make the batch a multiple of {group}{or_more}, or use flush"
        )

    def max_in_flight(self, stage: int) -> int:
        """Return the largest number of microbatches in flight at a stage.

        The maximum is reached at the end of a group of the stage's forwards. During a group the stage runs at least as
        many forwards as backwards, and between its groups it runs no forwards. The last group of a batch may be
        smaller, so all group sizes are considered.
        """
        sizes = range(self.num_ranks, self._group_size + 1)
        return max(self._in_flight_after_group(stage, size) for size in sizes)

    def max_in_flight_on_rank(self, rank: int) -> int:
        return self._held(rank) + 1

    # --- parts

    @property
    def _group_size(self) -> int:
        return self.microbatch_group_size or self.num_ranks

    def _group_of(self, batch: range) -> int:
        """Return how many microbatches a rank takes through one of its stages before it turns to the next."""
        return self._group_size

    def _ahead(self, rank: int, group: int) -> int:
        """Return how many forwards a rank is ahead in a long batch with groups of size `group`.

        The rank runs one more forward directly before its first backward.
        """
        ranks_after = self.num_ranks - rank - 1
        if self.num_virtual_stages == 1:
            return ranks_after
        return 2 * ranks_after + (self.num_virtual_stages - 1) * group

    def _held(self, rank: int) -> int:
        """Return how many more forwards than backwards a rank has ended in a long batch, before a forward."""
        return self._ahead(rank, self._group_size)

    def _in_flight_after_group(self, stage: int, size: int) -> int:
        """Return how many microbatches a stage has in flight late in a long batch, when a group of forwards has ended.

        `size` is the size of this last group. Forwards and backwards of the rank are counted from the start of the
        group's round over the chunks. The rank is `_held` forwards ahead, and the backward that is due after the newest
        forward has not run yet. In each round of backwards, the stage has one group, after the groups of the chunks
        above its own. A negative number of backwards means that backwards of earlier rounds remain; the groups of
        these rounds are full.
        """
        chunk, rank = divmod(stage, self.num_ranks)
        num_backwards = (chunk + 1) * size - 1 - self._held(rank)
        group = size if num_backwards >= 0 else self._group_size
        chunks_above = self.num_virtual_stages - 1 - chunk
        num_rounds, begun = divmod(num_backwards - chunks_above * group, self.num_virtual_stages * group)
        return size - (num_rounds * group + min(begun, group))

    def _segment(self, rank: int, batch: range) -> Segment:
        size = self._group_of(batch)
        turns = self._turns(batch, size)
        last = self.num_virtual_stages - 1
        forwards = [forward(chunk * self.num_ranks + rank, microbatch) for chunk, microbatch in turns]
        backwards = [backward((last - chunk) * self.num_ranks + rank, microbatch) for chunk, microbatch in turns]
        ahead = min(self._ahead(rank, size), len(turns))
        num_pairs = len(turns) - ahead
        pairs = zip(forwards[ahead:], backwards[:num_pairs], strict=True)
        return [*forwards[:ahead], *(each for pair in pairs for each in pair), *backwards[num_pairs:]]

    def _turns(self, batch: range, size: int) -> list[tuple[int, int]]:
        """Return (chunk, microbatch) of a rank's forwards in their order, for groups of `size` microbatches."""
        groups = [batch[start : start + size] for start in range(0, len(batch), size)]
        chunks = range(self.num_virtual_stages)
        return [(chunk, microbatch) for group in groups for chunk in chunks for microbatch in group]


class Relay(Interleaved):
    relays = True
    name = "relay"

    def validate_placement(self) -> None:
        """Raise ValueError for stages that are not dealt out in turn, and for a rank with only frozen stages."""
        super().validate_placement()
        most = self.num_stages - self.num_ranks
        if self.graph.num_frozen > most:
            raise ValueError(
                f"{self.name} has a trained stage on each of {self.num_ranks} ranks, and {self.graph.num_frozen} of "
                f"{self.num_stages} stages are frozen; freeze {most} at most"
            )

    def validate(self, num_microbatches: int) -> None:
        """Accept any batch: a batch is one full group."""

    def max_in_flight(self, stage: int) -> int | None:
        """Return None (a whole batch), except for a rank's last stage and for a frozen stage.

        The last stage of a rank alternates forwards and backwards. A frozen stage has no microbatch in flight.
        """
        if stage < self.graph.num_frozen:
            return 0
        chunk, rank = divmod(stage, self.num_ranks)
        return self._ahead(rank, 0) + 1 if chunk == self.num_virtual_stages - 1 else None

    def max_in_flight_on_rank(self, rank: int) -> int | None:
        return self._ahead(rank, 0) + 1 if self.num_virtual_stages == 1 else None

    def recomputes(self, stage: int) -> bool:
        return self.graph.num_frozen <= stage < self.num_stages - 1

    # --- parts

    def _segment(self, rank: int, batch: range) -> Segment:
        first = self.graph.num_frozen
        return [each for each in super()._segment(rank, batch) if each.kind is Kind.FORWARD or each.stage >= first]

    def _group_of(self, batch: range) -> int:
        return len(batch)
