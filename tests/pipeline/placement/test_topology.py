"""Topology files: what they say, and what is wrong with bad ones."""

import json
from pathlib import Path

import pytest

from megatron.pipeline.placement.topology import load_topology
from tests.pipeline.placement.examples import machine

EXAMPLE = Path(__file__).parents[3] / "examples" / "topology.yaml"
GOOD = {
    "nodes": [{"name": "a", "gpus": 2}, {"name": "b", "gpus": 1}],
    "bandwidth": {"within_node": 300, "between_nodes": 25.5},
}


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_example_file():
    """The example is the paper's cluster, cut to two nodes: 4 x 200 Gb/s, so 12.5 GB/s for each of 8 GPUs."""
    topology = load_topology(EXAMPLE)
    assert [node.gpus for node in topology.nodes] == [8, 8]
    assert topology.network_share(0) == 12.5
    assert topology.seconds_within_node(300e9) == 1.0 and topology.seconds_between_nodes(50e9) == 0.5


def test_slots_of_uneven_nodes(tmp_path):
    """Slots are counted node by node."""
    topology = load_topology(write(tmp_path / "t.json", GOOD))
    assert (topology.num_slots, topology.node_of_slot, topology.first_slot(1)) == (3, (0, 0, 1), 2)
    assert topology.teraflops_per_gpu is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nodes": []}, "nodes: tuple should have at least 1 item"),
        ({"nodes": [{"name": "a", "gpus": 0}]}, "nodes.0.gpus: input should be greater than or equal to 1, not 0"),
        ({"nodes": [{"name": "a", "gpus": "8"}]}, "nodes.0.gpus: input should be a valid integer, not '8'"),
        ({"nodes": [{"name": "a", "gpus": True}]}, "nodes.0.gpus: input should be a valid integer, not True"),
        ({"nodes": [{"name": "a", "gpus": 10**9}]}, "nodes.0.gpus: input should be less than or equal to 65536"),
        ({"nodes": [{"gpus": 8}]}, "nodes.0.name: field required"),
        ({"nodes": [{"name": "", "gpus": 1}]}, "nodes.0.name: string should have at least 1 character"),
        ({"nodes": [{"name": "a", "gpus": 1}] * 2}, "two nodes are called a"),
        ({"bandwidth": {"within_node": -1, "between_nodes": 1}}, "bandwidth.within_node: input should be greater than"),
        ({"bandwidth": 300}, "bandwidth: input should be a valid dictionary"),
        ({"teraflops_per_gpu": float("inf")}, "teraflops_per_gpu: input should be a finite number, not inf"),
        ({"teraflops_per_gpu": 0}, "teraflops_per_gpu: input should be greater than 0, not 0"),
        ({"teraflops": 180}, "teraflops: extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(tmp_path, change, reason):
    """File, field, reason and value in one sentence."""
    path = write(tmp_path / "bad.json", {**GOOD, **change})
    with pytest.raises(ValueError) as error:
        load_topology(path)
    assert str(error.value).startswith(f"{path}: {reason}") and "\n" not in str(error.value)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file: input should be a valid dictionary"),
        ("[1, 2]", "the file: input should be a valid dictionary"),
        ("nodes: [", "line 1, column 9: "),
        (
            "bandwidth: {within_node: .inf, between_nodes: 1}\nnodes: [{name: a, gpus: 1}]",
            "bandwidth.within_node: input should be a finite",
        ),
        ("a: !!python/object:os.system {}", "line 1, column 4: could not determine a constructor"),
        ("nodes: [{name: a,\n  gpus: 1, gpus: 2}]", "line 2, column 12: gpus is given twice in one place; give"),
        ('{"nodes": [{"name": "a", "gpus": 1, "gpus": 2}]}', "bad.yaml: gpus is given twice in one place; give it"),
        ("nodes: [{name: 2026-99-99, gpus: 1}]", "month must be in 1..12; write YAML or JSON"),
        ("[" * 5000, "brackets are nested too deeply; write YAML or JSON"),
        ("nodes: \0", "unreadable characters; write YAML or JSON"),
    ],
)  # fmt: skip
def test_bad_files_are_explained(tmp_path, text, reason):
    """What is no topology at all; YAML that would run code is refused."""
    with pytest.raises(ValueError) as error:
        load_topology(write(tmp_path / "bad.yaml", text))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_json_that_is_no_yaml(tmp_path):
    """Tabs, exponents without a point and a byte order mark are good JSON."""
    text = json.dumps(GOOD, indent="\t").replace("25.5", "1e2")
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8-sig")
    assert load_topology(path).bandwidth.between_nodes == 100


def test_job_uses_a_part():
    """Nodes keep the file's order, and count the job's processes; strangers and too many processes are refused."""
    topology = machine(8, 8, 4)
    part = topology.restricted({"node2": 4, "node0": 2})
    assert [(node.name, node.gpus) for node in part.nodes] == [("node0", 2), ("node2", 4)]
    assert part.node_of_slot == (0, 0, 1, 1, 1, 1) and part.bandwidth == topology.bandwidth
    with pytest.raises(
        ValueError, match=r"host gpu7 of the job is not among the topology's nodes \(node0, node1, node2\)"
    ):
        topology.restricted({"gpu7": 1})
    with pytest.raises(ValueError, match="host node2 runs 5 processes, but the topology gives it 4 GPUs"):
        topology.restricted({"node2": 5})
