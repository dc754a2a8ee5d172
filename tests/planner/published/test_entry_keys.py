"""Any unknown key and any wrong type, at any place of an entry, is one sentence."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.planner.published.entries import Entry, Unpredictable, load_entries, read_entry
from megatron.planner.published.entry_keys import PARTS, REMARKS
from megatron.planner.published.measured_times import MEASURED
from megatron.planner.published.validation import load_facts
from tests.planner.published.measured import BPIPE_TABLE_7, changed

RUN = BPIPE_TABLE_7[0]
COUNTS = [(part, key) for part, keys in (
    ("model", "layers hidden heads kv_heads ffn seq vocab"), ("hardware", "gpus_per_node mem_GB peak_tflops gpus"),
    ("config", "t p d v micro_batch global_batch"),
) for key in keys.split()]  # fmt: skip
SWITCHES = [("config", "sequence_parallel"), ("config", "zero1"), ("config", "flash_attention"),
            ("model", "tied_embeddings"), ("config", "provisional_reduce")]  # fmt: skip
TEXTS = [("model", "name"), ("hardware", "gpu"), ("hardware", "internode"), ("config", "schedule"),
         ("config", "framework"), ("config", "recompute"), ("config", "precision")]  # fmt: skip


def assert_one_sentence(found, *words: str) -> None:
    assert isinstance(found, Unpredictable), found
    assert "\n" not in found.reason and "pydantic" not in found.reason and "; " in found.reason
    assert all(word in found.reason for word in words), found.reason


@settings(deadline=None)
@given(
    st.sampled_from(["", *PARTS]), st.text(min_size=1, max_size=12),
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
)  # fmt: skip
def test_any_unknown_key_is_one_sentence(part, key, value):
    known = PARTS.get(part, {*RUN, "fused_softmax_kernel_available"}) | REMARKS
    if key in known or value is None or value is False:
        return
    entry = changed(RUN, **{part: {key: value}}) if part else RUN | {key: value}
    found = read_entry(entry)
    if found != read_entry(RUN):  # a technique that is off
        assert_one_sentence(found)


@settings(deadline=None)
@given(
    st.sampled_from([*COUNTS, *SWITCHES, *TEXTS]),
    st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
def test_no_list_or_object_stands_for_a_value(place, value):
    part, key = place
    assert_one_sentence(read_entry(changed(RUN, **{part: {key: value}})), f"{part}.{key} is ")


@pytest.mark.parametrize(("part", "key"), COUNTS)
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_no_number(part, key, value):
    assert_one_sentence(read_entry(changed(RUN, **{part: {key: value}})), f"{part}.{key} is {value}")


@pytest.mark.parametrize(("part", "key"), SWITCHES)
@pytest.mark.parametrize("value", [0, 1, 1.0, "yes"])
def test_a_number_is_no_boolean(part, key, value):
    told = f"{part}.{key} is {value!r}: input should be a valid boolean; give true or false"
    assert_one_sentence(read_entry(changed(RUN, **{part: {key: value}})), told)


@pytest.mark.parametrize(("part", "key"), [*TEXTS, ("", "id"), ("", "source")])
def test_a_boolean_is_no_text(part, key):
    entry = changed(RUN, **{part: {key: True}}) if part else RUN | {key: True}
    assert_one_sentence(read_entry(entry), f"{key} is True")


@pytest.mark.parametrize(
    ("part", "key", "near"),
    [
        ("config", "micro_bach", "config.micro_batch"), ("model", "tp", "config.t"), ("hardware", "dp", "config.d"),
        ("config", "batch_size", "config.global_batch"), ("config", "layers", "model.layers"),
        ("config", "hidden_size", "model.hidden"), ("config", "num-layers", "model.layers"),
        ("config", "gradient_checkpointing", "config.recompute"), ("hardware", "between_nodes", "hardware.internode"),
        ("model", "micro_batch", "config.micro_batch"), ("config", "seq_length", "model.seq"),
        ("config", "memory_GB", "hardware.mem_GB"), ("hardware", "gpu_per_node", "hardware.gpus_per_node"),
        ("config", "sequence_paralel", "config.sequence_parallel"), ("", "hardwear", "hardware"),
        ("measured", "iteration_sec", "measured.iteration_s"), ("measured", "step_time", "measured.iteration_s"),
        ("measured", "tflops", "measured.tflops_per_gpu"), ("measured", "tflop_s", "measured.tflops_per_gpu"),
        ("measured", "tokens_per_s", "measured.tokens_per_s_per_gpu"),
    ],
)  # fmt: skip
def test_the_nearest_known_key_is_named(part, key, near):
    entry = changed(RUN, **{part: {key: 2}}) if part else RUN | {key: 2}
    assert_one_sentence(read_entry(entry), f"{key} is 2, and there is no such key; the nearest that is known is {near}")


def test_without_one_near_all_are_named():
    assert_one_sentence(read_entry(changed(RUN, model={"colour": "red"})), "model.colour is 'red'", "known are ffn, ")


def test_remarks_are_for_the_reader():
    entry = changed(RUN | {"confidence": "high", "provenance": {"file": "x"}}, model={"params_B": 96, "note": "said"})
    assert read_entry(entry) == read_entry(RUN)


def test_what_else_was_measured_is_told():
    """It changes no prediction, so the entry goes on."""
    entry = read_entry(changed(RUN, measured={"loudness": 3, "feasible": True}))
    assert isinstance(entry, Entry) and entry.unread == ("measured.loudness is not known",)
    assert "feasible" in MEASURED


def test_two_entries_have_two_ids(tmp_path):
    path = tmp_path / "entries.json"
    for ids in (("a", "a"), (17, "17"), (None, "entry 1")):
        path.write_text(json.dumps([RUN | {"id": each} for each in ids]))
        with pytest.raises(ValueError, match=r"entries.json has two entries with the id '.*'; give each its own"):
            load_entries(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"t": True}, "fact 0.t is True: a number is wanted, not a boolean; give a number"),
        ({"fits": 1}, "fact 0.fits is 1: input should be a valid boolean; give true or false"),
        ({"bipe": True}, "fact 0.bipe is True, and there is no such key; the nearest that is known is bpipe"),
        ({"d": 0}, "fact 0.d is 0: input should be greater than or equal to 1; give 1 or more"),
        ({"zero_stage": 3}, "fact 0.zero_stage is 3, and there is no such key; known are bpipe, "),
    ],
)
def test_facts_are_read_as_strictly(tmp_path, changes, told):
    path = tmp_path / "facts.json"
    fact = {"model": "96B", "t": 1, "p": 16, "d": 2, "micro_batch": 1, "recompute": "layer", "fits": True}
    path.write_text(json.dumps([fact | changes]))
    with pytest.raises(ValueError) as refusal:
        load_facts(path)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_unit_as_a_key():
    """A key that is no word stands in quotes."""
    found = read_entry(changed(RUN, measured={"TFLOP/s": 158}))
    assert_one_sentence(found, "measured.'TFLOP/s' is 158, and there is no such key; the nearest that is known is ")
    assert found.reason.endswith("measured.tflops_per_gpu")
