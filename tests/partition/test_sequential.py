"""Dynamic programming finds what trying every cut finds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.partition import evaluate, parse_graph
from megatron.partition.exact import cut_sequentially
from megatron.partition.units import PICOSECONDS, compiled, partition_of
from tests.draws import draws
from tests.partition import graphs, oracle


@st.composite
def files(draw):
    size, devices = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    pairs = [(a, b) for b in range(size) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=14, unique=True)) if pairs else []
    made = graphs.content(
        draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), edges, devices=devices, out=0
    )
    for node in made["nodes"]:
        node["out_bytes"] = draw(st.sampled_from([0, 10**7, 10**8]))
    made["memory_limit_bytes"] = draw(st.sampled_from([9000, 13000, 1e9]))
    if draw(st.booleans()):
        made["devices"] = [
            {"memory_limit_bytes": draw(st.sampled_from([9000, 20000])), "speed": draw(st.sampled_from([1, 3]))}
            for _ in range(devices)
        ]
    if size > 4 and draw(st.booleans()):
        made["shared_parameters"] = [{"nodes": [1, size - 1], "params": 900, "out_bytes": 5 * 10**7}]
    return made


def every_cut(made, order):
    """The least objective of all contiguous cuts of the order on all choices of devices; None where none fits."""
    size, num, best = len(order), made["num_devices"], None
    for stages in range(1, num + 1):
        for cuts in itertools.combinations(range(1, size), stages - 1):
            of = {node: sum(i >= cut for cut in cuts) for i, node in enumerate(order)}
            for holds in itertools.permutations(range(num), stages):
                price = oracle.price(made, of, holds)
                if price is not None and (best is None or price < best):
                    best = price
    return best


@draws(60)
@given(files())
def test_it_is_the_best_of_all_cuts(made):
    """Skips that are read in several stages, tensors that cost more than compute, memory, unequal devices."""
    graph = parse_graph(made)
    units = compiled(graph)
    found, expected = cut_sequentially(units), every_cut(made, graph.order())
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.proven
        assert found.worst / PICOSECONDS == pytest.approx(expected, abs=1e-6)
        value = evaluate(graph, partition_of(units, found.stage_of_unit(), found.devices))
        assert value.objective_ms == pytest.approx(expected, abs=1e-6)


def test_twelve_nodes():
    """The same at 12 nodes on 3 unequal devices, where each tensor costs more than most stages compute."""
    made = graphs.content(
        [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [(i, i + 1) for i in range(11)] + [(0, 5), (0, 9), (2, 11)],
        devices=3, out=80_000_000,
    )  # fmt: skip
    made["devices"] = [{"memory_limit_bytes": 30000, "speed": speed} for speed in (1, 2, 1)]
    found = cut_sequentially(compiled(parse_graph(made)))
    assert found.proven and found.worst / PICOSECONDS == pytest.approx(every_cut(made, range(12)))
