"""Published measurements become questions, or say why they cannot."""

import json

import pytest

from megatron.placement.bandwidth import RecomputeScope
from megatron.planner.entries import Entry, Unpredictable, load_entries, read_entry
from megatron.planner.software import MEGATRON_DEEPSPEED, MEGATRON_V3, PIPEDREAM_2BW
from tests.planner.measured import ALL, BPIPE_TABLE_7, KORTHIKANTI, VTRAIN
from tests.planner.measured import PIPEDREAM_2BW as TABLE_1


def changed(entry: dict, **parts: dict) -> dict:
    return entry | {name: entry[name] | part for name, part in parts.items()}


def test_reads_what_is_published():
    entry = read_entry(BPIPE_TABLE_7[5])
    assert isinstance(entry, Entry)
    assert (entry.model.num_layers, entry.model.kv_channels, entry.model.vocabulary_size) == (80, 96, 51200)
    assert (entry.cluster.gpu, entry.cluster.num_gpus) == ("A100-80", 32)
    assert entry.cluster.bandwidth.between_nodes == 100
    configuration = entry.configuration
    assert (configuration.schedule, configuration.rank_mapping) == ("bpipe", "pair-adjacent")
    assert configuration.recompute is RecomputeScope.ATTENTION and configuration.distributed_optimizer
    assert entry.software is MEGATRON_V3 and not entry.assumed


def test_mfu_and_seconds_agree():
    """Korthikanti et al. print both for the 175B model: 13.75 s and 51.4%, for 22B 1.10 s and 41.5%."""
    for entry, mfu in ((KORTHIKANTI[3], 0.514), (KORTHIKANTI[1], 0.415)):
        measured, by_mfu = read_entry(entry), read_entry(entry | {"measured": {"mfu": mfu}})
        assert by_mfu.seconds == pytest.approx(measured.seconds, rel=0.005)


def test_says_what_it_assumes():
    entry = read_entry(TABLE_1[0])
    assert entry.cluster.gpu == "GTX1080Ti" and entry.software is PIPEDREAM_2BW
    assert entry.model.hidden_size == 1024 and entry.model.masked_head
    assert entry.configuration.num_microbatches == 2
    assert any("hidden 1024" in each for each in entry.assumed)
    assert read_entry(VTRAIN[0]).software is MEGATRON_DEEPSPEED


def test_pads_the_vocabulary_as_megatron_does():
    assert read_entry(VTRAIN[0]).model.vocabulary_size == 50688  # a multiple of 128 * 4
    assert read_entry(VTRAIN[1]).model.vocabulary_size == 51200


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (changed(BPIPE_TABLE_7[0], config={"micro_batch": None}), "config.micro_batch is not given"),
        (changed(BPIPE_TABLE_7[0], config={"micro_batch": "local 32"}), "no number of sequences"),
        (changed(BPIPE_TABLE_7[0], config={"fsdp": 8}), "fully sharded"),
        (changed(BPIPE_TABLE_7[0], config={"zero": 3}), "fully sharded"),
        (changed(BPIPE_TABLE_7[0], config={"cp": 2}), "context parallel"),
        (changed(BPIPE_TABLE_7[0], config={"recompute": "selective op"}), "no scope that is modelled"),
        (changed(BPIPE_TABLE_7[0], config={"schedule": "zigzag"}), "no schedule 'zigzag'"),
        (changed(BPIPE_TABLE_7[0], config={"d": 3}), "does not divide"),
        (changed(BPIPE_TABLE_7[0], model={"hidden": None}), "model.hidden is not given"),
        (changed(BPIPE_TABLE_7[0], model={"hidden": "wide"}), "model.hidden"),
        (changed(BPIPE_TABLE_7[0], hardware={"gpu": "TPUv4"}), "no GPU that is known"),
        (changed(BPIPE_TABLE_7[0], hardware={"internode": None}), "bandwidth between them is not given"),
        ({"id": "empty"}, "is not given"),
        ({}, "is not given"),
    ],
)
def test_says_why_an_entry_cannot_be_predicted(entry, reason):
    found = read_entry(entry)
    assert isinstance(found, Unpredictable) and found.id == entry.get("id", "?")
    assert reason in found.reason


def test_reads_files_with_a_list_or_entries(tmp_path):
    for document in (ALL, {"about": "", "entries": ALL}):
        path = tmp_path / "entries.json"
        path.write_text(json.dumps(document))
        assert [each.id for each in load_entries(path)] == [each["id"] for each in ALL]
    path.write_text('{"runs": []}')
    with pytest.raises(ValueError, match="no list of entries"):
        load_entries(path)
