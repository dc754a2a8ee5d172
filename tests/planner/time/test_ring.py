"""The time of a collective that goes round its members."""

import pytest

from megatron.planner.time.links import Ring

NODE = Ring(size=8, num_nodes=1, rate=225e9)


def test_large_buffers_take_the_bandwidth():
    """7 of 8 parts at the link's rate; the steps are lost in it."""
    assert NODE.seconds(10e9) == pytest.approx(7 / 8 * 10e9 / 225e9, rel=1e-3)


def test_small_ones_take_the_steps():
    """A byte on 8 GPUs of a node: 7 steps of 1.9 microseconds and 14 at once, as NCCL counts its protocol LL128, or
    what the simple protocol takes if that is less."""
    assert NODE.seconds(8) == pytest.approx(1e-6 * min(14.0 + 7 * 1.9, 8.4 + 7 * 3.4), rel=1e-3)


def test_steps_between_nodes():
    """1,536 members on 192 nodes: 191 steps over the network, the others within nodes."""
    wide = Ring(size=1536, num_nodes=192, rate=160e9)
    assert wide.seconds(1) == pytest.approx(1e-6 * (14.0 + 1344 * 1.9 + 191 * 4.0), rel=1e-3)
    assert Ring(size=1536, num_nodes=192, rate=160e9, has_nvlink=False).seconds(1) > wide.seconds(1)


def test_collectives_add_up():
    """The bytes stay, and each has its steps."""
    assert NODE.seconds(10e9, collectives=4) - NODE.seconds(10e9) == pytest.approx(3e-6 * (8.4 + 7 * 3.4))


def test_one_member_sends_nothing():
    assert Ring(size=1, num_nodes=1, rate=1e9).seconds(1e9) == 0 and NODE.seconds(0) == 0


def test_more_of_anything_takes_no_less():
    sizes = [Ring(size=8 * nodes, num_nodes=nodes, rate=100e9).seconds(1e8) for nodes in (2, 8, 64, 512)]
    assert sizes == sorted(sizes)
    assert [NODE.seconds(size) for size in (1e6, 1e7, 1e8)] == sorted(NODE.seconds(size) for size in (1e6, 1e7, 1e8))
