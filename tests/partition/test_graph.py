"""The graph file: what it means, and one sentence for each thing that can be wrong with it."""

import json
import random
from itertools import product

import pytest

from megatron.partition import parse_graph, read_graph
from tests.partition.graphs import content
from tests.partition.oracle import price


def broken(change):
    made = content([1, 2, 3], [(0, 1), (1, 2)])
    change(made)
    return made


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda g: g["edges"].append([2, 0]), "circle, 0>1>2>0"),
        (lambda g: g["edges"].append([1, 9]), "ends at node 9"),
        (lambda g: g["edges"].append([1, 1]), "circle, 1>1"),
        (lambda g: g["nodes"].append(dict(g["nodes"][1])), "node 1 is there twice"),
        (lambda g: g["nodes"][1].update(fwd_ms=-1), "nodes.1.fwd_ms: .*greater than or equal to 0"),
        (lambda g: g["nodes"][1].update(fwd_ms=float("nan")), "nodes.1.fwd_ms"),
        (lambda g: g["nodes"][1].update(fwd_plain_ms=1), "node 1 has a part of a profile"),
        (lambda g: g["nodes"][1].update(input=True), "leads into an input"),
        (lambda g: [node.update(input=True) for node in g["nodes"]] and g.update(edges=[]), "all nodes are inputs"),
        (lambda g: g.update(num_devices=0), "num_devices"),
        (lambda g: g.update(num_devices=10**400), "num_devices: .*less than or equal to 65536"),
        (lambda g: g["nodes"][1].update(bwd_ms=1e300), "nodes.1.bwd_ms"),
        (lambda g: g["nodes"][1].update(params=10**400), "nodes.1.params"),
        (lambda g: g.update(bandwidth_gigabytes_per_second=1e-300), "bandwidth_gigabytes_per_second"),
        (lambda g: g.update(devices=[{"memory_limit_bytes": 1}]), "lists 1 and num_devices is 2"),
        (lambda g: g.update(together=[{"nodes": [7]}]), "together names node 7"),
        (lambda g: g.update(nodes=[]), "nodes"),
        (lambda g: g.pop("bandwidth_gigabytes_per_second"), "^bandwidth_gigabytes_per_second is missing; add it$"),
        (lambda g: g.update(edges="x" * 10**6), "^edges: .*, not '.{1,30}'$"),
    ],
)
def test_what_is_wrong_is_said(change, reason):
    """One line that names the place."""
    with pytest.raises(ValueError, match=reason) as caught:
        parse_graph(broken(change))
    assert "\n" not in str(caught.value)


def test_files(tmp_path):
    """A file is read as it was written; keys that mean nothing are kept by name; what is no graph is refused."""
    path = tmp_path / "graph.json"
    made = broken(lambda g: (g.update(made_by="me"), g["nodes"][0].update(colour="red")))
    path.write_text(json.dumps(made))
    graph = read_graph(path)
    assert graph.unknown == ("made_by", "nodes.colour")
    assert graph.order() == [0, 1, 2] and graph.bound_ms == 3
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"graph\.json: the file holds no graph"):
        read_graph(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"graph\.json: no JSON"):
        read_graph(path)


def test_the_bound_knows_unequal_devices():
    """Work over all speeds, or the longest node on the fastest device."""
    devices = [{"memory_limit_bytes": 1e9, "speed": speed} for speed in (1, 3)]
    assert parse_graph(content([4, 8, 4], []) | {"devices": devices}).bound_ms == 4
    assert parse_graph(content([4, 24, 4], []) | {"devices": devices}).bound_ms == 8


def test_the_bound_knows_long_nodes():
    """Of three long nodes two devices share two: 5 and 5, and not a half of 17."""
    assert parse_graph(content([5, 5, 5, 2], [])).bound_ms == 10


def test_the_bound_knows_what_goes_without_recompute():
    """One device of a last stage does 3 for 4, so a chain of seven takes 12 and not 3/4 of 14. No partition is faster:
    of small graphs all are tried.
    """
    made = content([4] * 7, [(i, i + 1) for i in range(6)])
    for node in made["nodes"]:
        node |= {"fwd_plain_ms": 1, "bwd_plain_ms": 2, "mem_plain_bytes": 100}
    assert parse_graph(made).bound_ms == pytest.approx(12)
    choose = random.Random(1)
    for _ in range(8):
        edges = [(i, j) for i in range(5) for j in range(i + 1, 5) if choose.random() < 0.4]
        made = content([choose.randint(1, 9) for _ in range(5)], edges, out=0)
        for node in made["nodes"]:
            node |= {"fwd_plain_ms": node["fwd_ms"], "mem_plain_bytes": 100}
            node["bwd_plain_ms"] = node["bwd_ms"] * choose.choice([0.5, 0.9])
        least = min(
            found
            for stages in product(range(3), repeat=5)
            for devices in product(range(2), repeat=3)
            if (found := price(made, dict(enumerate(stages)), devices)) is not None
        )
        assert parse_graph(made).bound_ms <= least * (1 + 1e-9)
