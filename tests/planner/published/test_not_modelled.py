"""What has no price is refused by name, whatever a framework calls it, unless it is off."""

import pytest

from megatron.planner.published.entries import Entry, Unpredictable, read_entry
from megatron.planner.published.entry_keys import PARTS
from megatron.planner.published.not_modelled import without_what_is_off
from tests.planner.published.measured import ALL, BPIPE_TABLE_7, changed

RUN = BPIPE_TABLE_7[0]


@pytest.mark.parametrize("part", ["", "model", "config", "hardware"])
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("fsdp", True, "fully sharded"), ("use_torch_fsdp2", True, "fully sharded"), ("zero3", True, "fully sharded"),
        ("fsdp", 8, "fully sharded"), ("sharding_strategy", "FULL_SHARD", "fully sharded"),
        ("data_parallel_shard_degree", 8, "fully sharded"),
        ("fp8", True, "FP8"), ("fp8_format", "hybrid", "FP8"), ("nvfp4", 1, "FP8 or FP4"), ("float8", "on", "FP8"),
        ("moe", True, "experts"), ("expert_choice", 2, "experts"), ("router_jitter", 0.1, "experts"),
        ("num-moe-experts", 4, "num_experts"),
        ("ulysses", 2, "context parallel"), ("cp_load_balance", True, "context parallel"),
        ("sequence_parallel_size", 4, "context parallel"), ("ring_attention", True, "context parallel"),
        ("cpu_offload", True, "offloading"), ("optimizer_cpu_offload", "yes", "offloading"),
        ("async_tp", True, "in pieces"), ("torch_compile", True, "compiled"), ("lora_rank", 8, "not trained"),
        ("sliding_window", 4096, "all earlier tokens"), ("num_decoder_layers", 2, "several decoders"),
    ],
)  # fmt: skip
def test_techniques_are_refused_by_name(part, key, value, reason):
    entry = changed(RUN, **{part: {key: value}}) if part else RUN | {key: value}
    found = read_entry(entry)
    assert isinstance(found, Unpredictable)
    assert reason in found.reason and key in found.reason and "; " in found.reason


@pytest.mark.parametrize("off", [False, 0, "none", "off", "no", None])
@pytest.mark.parametrize("key", ["fsdp", "fp8", "nvfp4", "moe", "num_experts", "context_parallel", "cpu_offload"])
def test_what_is_off_changes_nothing(key, off):
    assert read_entry(changed(RUN, config={key: off})) == read_entry(RUN)


@pytest.mark.parametrize("key", ["fsdp", "cp", "ep", "context_parallel_size", "expert_model_parallel_size"])
def test_a_degree_of_one_is_off_and_true_is_none(key):
    assert read_entry(changed(RUN, config={key: 1})) == read_entry(RUN)
    assert isinstance(read_entry(changed(RUN, config={key: True})), Unpredictable)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"config": {"precision": "fp8"}}, "config.precision is 'fp8': products in FP8"),
        ({"config": {"technique": "compile+fp8"}}, "config.technique is 'compile+fp8': products in FP8"),
        ({"config": {"technique": "zigzag"}}, "config.technique is 'zigzag', which is no technique that is known"),
        ({"config": {"framework": "PyTorch FSDP2"}}, "fully sharded"),
        ({"hardware": {"software": "DeepSpeed ZeRO-3"}}, "fully sharded"),
        ({"model": {"name": "Mixtral 8x7B"}}, "give model.num_experts and model.moe_router_topk"),
        ({"config": {"framework": "torchtitan with ring attention"}}, "give config.cp"),
        ({"model": {"name": "GPT-3 MoE 1.3B"}}, "experts"),
        ({"model": {"name": "T5 11B"}}, "encoders"),
        ({"config": {"zero_stage": 3}}, "config.zero_stage is 3, which is not modelled (0 and 1 are): weights"),
        ({"config": {"zero_stage": 1}}, "stages are read as config.zero; give zero 1"),
        ({"config": {"zero": True}}, "config.zero is True, which is no stage of ZeRO; give 0 or 1"),
        ({"config": {"zero": "3"}}, "config.zero is '3', which is no stage of ZeRO; give 0 or 1"),
    ],
)  # fmt: skip
def test_texts_and_stages(parts, reason):
    assert reason in read_entry(changed(RUN, **parts)).reason


def test_stage_1_is_the_distributed_optimizer():
    entry = read_entry(changed(RUN, config={"zero1": None, "zero": 1}))
    assert isinstance(entry, Entry) and entry.configuration.distributed_optimizer
    assert not read_entry(changed(RUN, config={"zero1": None, "zero": 0})).configuration.distributed_optimizer


def test_no_key_that_is_read_is_taken_for_a_technique():
    for part, keys in PARTS.items():
        given = {part: {key: "value of it" for key in keys - {"zero"}}}
        assert without_what_is_off(given) == given
    for entry in ALL:
        assert without_what_is_off(entry) == entry
