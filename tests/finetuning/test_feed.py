"""What a microbatch's loss weighs in its batch, by how many terms it has."""

import torch

from megatron.finetuning.data.rows import Rows
from megatron.finetuning.feed import Feed
from megatron.pipeline.runtime.contract.stage import Microbatch


def test_microbatches_weigh_by_their_terms():
    """Two batches in flight; equal microbatches weigh 1 to the last bit, and so does a whole batch."""
    rows = Rows({"labels": torch.zeros(6, 1)}, ignored={}, num_terms=torch.tensor([1, 2, 3, 4, 5, 7]))
    feed = Feed(rows, size=2, seed=1)
    feed.add(3, 10, [(0, 3), (5, 3), (2,)])
    feed.add(4, 13, [(3, 0), (1, 2), (4,)])

    def weight(batch, position):
        return feed(Microbatch(7 + 3 * (batch - 2) + position, batch, position, 3)).weight

    assert [weight(3, position) for position in range(3)] == [3 * 5 / 19, 3 * 11 / 19, 3 * 3 / 19]
    assert [weight(4, position) for position in range(3)] == [1.0, 1.0, 1.0]
    assert [feed.counts(3, number) for number in (1, 2, 3)] == [3 * 5 / 19, 3 * 16 / 19, 3.0]
    feed.forget(4, 13)
    assert feed.counts(4, 2) == 2.0 and weight(4, 1) == 1.0
