"""What is said about pairs: crossing, bandwidth needed (BPipe, appendix B, equations 7 to 12) and had."""

from dataclasses import replace

import pytest

from megatron.pipeline.placement.cost import (
    describe_crossing,
    describe_need,
    fits_under_forward,
    pair_transfers,
    required_bandwidth,
    required_steady_bandwidth,
)
from megatron.pipeline.placement.mapping import Degrees, pair_adjacent, standard
from tests.pipeline.placement.examples import gpt3_96b, machine


def evictors(degrees):
    """Section 3.3: p >= 4 and s <= (p-4)/2."""
    return range(max(0, (degrees.pipeline - 4) // 2 + 1))


def transfers(mapping, degrees, topology, **shape):
    cut = gpt3_96b(tensor=degrees.tensor, pipeline=degrees.pipeline, **{"micro_batch_size": 2, **shape})
    return pair_transfers(mapping, degrees, topology, cut.moved_bytes, evictors(degrees))


def test_fastest_configuration_of_the_paper_fits():
    """GPT-3 96B, t=4, p=8, b=2 under pair-adjacent: NVLink's 300 GB/s against the 24.25 GB/s of appendix B, and what
    the first stage has besides, a mask of the embedding's dropout."""
    degrees = Degrees(tensor=4, pipeline=8, data=1)
    found = transfers(pair_adjacent(degrees), degrees, machine(8, 8, 8, 8))
    assert [(each.evictor, each.acceptor, each.crosses, each.bandwidth) for each in found] == [
        (0, 7, False, 300.0), (1, 6, False, 300.0), (2, 5, False, 300.0),
    ]  # fmt: skip
    assert fits_under_forward(found, 0.14337)
    text = describe_need(found, forward_seconds=0.14337)
    assert "(3.49 GB) between stages 0 and 7 goes at 300 GB/s within a node" in text
    assert "needs 24.32 GB/s (16.21 GB/s" in text and text.endswith("it fits")
    text = describe_need(found[1:], forward_seconds=0.14337)
    assert "(3.48 GB) between stages 1 and 6 goes at 300 GB/s within a node" in text
    assert "needs 24.25 GB/s (16.16 GB/s" in text and text.endswith("it fits")
    assert (
        describe_crossing(pair_adjacent(degrees), degrees, [8] * 4, evictors(degrees))
        == "0 of 12 pairs that move activations cross a node"
    )


def test_tensor_parallelism_that_fills_the_node():
    """t=8: every pair crosses, with an eighth of the node's network, 12.5 GB/s, as appendix B counts."""
    degrees = Degrees(tensor=8, pipeline=4, data=1)
    found = transfers(pair_adjacent(degrees), degrees, machine(8, 8, 8, 8))
    assert [(each.crosses, each.bandwidth) for each in found] == [(True, 12.5)]
    assert not fits_under_forward(found, 0.14337)
    assert describe_need(found, forward_seconds=0.14337).endswith("too slow")
    relaxed = describe_need(found, forward_seconds=0.2)
    assert "12.5 GB/s between nodes" in relaxed and relaxed.endswith("only the latter fits")
    assert describe_need(found, forward_seconds=None).endswith("it is hidden if a forward takes as long")
    crossing = describe_crossing(pair_adjacent(degrees), degrees, [8] * 4, evictors(degrees))
    assert crossing == (
        "8 of 8 pairs that move activations cross a node, for tensor parallel size 8 fills a node of 8 GPUs"
    )


def test_crossing_pairs_share_the_network():
    """Standard, 16 stages on two nodes: seven pairs move activations, so each has a seventh of 100 GB/s."""
    degrees = Degrees(tensor=1, pipeline=16, data=1)
    found = transfers(standard(degrees), degrees, machine(8, 8))
    assert [each.bandwidth for each in found] == [pytest.approx(100 / 7)] * 7
    assert found[0].seconds == pytest.approx(found[0].num_bytes / (100e9 / 7))


def test_nothing_to_balance():
    """No evictor: said, and no transfer."""
    degrees = Degrees(tensor=1, pipeline=3, data=1)
    assert transfers(standard(degrees), degrees, machine(3)) == []
    assert describe_crossing(standard(degrees), degrees, [3], ()) == "no pair has activations to move"


def test_several_stages_on_a_rank():
    """A microbatch moves at each stage on its own: half the layers' bytes under half the forward, so the need is the
    same but for the embedding's mask."""
    degrees, mask = Degrees(tensor=8, pipeline=4, data=1), 2 * 2048 * 9984 / 8
    (whole,) = transfers(pair_adjacent(degrees), degrees, machine(8, 8, 8, 8))
    interleaved = {"num_virtual_stages": 2, "schedule": "interleaved", "balance": True}
    (half,) = transfers(pair_adjacent(degrees), degrees, machine(8, 8, 8, 8), **interleaved)
    assert half.num_bytes - mask == pytest.approx((whole.num_bytes - mask) / 2)
    assert half.seconds == pytest.approx(half.num_bytes / 12.5e9)
    bare = replace(half, num_bytes=half.num_bytes - mask)
    assert "needs 24.25 GB/s" in describe_need([bare], forward_seconds=0.14337 / 2)


def test_equations_by_hand():
    """Equations 7 to 9, and 10 to 12: two thirds of them. A time is positive."""
    assert required_bandwidth(3e9, forward_seconds=2.0) == pytest.approx(1.5)
    assert required_steady_bandwidth(3e9, forward_seconds=2.0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="0 is not positive"):
        required_bandwidth(3e9, forward_seconds=0)
