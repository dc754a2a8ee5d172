"""How fast ranks reach each other, by where they sit."""

import pytest

from megatron.pipeline.placement.mapping import Degrees, pair_adjacent, standard
from megatron.pipeline.placement.topology import Bandwidth, Node, Topology
from megatron.planner.memory.architecture import ExpertDegrees, Experts
from megatron.planner.time.links import Links

GB = 1e9


def links(
    nodes: int, *, tensor: int = 1, pipeline: int = 1, data: int = 1, mapping=standard, **shares: object
) -> Links:
    degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data)
    topology = Topology(
        nodes=tuple(Node(name=f"node{index}", gpus=8) for index in range(nodes)),
        bandwidth=Bandwidth(within_node=300.0, between_nodes=100.0),
    )
    return Links(degrees, mapping(degrees), topology, **shares)


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


@pytest.mark.parametrize(
    ("tensor", "context", "rate"),
    [
        (2, 4, 300),  # 8 ranks, a node
        (4, 4, 25),  # 2 ranks of each ring on a node, and 4 rings between the same nodes
        (1, 16, 100),  # one ring round two nodes
        (8, 2, 12.5),  # every GPU sends to the next node
    ],
)
def test_context_parallel_ranks_lie_behind_tensor_ranks(tensor, context, rate):
    found = links(4, tensor=tensor, data=32 // tensor, context=context)
    assert found.context == rate * GB


@pytest.mark.parametrize(
    ("expert", "expert_tensor", "rate"),
    [
        (1, 1, 300), (8, 1, 300), (4, 2, 300),
        (16, 1, 100 / 8 * 15 / 8),  # 8 of 15 others are on the other node
        (32, 1, 100 / 8 * 31 / 24),
        (8, 4, 100 / 8 * 7 / 6),  # 2 on each of 4 nodes
    ],
)  # fmt: skip
def test_what_goes_to_experts_on_other_nodes_crosses(expert, expert_tensor, rate):
    """All GPUs of a node send at once; t is 2, which only `expert_tensor` may change."""
    degrees = ExpertDegrees(parallel=expert, tensor=expert_tensor)
    found = links(4, tensor=2, data=16, experts=degrees)
    assert found.expert == pytest.approx(rate * GB)
    assert found.expert_tensor == 300 * GB


def test_less_crosses_where_a_token_goes_to_a_node_once():
    """16 experts, 2 for a token, on 16 ranks of 2 nodes: a token goes to 2 ranks, and to 2 * 8 / 15 + 7 / 15 nodes, of
    each of which half is its own; with a copy for each expert 8 of 15 cross."""
    experts = Experts(count=16, topk=2, ffn_hidden_size=64)
    found = links(4, tensor=2, data=16, experts=ExpertDegrees(parallel=16, tensor=1), reached=experts.reached)
    nodes = 2 * 8 / 15 + 7 / 15
    assert found.expert == pytest.approx(100 / 8 * GB * (2 * 15 / 16) / (nodes / 2))
    one = links(4, tensor=2, data=16, experts=ExpertDegrees(parallel=8, tensor=1), reached=experts.reached)
    assert one.expert == 300 * GB


def test_replicas_of_experts_are_further_apart_than_those_of_the_rest():
    """32 ranks on 4 nodes, t=1: all are replicas, and with 8 experts apart one rank of each node, beside 7 such rings;
    with 2 apart two rings cross each node.
    """
    assert links(4, data=32, experts=ExpertDegrees(parallel=8)).expert_data == 12.5 * GB
    assert links(4, data=32, experts=ExpertDegrees(parallel=2)).expert_data == 50 * GB
    assert links(4, data=32, experts=ExpertDegrees()).expert_data == links(4, data=32).data == 100 * GB
