"""How often ranks send, counted in programs."""

import pytest

from megatron.pipeline.placement.traffic import MessageCounts, count_transfers
from megatron.pipeline.schedules import Schedule


def test_figure_4():
    """p=4, m=8: stage 0 evicts three microbatches, and each boundary is crossed by eight."""
    counts = count_transfers(Schedule.preset("bpipe", num_stages=4), 8)
    assert counts == MessageCounts(num_microbatches=8, activations=(8, 8, 8, 0), evictions=(3, 0, 0, 0))
    assert counts.evictors == (0,)


def test_a_batch_that_cannot_run_is_refused():
    """No microbatch."""
    with pytest.raises(ValueError, match="0 microbatches"):
        count_transfers(Schedule.preset("flush", num_stages=4), 0)
