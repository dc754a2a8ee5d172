"""The JSON form of a profile, for which partitions are looked for, and the signature by which both know the graph."""

import json
import subprocess
import sys

import pytest
import torch

from megatron.capture.blocks import blocks_of
from megatron.capture.cut import StageData, cut
from megatron.capture.export import capture, check_signature, signature
from megatron.capture.graph_file import graph_file, stage_of_operators
from megatron.capture.profile import profile
from megatron.capture.randomness import Draw
from tests.capture.in_turn import train_in_turn
from tests.capture.models import KINDS, captured, cross_entropy

MACHINE = {
    "num_devices": 4,
    "bandwidth_gigabytes_per_second": 12,
    "memory_limit_bytes": 1e9,
    "weight_bytes_per_parameter": 16,
}


@pytest.fixture(scope="module")
def file():
    _, ours = captured("gpt2")
    costs = profile(ours, KINDS["gpt2"].batch(2), repeats=1)
    return json.loads(json.dumps(graph_file(ours, costs, **MACHINE, microbatches_per_version=4)))


def test_nodes_are_data_and_blocks(file):
    _, ours = captured("gpt2")
    assert [node["id"] for node in file["nodes"]] == list(range(len(file["nodes"])))
    assert [node["scope"] for node in file["nodes"] if node.get("input")] == [
        f"GPT2LMHeadModel/Input[{name}]" for name in ("input_ids", "attention_mask", "labels")
    ]
    assert len(file["nodes"]) == 3 + len(blocks_of(ours))
    assert file["special_block"] == "GPT2Block" and file["signature"] == signature(ours)
    in_layers = [node for node in file["nodes"] if node["block"] == "GPT2Block"]
    assert in_layers and all("transformer/h/" in node["scope"] for node in in_layers)
    for node in file["nodes"]:
        assert node["bwd_ms"] >= node.get("bwd_plain_ms", 0.0) >= 0 and node["mem_bytes"] >= 0


def test_parameters_count_once(file):
    """Those of one block there; a tied weight is shared by two, and travels once for four microbatches."""
    model, _ = captured("gpt2")
    shared = file["shared_parameters"]
    size = model.transformer.wte.weight.numel()
    assert [(each["params"], each["out_bytes"], len(each["nodes"])) for each in shared] == [(size, size, 2)]
    total = sum(node["params"] for node in file["nodes"]) + size
    assert total == sum(each.numel() for each in model.parameters())


def test_edges_lead_from_what_is_read_to_who_reads_it(file):
    """No circle; every block but that of positions is reached, and the loss by labels through free operators."""
    _, ours = captured("gpt2")
    blocks = len(blocks_of(ours))
    assert all(source < target for source, target in file["edges"])
    alone = set(range(3, 3 + blocks)) - {target for _, target in file["edges"]}
    assert ["/wpe/" in file["nodes"][number]["scope"] for number in alone] == [True]
    assert [2, 2 + blocks] in file["edges"]  # the last block is the loss


def test_a_partition_becomes_stages(file):
    """Stages of nodes, with ids as text as in JSON, are stages of operators that compute."""
    model, ours = captured("gpt2")
    border = len(file["nodes"]) // 2
    stage_of = {str(node["id"]): int(node["id"] > border) for node in file["nodes"]}
    stages = cut(ours, stage_of_operators(ours, stage_of))
    batch, draw = KINDS["gpt2"].batch(2), Draw(1, 1)
    loss, _ = train_in_turn(stages, StageData(batch, draw))
    model.zero_grad()
    assert torch.equal(loss, ours.run(batch, draw)[0])
    del stage_of[str(len(file["nodes"]) - 1)]
    with pytest.raises(ValueError, match=r"node \d+ of GPT2LMHeadModel has no stage"):
        stage_of_operators(ours, stage_of)


# --- signatures


IN_ANOTHER_PROCESS = """
from megatron.capture.export import signature
from tests.capture.models import captured
print(signature(captured("plain")[1]))
"""


@pytest.mark.full
def test_two_processes_agree():
    other = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == signature(captured("plain")[1])


def test_values_and_batch_have_no_part_in_it():
    model = KINDS["plain"].build(0.1).train()
    ours = capture(model, KINDS["plain"].batch(5), loss=cross_entropy)
    assert signature(ours) == signature(captured("plain")[1])


def test_constants_and_shapes_have():
    """Another rate of dropout, another loss, another class: other graphs."""

    def twice(output, batch):
        return 2 * cross_entropy(output, batch)

    found = {signature(captured("plain")[1]), signature(captured("plain", 0.0)[1]), signature(captured("gpt2")[1])}
    for rate, loss in ((0.2, cross_entropy), (0.1, twice)):
        model = KINDS["plain"].build(rate).train()
        found.add(signature(capture(model, KINDS["plain"].batch(2), loss=loss)))
    assert len(found) == 5


def test_a_file_for_another_graph_is_refused():
    _, ours = captured("plain")
    check_signature(ours, signature(ours), "P.json")
    with pytest.raises(ValueError, match=r"P.json was made for another graph \(0{12}\) than that of Plain here"):
        check_signature(ours, "0" * 64, "P.json")
