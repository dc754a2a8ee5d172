"""What State adds and takes away is what counting anew finds, and what evaluate() prices."""

import random

import pytest

from megatron.partition import Partition, evaluate, parse_graph
from megatron.partition.units import PICOSECONDS, PartitionState, Score, compiled, partition_of
from tests.partition import graphs


def shared_graph(seed):
    made = graphs.content(
        [random.Random(seed).uniform(1, 9) for _ in range(20)],
        [(i, i + 1) for i in range(19)] + [(2, 9), (2, 15), (4, 19)],
        devices=3, out=30_000_000,
        shared_parameters=[{"nodes": [1, 12, 19], "params": 10**6, "out_bytes": 20_000_000}],
    )  # fmt: skip
    made["devices"] = [{"memory_limit_bytes": 1e9, "speed": s} for s in (1, 2, 0.5)]
    return parse_graph(made)


@pytest.mark.parametrize(
    "graph", [graphs.random_dag(1), shared_graph(2), graphs.operators(layers=3)], ids=["random", "shared", "operators"]
)
def test_moves_are_exact(graph):
    """After any legal moves, and moves back, sums and score are those of a new State, and of evaluate()."""
    rng, units = random.Random(0), compiled(graph)
    stages = sorted(rng.randrange(9) for _ in range(len(units)))
    state = PartitionState(units, stages, [rng.randrange(units.num_devices) for _ in range(9)])
    moved = 0
    for _ in range(400):
        unit, stage = rng.randrange(len(units)), rng.randrange(9)
        if state.may_move(unit, stage):
            before, score, back = state.placed(), state.score(), state.stage_of[unit]
            state.move(unit, stage)
            state.move(unit, back)
            assert (state.placed(), state.score()) == (before, score)
            state.move(unit, stage)
            moved += back != stage
    assert moved > 20
    fresh = PartitionState(units, state.stage_of, state.device_of)
    for name in ("time", "memory", "sent", "members", "_readers", "_users"):
        assert getattr(state, name) == getattr(fresh, name)
    value = evaluate(graph, partition_of(units, state.stage_of, state.device_of))
    assert state.score().worst / PICOSECONDS == pytest.approx(value.objective_ms, rel=1e-7)
    assert state.memory == pytest.approx(value.memory_bytes)


def test_better_than_ends():
    """Nothing is better than itself, nor by rounding alone; memory comes first, then the objective."""
    one = Score(0, 1e12, 1e24)
    assert not one.better_than(one) and not Score(0, 1e12 * (1 - 1e-12), 1e24).better_than(one)
    assert Score(0, 9e11, 9e24).better_than(one) and Score(0, 1e12, 9e23).better_than(one)
    assert not Score(1, 1e11, 1).better_than(one)


def test_what_must_stay_together_does():
    """Nodes in one stage are a unit, with all that lies between them; nodes on one device do not leave it alone."""
    made = graphs.content([1] * 6, [(i, i + 1) for i in range(5)])
    made["together"] = [{"nodes": [1, 3]}, {"nodes": [0, 5], "where": "device"}]
    units = compiled(parse_graph(made))
    assert units.nodes == ((0,), (1, 2, 3), (4,), (5,)) and units.on_one_device == ((0, 3),)
    state = PartitionState(units, [0, 1, 2, 2], [0, 1, 0])
    assert not state.may_move(0, 1) and state.may_move(1, 0) and not state.may_change_device(2)


def test_inputs_join_their_first_consumer():
    """So an input never makes a circle, wherever it is counted."""
    made = graphs.content([1, 1, 1], [(0, 1), (0, 2), (1, 2)])
    made["nodes"][0]["input"] = True
    units = compiled(parse_graph(made))
    assert len(units) == 2
    assert partition_of(units, [0, 4], [1, 0, 0, 0, 0]) == Partition({0: 0, 1: 0, 2: 1}, (1, 0))
