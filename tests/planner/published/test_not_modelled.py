"""What has no price is refused by name, whatever a framework calls it, unless it is off."""

import pytest

from megatron.planner.job.sharding import Sharding
from megatron.planner.published.entries import Entry, Unpredictable, read_entry
from megatron.planner.published.entry_keys import PARTS
from megatron.planner.published.not_modelled import without_what_is_off
from tests.planner.published.measured import ALL, BPIPE_TABLE_7, changed

RUN = BPIPE_TABLE_7[0]


@pytest.mark.parametrize("part", ["", "model", "hardware"])
@pytest.mark.parametrize("key", ["fsdp", "data_parallel_shard_degree"])
@pytest.mark.parametrize("value", [True, 8])
def test_splitting_weights_is_said_in_config(part, key, value):
    """Where it stands elsewhere, it is refused with the place where it is read."""
    found = read_entry(changed(RUN, **{part: {key: value}}) if part else RUN | {key: value})
    assert isinstance(found, Unpredictable)
    assert f"{key} is {value}: weights are split over replicas" in found.reason
    assert found.reason.endswith("give config.fsdp as true or a number of replicas, or config.zero as 0 to 3")


@pytest.mark.parametrize("part", ["", "model", "config", "hardware"])
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("fsdp", "full_shard", "fully sharded"), ("use_torch_fsdp2", True, "fully sharded"),
        ("zero3", True, "fully sharded"), ("hsdp", 8, "fully sharded"),
        ("sharding_strategy", "FULL_SHARD", "fully sharded"), ("data_parallel_shard_degree", "all", "fully sharded"),
        ("fp8", True, "FP8"), ("fp8_format", "hybrid", "FP8"), ("nvfp4", 1, "FP4"), ("float8", "on", "FP8"),
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
        ({"config": {"precision": "nvfp4"}}, "config.precision is 'nvfp4': products in FP4"),
        ({"config": {"precision": "mxfp8"}}, "config.precision is 'mxfp8': products in FP8 are modelled as"),
        ({"config": {"precision": "fp8", "fp8_recipe": "blockwise"}}, "with a scale for each tensor, and no other way"),
        ({"config": {"technique": "compile+fp8"}}, "and the software of this run multiplies in 16"),
        ({"config": {"technique": "mxfp8"}}, "config.technique is 'mxfp8': products in FP8 are modelled"),
        ({"config": {"technique": "userbuffers"}}, "collectives in pieces are modelled as one switch"),
        ({"config": {"technique": "zigzag"}}, "config.technique is 'zigzag', which is no technique that is known"),
        ({"config": {"framework": "PyTorch FSDP2"}}, "fully sharded"),
        ({"hardware": {"software": "DeepSpeed ZeRO-3"}}, "fully sharded"),
        ({"model": {"name": "Mixtral 8x7B"}}, "give model.num_experts and model.moe_router_topk"),
        ({"config": {"framework": "torchtitan with ring attention"}}, "give config.cp"),
        ({"model": {"name": "GPT-3 MoE 1.3B"}}, "experts"),
        ({"model": {"name": "T5 11B"}}, "encoders"),
        ({"config": {"zero": True}}, "config.zero is True, which is no stage of ZeRO; give 0 to 3"),
        ({"config": {"zero": "3"}}, "config.zero is '3', which is no stage of ZeRO; give 0 to 3"),
        ({"config": {"zero_stage": 4}}, "config.zero_stage is 4, which is no stage of ZeRO; give 0 to 3"),
        ({"config": {"technique": "compile"}}, "such software has fused kernels without it; leave compile out"),
    ],
)  # fmt: skip
def test_texts_and_stages(parts, reason):
    assert reason in read_entry(changed(RUN, **parts)).reason


def test_stage_1_is_the_distributed_optimizer():
    entry = read_entry(changed(RUN, config={"zero1": None, "zero": 1}))
    assert isinstance(entry, Entry) and entry.configuration.distributed_optimizer
    assert not read_entry(changed(RUN, config={"zero1": None, "zero": 0})).configuration.distributed_optimizer


@pytest.mark.parametrize("key", ["zero", "zero_stage", "zero_optimization_stage"])
def test_every_name_of_a_stage_is_read(key):
    """1 is the distributed optimizer under each of them; 3 splits weights, which a text may name then."""
    given = {"zero1": None, key: 1}
    assert read_entry(changed(RUN, config=given)) == read_entry(changed(RUN, config={"zero1": None, "zero": 1}))
    split = {"zero1": None, "p": 1, "t": 8, "d": None, "micro_batch": 1, key: 3, "framework": "DeepSpeed ZeRO-3"}
    entry = read_entry(changed(RUN, config=split, hardware={"gpus": 32}))
    assert isinstance(entry, Entry) and entry.configuration.sharding == Sharding(stage=3, shards=4)


def test_no_key_that_is_read_is_taken_for_a_technique():
    """But for those that say how weights are split, of which only some values are read."""
    names = {"zero", "zero_stage", "zero_optimization_stage", "fsdp", "data_parallel_shard_degree"}
    for part, keys in PARTS.items():
        given = {part: {key: "value of it" for key in keys - names}}
        assert without_what_is_off(given) == given
    for entry in ALL:
        assert without_what_is_off(entry) == entry
