"""How fast ranks reach each other, by where they sit."""

import pytest

from megatron.placement.degrees import Degrees
from megatron.placement.mapping import pair_adjacent, standard
from megatron.placement.topology import Bandwidth, Node, Topology
from megatron.planner.time.links import Links

GB = 1e9


def links(nodes: int, *, tensor: int = 1, pipeline: int = 1, data: int = 1, mapping=standard) -> Links:
    degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data)
    topology = Topology(
        nodes=tuple(Node(name=f"node{index}", gpus=8) for index in range(nodes)),
        bandwidth=Bandwidth(within_node=300.0, between_nodes=100.0),
    )
    return Links(degrees, mapping(degrees), topology)


def test_within_a_node_all_is_fast():
    found = links(1, tensor=2, pipeline=4)
    assert (found.tensor, found.data, found.edges, found.pairs) == (300 * GB, 300 * GB, [300 * GB] * 4, [300 * GB] * 4)


@pytest.mark.parametrize(("tensor", "data", "share"), [(1, 64, 100), (2, 32, 50), (4, 16, 25), (8, 8, 12.5)])
def test_replicas_share_the_node_with_other_groups(tensor, data, share):
    """8 nodes: as many groups cross each node as it has tensor ranks; each has a ring of its own."""
    assert links(8, tensor=tensor, data=data).data == share * GB


def test_tensor_ranks_on_two_nodes():
    assert links(2, tensor=16).tensor == 100 * GB


def test_only_edges_that_cross_are_slow():
    """t=1, d=2, 8 stages on 2 nodes: of 4 stages on a node the last one's two ranks send to the next node."""
    assert links(2, pipeline=8, data=2).edges == [300 * GB] * 3 + [50 * GB] + [300 * GB] * 3 + [50 * GB]


def test_stages_that_fill_a_node_all_send_at_once():
    assert links(4, tensor=8, pipeline=4).edges == [12.5 * GB] * 4


def test_pair_adjacent_keeps_pairs_together():
    """BPipe, section 3.5: 8 stages of 4 ranks on 4 nodes."""
    assert set(links(4, tensor=4, pipeline=8, mapping=pair_adjacent).pairs) == {300 * GB}
    assert set(links(4, tensor=4, pipeline=8).pairs) == {12.5 * GB}
