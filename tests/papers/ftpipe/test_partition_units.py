"""Layers as units are not cut, and finer units are never worse."""

import json
from dataclasses import replace

import pytest

from megatron.partition import evaluate
from papers.ftpipe import partition_units
from papers.ftpipe.partition_units_graphs import CASES, GIB, RTX_2080_TI, UNITS, Case, estimated, t5

FULL = pytest.mark.full  # capture and partition have tests of their own
TINY = Case(
    t5(layers=2, heads=2, d_ff=256, vocab_size=64, d_model=32, d_kv=8), {"input_ids": 64, "labels": 4}, 4, RTX_2080_TI,
    2, 8, "",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return estimated("tiny", TINY)


@pytest.fixture(scope="module")
def measured(tiny):
    return partition_units.measure(tiny, TINY, effort=0.01)


@FULL
def test_no_layer_is_cut(tiny, measured):
    """Each block of the encoder and the decoder lies in one stage; with sublayers as units each of theirs."""
    scopes = {node["id"]: node["scope"].split("/") for node in tiny.content["nodes"] if not node.get("input")}
    for units, length in (("layers", 4), ("sublayers", 6)):
        for method in partition_units.METHODS:
            partition = measured.results[units, method].partition
            stages = {}
            for node, scope in scopes.items():
                if "block" in scope:  # T5ForConditionalGeneration/encoder/block/0/layer/1/...
                    stages.setdefault("/".join(scope[:length]), set()).add(partition.stage_of_node[node])
            assert len(stages) == (4 if units == "layers" else 10)
            assert all(len(those) == 1 for those in stages.values())
    assert len(measured.results) == len(UNITS) * len(partition_units.METHODS)


@FULL
def test_finer_units_are_never_worse(tiny, measured):
    objective = {(row.units, row.method): row.objective_ms for row in measured.rows}
    for method in partition_units.METHODS:
        assert objective["operators", method] <= objective["sublayers", method] <= objective["layers", method]
        assert objective["operators", method] < objective["layers", method]
    numbers = {row.units: row.unit_count for row in measured.rows}
    assert numbers["operators"] > numbers["sublayers"] > numbers["layers"] >= 4


@FULL
def test_rows_are_what_the_graph_says(tiny, measured):
    """And the bound is below them."""
    for row in measured.rows:
        value = evaluate(tiny.graph(row.units), measured.results[row.units, row.method].partition)
        assert (row.objective_ms, row.depth, row.stages) == (value.objective_ms, value.depth, len(value.stage_ms))
        assert row.bound_ms <= row.objective_ms and row.stages <= (4 if row.method == "mixed" else 2)


@FULL
def test_an_encoder_layer_outweighs_a_decoder_layer_as_published():
    """The paper measured 5.5 for T5-3B at 512 and 4 tokens (section 3.3); at its microbatch of 4."""
    case = replace(TINY, build=t5(layers=2, heads=32, d_ff=16384), lengths={"input_ids": 512, "labels": 4})
    nodes = estimated("two layers of each", case).content["nodes"]
    encoder, decoder = (
        sum(node["fwd_ms"] + node["bwd_ms"] for node in nodes if f"/{part}/block/1/" in node["scope"])
        for part in ("encoder", "decoder")
    )
    assert encoder / decoder == pytest.approx(5.85, abs=0.05)


@FULL
def test_the_models_have_the_published_shapes():
    """1.5, 2.85 and 11.3 billion parameters, in no memory."""
    from megatron.capture.tensors import fake_parameters

    counts = {}
    for name, case in CASES.items():
        with fake_parameters():
            counts[name] = sum(each.numel() for each in case.build().parameters()) / 1e9
    assert counts == pytest.approx(
        {"t5-3b": 2.85, "t5-11b-2-layers": 0.503, "gpt2-xl": 1.56, "t5-11b": 11.31}, rel=0.01
    )


@FULL
def test_the_command_writes_tables_pictures_and_json(tmp_path, capsys):
    """The tables are of an encoder and a decoder layer of T5-11B, for which operators are worth more than a third."""
    path = tmp_path / "found.json"
    arguments = ["t5-11b-2-layers", "--effort", "0.01", "--picture", str(tmp_path), "--json", str(path)]
    assert partition_units.main(arguments) == 0
    rows = json.loads(path.read_text())["t5-11b-2-layers"]["rows"]
    objective = {(row["units"], row["method"]): row["objective_ms"] for row in rows}
    assert objective["layers", "mixed"] > 1.33 * objective["operators", "mixed"]
    assert all(max(row["memory_gib"]) <= RTX_2080_TI.memory / GIB for row in rows)
    assert (tmp_path / "partition_t5-11b-2-layers_mixed.png").stat().st_size > 10_000
    assert "layers take 1." in capsys.readouterr().out


def test_an_unknown_graph_is_refused(capsys):
    with pytest.raises(SystemExit):
        partition_units.main(["t5-9b"])
    assert "'t5-9b' is no graph; choose of t5-3b" in capsys.readouterr().err
