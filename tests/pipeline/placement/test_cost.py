"""Costs against sums by hand."""

import pytest

from megatron.pipeline.placement.cost import NOTHING, Level, placement_cost
from megatron.pipeline.placement.mapping import Degrees, pair_adjacent, standard
from megatron.pipeline.placement.traffic import Traffic, TrafficKind
from tests.pipeline.placement.examples import machine, traffic_of

WITHIN, BETWEEN = Level.WITHIN_NODE, Level.BETWEEN_NODES


def only(num_stages: int, **bytes_by_kind) -> Traffic:
    nothing = (0.0,) * num_stages
    return Traffic(
        **{"pipeline": nothing, "pair": nothing, "data": nothing, "tensor": nothing, "embedding": 0.0, **bytes_by_kind}
    )


def test_pairs_of_figure_5():
    """16 stages that each evict 6 GB: under standard all cross, 7 from each node; pair-adjacent keeps them inside."""
    degrees, topology = Degrees(tensor=1, pipeline=16, data=1), machine(8, 8)
    traffic = only(16, pair=(6e9,) * 7 + (0.0,) * 9)
    crossing = placement_cost(standard(degrees), degrees, traffic, topology)
    assert crossing.at(TrafficKind.PAIR, WITHIN) == NOTHING
    found = crossing.at(TrafficKind.PAIR, BETWEEN)
    assert (found.num_transfers, found.total_bytes) == (14, 84e9)
    assert found.busiest_seconds == pytest.approx(7 * 6 / 100)
    assert found.total_seconds == crossing.total_seconds == pytest.approx(14 * 6 / 12.5)
    inside = placement_cost(pair_adjacent(degrees), degrees, traffic, topology)
    assert inside.at(TrafficKind.PAIR, BETWEEN) == NOTHING
    assert inside.at(TrafficKind.PAIR, WITHIN).busiest_seconds == pytest.approx(6 / 300)
    assert inside.total_seconds == pytest.approx(14 * 6 / 300)


def test_pipeline_edges():
    """Four stages on two nodes of two: the edge in the middle crosses, both ways."""
    degrees = Degrees(tensor=1, pipeline=4, data=1)
    cost = placement_cost(standard(degrees), degrees, only(4, pipeline=(3e9,) * 3 + (0.0,)), machine(2, 2))
    assert (
        cost.at(TrafficKind.PIPELINE, WITHIN).num_transfers,
        cost.at(TrafficKind.PIPELINE, BETWEEN).num_transfers,
    ) == (4, 2)
    assert cost.at(TrafficKind.PIPELINE, WITHIN).busiest_seconds == pytest.approx(3 / 300)
    assert cost.at(TrafficKind.PIPELINE, BETWEEN).busiest_seconds == pytest.approx(3 / 100)
    assert cost.total_seconds == pytest.approx(4 * 3 / 300 + 2 * 3 / 50)


def test_last_rank_sends_to_the_first():
    """Several stages on each rank: the edge from rank 3 to rank 0 crosses too, both ways."""
    degrees = Degrees(tensor=1, pipeline=4, data=1)
    cost = placement_cost(standard(degrees), degrees, only(4, pipeline=(3e9,) * 3 + (2e9,)), machine(2, 2))
    found = cost.at(TrafficKind.PIPELINE, BETWEEN)
    assert (found.num_transfers, found.total_bytes) == (4, 2 * (3e9 + 2e9))


def test_ring_enters_and_leaves_a_node_once():
    """Eight replicas of one stage on two nodes: each sends 2 x 7/8 of the bytes, one from each node to the other."""
    degrees = Degrees(tensor=1, pipeline=1, data=8)
    mapping = (0, 2, 4, 6, 1, 3, 5, 7)  # the order of ranks would cross eight times
    cost = placement_cost(mapping, degrees, only(1, data=(8e9,)), machine(4, 4))
    assert cost.at(TrafficKind.DATA, WITHIN).num_transfers == 6
    between = cost.at(TrafficKind.DATA, BETWEEN)
    assert (between.num_transfers, between.total_bytes) == (2, pytest.approx(28e9))
    assert between.busiest_seconds == pytest.approx(14 / 100)


def test_tensor_and_embedding():
    """t=2 across nodes of one GPU; the embedding goes between first and last stage in one exchange."""
    degrees = Degrees(tensor=2, pipeline=2, data=1)
    traffic = only(2, tensor=(5e9, 7e9), embedding=2e9)
    cost = placement_cost(standard(degrees), degrees, traffic, machine(1, 1, 1, 1))
    assert cost.at(TrafficKind.TENSOR, BETWEEN).busiest_seconds == pytest.approx(7 / 100)
    assert cost.at(TrafficKind.EMBEDDING, BETWEEN).total_bytes == 4 * 2e9
    one_node = placement_cost(standard(degrees), degrees, traffic, machine(4))
    assert one_node.at(TrafficKind.TENSOR, WITHIN).total_seconds == pytest.approx((2 * 5 + 2 * 7) / 300)


def test_bytes_do_not_depend_on_the_placement():
    """Where ranks sit decides how bytes travel, not how many there are."""
    degrees, topology = Degrees(tensor=2, pipeline=4, data=3), machine(8, 10, 6)
    traffic = traffic_of(degrees)
    totals = []
    for mapping in (standard(degrees), pair_adjacent(degrees), tuple(reversed(range(24)))):
        cost = placement_cost(mapping, degrees, traffic, topology)
        totals.append([sum(cost.at(kind, level).total_bytes for level in Level) for kind in TrafficKind])
    assert totals[1] == pytest.approx(totals[0])
    assert totals[2] == pytest.approx(totals[0])
    assert all(total > 0 for total in totals[0])
