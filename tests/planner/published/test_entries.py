"""Published measurements become questions, or say in one sentence why they cannot."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.planner.job.software import MEGATRON_DEEPSPEED, MEGATRON_V3, PIPEDREAM_2BW
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.entries import REMARKS, Entry, Unpredictable, load_entries, read_entry
from megatron.planner.published.entry_parts import HardwareRecord, ModelRecord
from megatron.planner.published.settings import SettingsRecord
from tests.planner.published.measured import ALL, BPIPE_TABLE_7, KORTHIKANTI, VTRAIN, changed
from tests.planner.published.measured import PIPEDREAM_2BW as TABLE_1

RUN = BPIPE_TABLE_7[0]
PARTS = {"model": ModelRecord, "hardware": HardwareRecord, "config": SettingsRecord}
COUNTS = [("model", "layers"), ("model", "seq"), ("hardware", "gpus"), ("hardware", "peak_tflops"), ("config", "t"),
          ("config", "micro_batch")]  # fmt: skip
SWITCHES = [("config", "sequence_parallel"), ("config", "zero1"), ("model", "tied_embeddings")]
TEXTS = [("model", "name"), ("hardware", "gpu"), ("config", "schedule"), ("config", "recompute"),
         ("config", "precision")]  # fmt: skip


def reason(part: str, **values: object) -> str:
    """Why `RUN` with these values cannot be predicted; one sentence."""
    found = read_entry(changed(RUN, **{part: values}) if part else RUN | values)
    assert isinstance(found, Unpredictable), found
    assert "\n" not in found.reason and "pydantic" not in found.reason and "; " in found.reason
    return found.reason


def test_reads_what_is_published():
    entry = read_entry(BPIPE_TABLE_7[5])
    assert isinstance(entry, Entry)
    assert (entry.model.num_layers, entry.model.kv_channels, entry.model.vocabulary_size) == (80, 96, 51200)
    assert (entry.cluster.gpu, entry.cluster.num_gpus) == ("A100-80", 32)
    assert entry.cluster.bandwidth.between_nodes == 100
    configuration = entry.configuration
    assert (configuration.schedule, configuration.rank_mapping) == ("bpipe", "pair-adjacent")
    assert configuration.recompute is RecomputeScope.ATTENTION and configuration.distributed_optimizer
    assert entry.software == MEGATRON_V3 and not entry.assumed


def test_says_what_it_assumes():
    entry = read_entry(TABLE_1[0])
    assert entry.cluster.gpu == "GTX1080Ti" and entry.software == PIPEDREAM_2BW
    assert entry.model.hidden_size == 1024 and entry.model.masked_head
    assert entry.configuration.num_microbatches == 2
    assert any("hidden 1024" in each for each in entry.assumed)
    vague = changed(RUN, config={"schedule": None, "recompute": None}, hardware={"gpus_per_node": None})
    assert set(read_entry(vague).assumed) == {"schedule 1f1b", "recompute none", "nodes of 8 GPUs"}
    assert read_entry(VTRAIN[0]).software == MEGATRON_DEEPSPEED


@given(
    st.sampled_from(["", *PARTS]), st.text(min_size=1, max_size=12),
    st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
)  # fmt: skip
def test_any_unknown_key_is_one_sentence(part, key, value):
    known = set(PARTS[part].model_fields) if part else {*RUN, "fused_softmax_kernel_available"}
    if key not in known | REMARKS:
        assert "and there is no such key" in reason(part, **{key: value})


@pytest.mark.parametrize(
    ("part", "key", "known"),
    [
        ("config", "micro_bach", "the nearest that is known is micro_batch"),
        ("hardware", "gpu_per_node", "the nearest that is known is gpus_per_node"),
        ("", "hardwear", "the nearest that is known is hardware"),
        ("config", "zero_stage", "known are account_for_embedding_in_pipeline_split, "),
        ("model", "moe", "known are ffn, head_dim, "),
    ],
)
def test_the_nearest_known_key_is_named_or_else_all(part, key, known):
    where = f"{part}.{key}" if part else key
    assert reason(part, **{key: 2}).startswith(f"{where} is 2, and there is no such key; {known}")


@pytest.mark.parametrize(("part", "key"), [*COUNTS, *SWITCHES, *TEXTS])
def test_a_value_of_another_type_is_refused(part, key):
    """true is no number, 1 no boolean, and no list stands for anything."""
    others = {"counts": [True, "many"], "switches": [0, 1, "yes"], "texts": [True]}
    kind = "counts" if (part, key) in COUNTS else "switches" if (part, key) in SWITCHES else "texts"
    for value in ([1], {"a": 1}, *others[kind]):
        assert reason(part, **{key: value}).startswith(f"{part}.{key} is ")


def test_null_is_as_not_given_and_remarks_are_for_the_reader():
    same = changed(RUN | {"confidence": "high", "provenance": {"file": "x"}}, model={"note": "said", "kv_heads": None})
    assert read_entry(same) == read_entry(RUN)
    assert read_entry(RUN | {"note": "said"}).note == "said"


@pytest.mark.parametrize(
    ("part", "values", "told"),
    [
        ("config", {"micro_batch": None}, "config.micro_batch is not given"),
        ("config", {"micro_batch": "local 32"}, "config.micro_batch is 'local 32': input should be a valid integer"),
        ("config", {"fsdp": 2}, "(fully sharded, ZeRO-3) and p is 16"),
        ("config", {"d": 3}, "does not divide"),
        ("hardware", {"gpus": 16}, "t=1, p=16 and d=2 take 32 GPUs, and hardware.gpus is 16"),
        ("config", {"recompute": "selective op"}, "input should be 'none', 'attention' or 'layer'"),
        ("config", {"precision": "tf32"}, "input should be 'bf16', 'fp16', 'fp32' or 'fp8'"),
        ("config", {"schedule": "zigzag"}, "no schedule 'zigzag'"),
        ("config", {"schedule": "interleaved"}, "config.v is not given"),
        ("config", {"technique": "compile+zigzag"}, "which is no technique that is known"),
        ("config", {"ep": 2}, "expert is 2, and the model has no experts"),
        ("config", {"cp": 2}, "context parallelism over 2 ranks needs flash attention"),
        ("model", {"hidden": None}, "model.hidden is not given"),
        ("", {"model": [1]}, "model is [1]: input should be a valid dictionary"),
        ("measured", {"mfu": 50.64}, "measured.mfu is 50.64"),
        ("measured", {"iteration_s": 30, "iteration_ms": 60000}, "say the same; give one of them"),
    ],
)  # fmt: skip
def test_says_why_an_entry_cannot_be_predicted(part, values, told):
    assert told in reason(part, **values)


def test_every_entry_is_answered_by_its_id(tmp_path):
    """Without one by its number; two that are alike refuse the file."""
    found = [read_entry(entry) for entry in (RUN | {"id": 17}, "no object", {"id": None}, {})]
    assert [each.id for each in found] == ["17", "?", "?", "?"] and isinstance(found[0], Entry)
    path = tmp_path / "entries.json"
    path.write_text(json.dumps([RUN | {"id": None}, BPIPE_TABLE_7[1], 5]))
    assert [entry.id for entry in load_entries(path)] == ["entry 1", BPIPE_TABLE_7[1]["id"], "entry 3"]
    path.write_text(json.dumps([RUN | {"id": each} for each in (17, "17")]))
    with pytest.raises(ValueError, match=r"entries.json has two entries with the id '17'; give each its own"):
        load_entries(path)


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


@pytest.mark.parametrize(("mfu", "is_told"), [(None, False), (0, False), ("high", True), (True, True)])
def test_what_was_not_measured_is_no_time(mfu, is_told):
    """Some tables have 0 for a run that ran out of memory."""
    entry = read_entry(RUN | {"measured": {"mfu": mfu}})
    assert entry.seconds is None
    assert entry.unread == ((f"measured.mfu is {mfu!r}, no number above 0",) if is_told else ())
    other = read_entry(changed(RUN, measured={"loudness": 3, "feasible": True}))
    assert isinstance(other, Entry) and other.unread == ("measured.loudness is not known",)


def measured(values: dict, **config) -> Entry:
    return read_entry(changed(RUN | {"measured": values}, config=config))


def test_rates_become_seconds_and_that_is_said():
    """With the model's operations, or with those of the layers' forward run again (Narayanan et al., equation 3)."""
    operations = read_entry(RUN).model.operations(128)
    found = measured({"model_tflops_per_gpu": 120.0})
    assert found.seconds == pytest.approx(operations / (32 * 120e12)) and not found.published_mfu
    assert found.assumed == (f"{found.seconds:.4g} s an iteration, of 120 TFLOP/s a GPU",)
    again = measured({"tflops_per_gpu_incl_recompute": 150.0})
    B, s, layers, h, V = 128, 2048, 80, 9984, 51200
    formula = 96 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    assert again.seconds == pytest.approx(formula / (32 * 150e12))
    tokens = measured({"tokens_per_s_per_gpu": 256.0})
    assert tokens.seconds == 128 * 2048 / (32 * 256) and "256 tokens/s a GPU" in tokens.assumed[0]
    assert "above the GPU's peak of 312" in measured({"model_tflops_per_gpu": 9600}).reason
    first = measured({"iteration_ms": 30000, "tokens_per_s_per_gpu": 1, "mfu": 0.2})
    assert first.seconds == 30 and not first.assumed


def test_operations_that_may_be_two_things_are_not_read():
    """With layers recomputed tables print either; without, both are the same."""
    vague = measured({"tflops_per_gpu": 120.0})
    assert vague.seconds is None and "does not say whether what is recomputed counts" in vague.unread[0]
    plain = measured({"tflops_per_gpu": 120.0}, recompute="none")
    assert plain.seconds == measured({"tflops_per_gpu_incl_recompute": 120.0}, recompute="none").seconds > 0
    assert measured({"tflops_per_gpu": 120.0, "iteration_s": 9.0}).unread == ()


def test_published_tables_agree_with_themselves():
    """Korthikanti et al. print both for the 175B model: 13.75 s and 51.4% of 312 TFLOP/s, for 22B 1.10 s and 41.5%."""
    for entry, mfu in ((KORTHIKANTI[3], 0.514), (KORTHIKANTI[1], 0.415)):
        for said in ({"mfu": mfu}, {"model_tflops_per_gpu": 312 * mfu}):
            assert read_entry(entry | {"measured": said}).seconds == pytest.approx(read_entry(entry).seconds, rel=0.005)
