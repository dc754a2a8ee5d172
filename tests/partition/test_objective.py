"""evaluate() against the oracle, and its reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.partition import Partition, evaluate, parse_graph
from tests.draws import draws
from tests.partition import oracle
from tests.partition.graphs import content


@st.composite
def cases(draw):
    size, devices = draw(st.integers(2, 8)), draw(st.integers(1, 3))
    pairs = [(a, b) for b in range(size) for a in range(b)]
    made = content(
        draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)),
        draw(st.lists(st.sampled_from(pairs), max_size=12, unique=True)),
        devices=devices, memory=draw(st.sampled_from([13000, 30000, 1e9])), out=0,
    )  # fmt: skip
    for node in made["nodes"]:
        node["out_bytes"] = draw(st.sampled_from([0, 10**7, 10**8]))
        if draw(st.booleans()):
            node |= {"fwd_plain_ms": node["fwd_ms"], "bwd_plain_ms": node["bwd_ms"] / 2, "mem_plain_bytes": 2000}
    if not any(b == 0 for _, b in made["edges"]) and draw(st.booleans()):
        made["nodes"][0]["input"] = True
    if draw(st.booleans()):
        made["devices"] = [
            {"memory_limit_bytes": made["memory_limit_bytes"], "speed": draw(st.sampled_from([0.5, 1, 2]))}
            for _ in range(devices)
        ]
    if size > 3 and draw(st.booleans()):
        made["shared_parameters"] = [{"nodes": [1, size - 1], "params": 2000, "out_bytes": 5 * 10**7}]
    places = draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
    if draw(st.booleans()):
        places.sort()
    first = 1 if made["nodes"][0].get("input") else 0
    number = {stage: index for index, stage in enumerate(sorted(set(places[first:])))}
    stages = {i: number.get(stage, 0) for i, stage in enumerate(places)}
    holds = draw(st.lists(st.integers(0, devices - 1), min_size=len(number), max_size=len(number)))
    return made, stages, tuple(holds)


@draws(150)
@given(cases())
def test_it_is_the_oracle(case):
    """Price, and whether there is one, for any graph and placement: skips, inputs, shared parameters, two profiles."""
    made, stages, holds = case
    expected = oracle.price(made, stages, holds)
    try:
        found = evaluate(parse_graph(made), Partition(stages, holds)).objective_ms
    except ValueError:
        found = None
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-12))


CHAIN = content([4, 4, 4, 4], [(0, 1), (1, 2), (2, 3)], out=12_000_000)


@pytest.mark.parametrize(
    "stages, holds, change, reason",
    [
        ([0, 1, 0, 1], (0, 1), {}, "stages 0>1 form a circle"),
        ([0, 0, 1, 1], (0, 1), {"memory_limit_bytes": 8000}, "device 0 would hold"),
        ([0, 0, 0, 2], (0, 1), {}, "a node is in stage 2"),
        ([0, 0, 0, 1], (0, 2), {}, "stage 1 is on device 2"),
        ([0, 0, 0, 0], (0, 1), {}, "stage 1 computes nothing"),
        ([0, 0, 1], (0, 1), {}, "nodes are not the graph's"),
        ([0, 1, 1, 2], (0, 1, 0), {"together": [{"nodes": [0, 3]}]}, "stay on one stage"),
        ([0, 1, 1, 2], (0, 1, 1), {"together": [{"nodes": [0, 3], "where": "device"}]}, "stay on one device"),
    ],
)
def test_reasons(stages, holds, change, reason):
    """What is no partition is refused, and says why."""
    with pytest.raises(ValueError, match=reason):
        evaluate(parse_graph(CHAIN | change), Partition(dict(enumerate(stages)), holds))


def test_a_sending_stage_waits():
    """12 MB at 12 GB/s are 1 ms each way; what compute does not hide is paid, both ways."""
    graph = parse_graph(CHAIN | {"bandwidth_gigabytes_per_second": 1.2})
    value = evaluate(graph, Partition({0: 0, 1: 0, 2: 1, 3: 1}, (0, 1)))
    assert value.stage_ms == pytest.approx((8 + 2 * 2, 8)) and value.crossing_bytes == 12_000_000 and value.depth == 1
    shared = evaluate(graph, Partition({0: 0, 1: 1, 2: 1, 3: 2}, (0, 1, 0)))
    assert shared.stage_ms == pytest.approx((8 + 4, 8 + 4, 8)) and shared.depth == 2
