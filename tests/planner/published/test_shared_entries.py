"""Entries of runs whose ranks share sequences or experts: what is read, under which names, and what is refused."""

import pytest

from megatron.planner.memory.architecture import Experts
from megatron.planner.published.entries import Unpredictable, read_entry
from megatron.planner.published.prediction import predict
from megatron.planner.time.calibration import default_constants
from tests.planner.published.measured import changed

RUN = {
    "id": "made up",
    "model": {
        "name": "Llama 3",
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "seq": 8192,
        "vocab": 128256,
    },
    "hardware": {"gpu": "H100", "gpus": 64, "internode": "400 GB/s", "software": "Megatron-Core"},
    "config": {"t": 2, "p": 2, "micro_batch": 1, "global_batch": 64, "sequence_parallel": True, "zero1": True},
}  # fmt: skip
MOE = changed(
    RUN,
    model={"name": "Mixtral 8x7B", "ffn": 14336, "vocab": 32000, "num_experts": 8, "moe_router_topk": 2},
    config={"ep": 8, "etp": 1},
)


def seconds(entry: dict) -> float:
    found = read_entry(entry)
    assert not isinstance(found, Unpredictable), found.reason
    return predict(found, default_constants()).estimate.seconds


@pytest.mark.parametrize("key", ["cp", "context_parallel", "context_parallel_size"])
def test_context_parallelism(key):
    """By each name; replicas are the GPUs that are left, and keys are passed round a ring unless the entry says."""
    found = read_entry(changed(RUN, config={key: 4}))
    assert (found.configuration.context, found.configuration.data, found.configuration.num_gpus) == (4, 4, 64)
    assert not found.software.gathers_keys
    gathered = read_entry(changed(RUN, config={key: 4, "cp_comm_type": "all_gather"}))
    assert gathered.software.gathers_keys


@pytest.mark.parametrize("off", [1, False, None, "none"])
def test_off_is_off(off):
    assert read_entry(changed(RUN, config={"cp": off, "ep": off})) == read_entry(RUN)


def test_experts():
    """As wide as the feed-forward layer unless said, on every layer."""
    found = read_entry(MOE)
    assert found.model.experts == Experts(count=8, topk=2, ffn_hidden_size=14336)
    assert found.model.gated and not found.model.linear_biases
    assert (found.configuration.expert, found.configuration.expert_tensor) == (8, 1)
    assert {"experts with 14336 columns", "as many tokens for each expert"} <= set(found.assumed)
    said = {"moe_ffn": 2048, "moe_shared_ffn": 4096, "moe_layer_freq": 2, "moe_capacity_factor": 1.25}
    other = read_entry(changed(MOE, model=said)).model.experts
    assert other == Experts(
        count=8, topk=2, ffn_hidden_size=2048, shared_ffn_hidden_size=4096, layers=2, capacity_factor=1.25
    )
    pattern = changed(MOE, model={"moe_layer_freq": [0] + 31 * [1]})
    assert read_entry(pattern).model.experts.layers == (0, *31 * (1,))


def test_names_of_megatron_are_known():
    named = {"num_experts": None, "num_moe_experts": 8, "moe_ffn_hidden_size": 2048, "moe_expert_capacity_factor": 2}
    short = {"moe_ffn": 2048, "moe_capacity_factor": 2}
    degrees = {"ep": None, "etp": None, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    assert read_entry(changed(MOE, model=named, config=degrees)) == read_entry(changed(MOE, model=short))


def test_a_model_whose_layers_all_have_experts_needs_no_other_width():
    found = read_entry(changed(MOE, model={"ffn": None, "moe_ffn": 2048}))
    assert found.model.experts.ffn_hidden_size == 2048


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"config": {"cp": 2, "context_parallel": 4}}, "config.cp and config.context_parallel say the same; give one"),
        ({"config": {"cp": 3}}, "64 GPUs do not divide by t=2, p=2 and cp=3; correct"),
        ({"config": {"cp": True}}, "config.cp is True: a number is wanted, not a boolean"),
        ({"config": {"cp": 2, "cp_comm_type": "a2a"}}, "config.cp_comm_type is 'a2a': input should be 'p2p' or 'all_"),
        ({"config": {"cp": 2, "flash_attention": False}}, "context parallelism over 2 ranks needs flash attention"),
        ({"config": {"cp": 2}, "model": {"seq": 8190}}, "sequences of 8190 do not divide into two parts for each of 2"),
        ({"config": {"cp": 2, "schedule": "l2l", "zero1": None}}, "context 2 does not go with l2l"),
        ({"config": {"ep": 3}}, "expert 3 times expert_tensor 1 does not divide the 32 ranks of a stage"),
        ({"config": {"ep": 16}}, "8 experts do not divide over 16 ranks"),
        ({"config": {"sequence_parallel": False}}, "experts with tensor 2 need sequence parallelism"),
        ({"model": {"num_experts": None, "name": "Llama 3"}}, "model.moe_router_topk is given, and model.num_experts"),
        ({"model": {"moe_router_topk": None}}, "model.moe_router_topk is not given; give the number of experts"),
        ({"model": {"moe_router_topk": 9}}, "a token goes to 9 of 8 experts; lower topk"),
        ({"model": {"moe_layer_freq": [1, 0]}}, "the pattern of layers with experts has 2 entries, and the model 32"),
        ({"model": {"moe_layer_freq": [1, 2]}}, "model.moe_layer_freq"),
        ({"model": {"topk": 2}}, "model.topk is 2, and there is no such key; the nearest that is known is model.moe_r"),
    ],
)  # fmt: skip
def test_refusals(parts, reason):
    found = read_entry(changed(MOE, **parts))
    assert isinstance(found, Unpredictable) and reason in found.reason and "; " in found.reason


def test_predictions():
    """Long sequences on several ranks take less memory; of as many GPUs experts take more time than a dense layer that
    does their products, for copies have to move, and less than all experts would."""
    long = changed(RUN, model={"seq": 65536}, config={"global_batch": 32})
    one, four = (predict(read_entry(changed(long, config={"cp": cp})), default_constants()).estimate for cp in (1, 4))
    saved = [max(rank.parts.activations for rank in each.memory) for each in (one, four)]
    assert saved[1] == pytest.approx(saved[0] / 4)
    dense = {"num_experts": None, "moe_router_topk": None, "name": "Llama 3"}
    active = changed(MOE, model=dense | {"ffn": 2 * 14336}, config={"ep": None, "etp": None})
    all_ = changed(active, model={"ffn": 8 * 14336})
    assert seconds(active) < seconds(MOE) < seconds(all_)
