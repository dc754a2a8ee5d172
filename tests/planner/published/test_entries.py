"""Published measurements become questions, or say why they cannot."""

import json

import pytest

from megatron.planner.job.software import MEGATRON_DEEPSPEED, MEGATRON_V3, PIPEDREAM_2BW
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.published.entries import Entry, Unpredictable, load_entries, read_entry
from tests.planner.published.measured import ALL, BPIPE_TABLE_7, KORTHIKANTI, VTRAIN, changed
from tests.planner.published.measured import PIPEDREAM_2BW as TABLE_1


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
    vague = changed(
        BPIPE_TABLE_7[0], config={"schedule": None, "recompute": None}, hardware={"gpus": 64, "gpus_per_node": None}
    )
    said = read_entry(vague).assumed
    assert set(said) == {"schedule 1f1b", "recompute none", "nodes of 8 GPUs", "32 of the 64 GPUs"}
    assert read_entry(VTRAIN[0]).software is MEGATRON_DEEPSPEED


def test_pads_the_vocabulary_as_megatron_does():
    assert read_entry(VTRAIN[0]).model.vocabulary_size == 50688  # a multiple of 128 * 4
    assert read_entry(VTRAIN[1]).model.vocabulary_size == 51200


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (changed(BPIPE_TABLE_7[0], config={"micro_batch": None}), "config.micro_batch is not given"),
        (
            changed(BPIPE_TABLE_7[0], config={"micro_batch": "local 32"}),
            "config.micro_batch is 'local 32': input should be a valid integer",
        ),
        (changed(BPIPE_TABLE_7[0], config={"fsdp": 2}), "(fully sharded, ZeRO-3) and p is 16"),
        (changed(BPIPE_TABLE_7[0], config={"fsdp": 1, "cp": 8}), "context parallelism over 8 ranks needs flash"),
        (changed(BPIPE_TABLE_7[0], config={"schedule": "interleaved"}), "config.v is not given"),
        (changed(BPIPE_TABLE_7[0], config={"p": None}, hardware={"gpus": 32}), "is 32; give config.p"),
        (changed(BPIPE_TABLE_7[0], config={"zero": 3}), "(fully sharded, ZeRO-3) and p is 16"),
        (changed(BPIPE_TABLE_7[0], config={"cp": 2}), "context parallelism over 2 ranks needs flash attention"),
        (
            changed(BPIPE_TABLE_7[0], config={"recompute": "selective op"}),
            "input should be 'none', 'attention' or 'layer'",
        ),
        (changed(BPIPE_TABLE_7[0], config={"schedule": "zigzag"}), "no schedule 'zigzag'"),
        (changed(BPIPE_TABLE_7[0], config={"d": 3}), "does not divide"),
        (changed(BPIPE_TABLE_7[0], model={"hidden": None}), "model.hidden is not given"),
        (changed(BPIPE_TABLE_7[0], model={"hidden": "wide"}), "model.hidden"),
        (changed(BPIPE_TABLE_7[0], hardware={"gpu": "TPUv4"}), "no GPU that is known"),
        (changed(BPIPE_TABLE_7[0], hardware={"internode": None}), "bandwidth between them is not given"),
        (changed(BPIPE_TABLE_7[0], config={"zero": 2}), "(fully sharded, ZeRO-2) and p is 16"),
        (changed(BPIPE_TABLE_7[0], config={"ep": 2}), "expert is 2, and the model has no experts"),
        (changed(BPIPE_TABLE_7[0], model={"num_experts": 8}), "model.moe_router_topk is not given"),
        (changed(BPIPE_TABLE_7[0], config={"technique": "compile+fp8"}), "fp8"),
        (changed(BPIPE_TABLE_7[0], config={"t": 0}), "config.t is 0: input should be greater"),
        (changed(BPIPE_TABLE_7[0], config={"micro_batch": 0}), "micro_batch_size 0 is below 1"),
        (changed(BPIPE_TABLE_7[0], model={"heads": 0}), "model.heads is 0"),
        (changed(BPIPE_TABLE_7[0], model={"name": "Llama 2"}), "model.ffn is not given"),
        (changed(BPIPE_TABLE_7[0], hardware={"gpus_per_node": 0}), "hardware.gpus_per_node is 0"),
        (changed(BPIPE_TABLE_7[0], hardware={"gpus": 16}), "take 32 GPUs, and hardware.gpus is 16"),
        (changed(BPIPE_TABLE_7[0], hardware={"internode": "NVLink 600 GB/s"}), "nodes is NVLink 600 GB/s; give"),
        (changed(BPIPE_TABLE_7[0], measured={"mfu": 50.64}), "measured.mfu is 50.64"),
        (BPIPE_TABLE_7[0] | {"model": [1]}, "model is [1]: input should be a valid dictionary"),
        (changed(BPIPE_TABLE_7[0], model={"kv_heads": 7}), "do not divide into groups for 7 key and value heads"),
        (changed(BPIPE_TABLE_7[0], hardware={"internode": "-5 Gb/s"}), "the bandwidth between nodes is -5 Gb/s; give"),
        (
            changed(BPIPE_TABLE_7[0], config={"precision": "tf32"}),
            "config.precision is 'tf32': input should be 'bf16', 'fp16', 'fp32' or 'fp8'",
        ),
        (changed(BPIPE_TABLE_7[0], config={"t": "two", "hsdp": 8}), "fully sharded"),  # comes before what is unreadable
        ({"id": "empty"}, "is not given"),
        ({}, "is not given"),
    ],
)
def test_says_why_an_entry_cannot_be_predicted(entry, reason):
    found = read_entry(entry)
    assert isinstance(found, Unpredictable) and found.id == entry.get("id", "?")
    assert reason in found.reason


@pytest.mark.parametrize("measured", [None, {"mfu": None}, {"mfu": 0}, {"mfu": "high"}, {"feasible": False}])
def test_what_was_not_measured_is_no_time(measured):
    """Some tables have 0 for a run that ran out of memory."""
    entry = read_entry(BPIPE_TABLE_7[0] | {"measured": measured})
    assert entry.seconds is None
    assert entry.unread == (("measured.mfu is 'high', no number above 0",) if measured == {"mfu": "high"} else ())


def test_every_entry_is_answered_by_its_id():
    found = [read_entry(entry) for entry in (BPIPE_TABLE_7[0] | {"id": 17}, "no object", {"id": None})]
    assert [each.id for each in found] == ["17", "?", "?"] and isinstance(found[0], Entry)


def test_entries_without_an_id_are_told_apart(tmp_path):
    named = {key: value for key, value in BPIPE_TABLE_7[0].items() if key != "id"}
    (tmp_path / "entries.json").write_text(json.dumps([named, BPIPE_TABLE_7[1], named | {"id": None}, 5]))
    found = [entry.id for entry in load_entries(tmp_path / "entries.json")]
    assert found == ["entry 1", BPIPE_TABLE_7[1]["id"], "entry 3", "entry 4"]


def test_reads_files_with_a_list_or_entries(tmp_path):
    for document in (ALL, {"about": "", "entries": ALL}):
        path = tmp_path / "entries.json"
        path.write_text(json.dumps(document))
        assert [each.id for each in load_entries(path)] == [each["id"] for each in ALL]
    path.write_text('{"runs": []}')
    with pytest.raises(ValueError, match="no list of entries"):
        load_entries(path)
    path.write_text('{"entries": [], "config": {"zero1": true}}')  # of no entry, and not to be passed over
    with pytest.raises(ValueError, match=r"config is {.*}, and there is no such key"):
        load_entries(path)
