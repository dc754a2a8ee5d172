"""The part `model` of an entry: sizes, experts, and what follows from a name."""

import pytest

from megatron.planner.memory.architecture import Experts
from megatron.planner.published.entries import Unpredictable, read_entry
from megatron.planner.published.entry_parts import _GPT3_SIZES
from tests.planner.published.measured import BPIPE_TABLE_7, MOE, VTRAIN, changed
from tests.planner.published.measured import PIPEDREAM_2BW as TABLE_1

RUN = BPIPE_TABLE_7[0]


def test_pads_the_vocabulary_as_megatron_does():
    assert read_entry(VTRAIN[0]).model.vocabulary_size == 50688  # a multiple of 128 * 4
    assert read_entry(VTRAIN[1]).model.vocabulary_size == 51200


def test_names_of_models():
    """PipeDream-2BW's BERTs repeat BERT-large's layer; Llama's MLP is gated; Qwen3 normalizes queries and keys, which
    are wider than its residual stream; Nemotron has plain MLPs without biases."""
    bert = read_entry(changed(TABLE_1[0], model={"name": "BERT-48?", "layers": 48})).model
    assert (bert.hidden_size, bert.num_attention_heads, bert.vocabulary_size) == (1024, 16, 30592)
    assert read_entry(changed(TABLE_1[0], model={"name": "BERT-base"})).reason == "model.hidden is not given; give it"
    llama = {"name": "Llama 3.1 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 128256}
    model = read_entry(changed(RUN, model=llama)).model
    assert model.gated and not model.tied_embeddings
    matrices = model.operations(1) / (6 * 2048) - 32 * 2 * 4096 * 2048
    assert matrices == 8_030_261_248 - 128256 * 4096 - 65 * 4096  # its parameters, but embedding and norms
    qwen = {"name": "Qwen3 30B-A3B", "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128}
    model = read_entry(changed(MOE, model=qwen)).model
    assert (model.query_width, model.key_width, model.qk_norm, model.gated) == (4096, 512, True, True)
    nemotron = read_entry(changed(RUN, model={"name": "Nemotron-4 340B"})).model
    assert (nemotron.gated, nemotron.linear_biases, nemotron.norm_vectors) == (False, False, 2)
    assert (nemotron.ffn_hidden_size, nemotron.num_positions) == (4 * 9984, 0) and not nemotron.tied_embeddings


def test_a_gpt_3_that_is_named_by_its_parameters():
    """Each size of Narayanan et al.'s Table 1 has, by its formula, the parameters that name it."""
    none = {"layers": None, "hidden": None, "heads": None, "name": ""}
    for billions, (layers, hidden, heads) in _GPT3_SIZES.items():
        given = changed(RUN, model=none | {"params_B": billions}, config={"t": 1, "p": 1, "d": 32})
        entry = read_entry(given)
        model, sizes = entry.model, f"{layers} layers of {hidden}, {heads} heads"
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, hidden, heads)
        assert f"the GPT-3 of {billions:g} billion parameters: {sizes}" in entry.assumed
        count = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
        assert round(count / 1e9, 1) == pytest.approx(billions, abs=0.051)
    assert isinstance(read_entry(changed(given, model={"params_B": 530})), Unpredictable)
    assert isinstance(read_entry(changed(given, model={"layers": 105})), Unpredictable)  # it says some, not all
    assert read_entry(changed(RUN, model={"params_B": "about 96"})) == read_entry(RUN)


def test_experts():
    """As wide as the feed-forward layer unless said, on every layer."""
    found = read_entry(MOE)
    assert found.model.experts == Experts(count=8, topk=2, ffn_hidden_size=14336)
    assert found.model.gated and not found.model.linear_biases
    assert (found.configuration.expert, found.configuration.expert_tensor) == (8, 1)
    assert {"experts with 14336 columns", "as many tokens for each expert"} <= set(found.assumed)
    said = {"moe_ffn": 2048, "moe_shared_ffn": 4096, "moe_layer_freq": 2, "moe_capacity_factor": 1.25}
    assert read_entry(changed(MOE, model=said)).model.experts == Experts(
        count=8, topk=2, ffn_hidden_size=2048, shared_ffn_hidden_size=4096, layers=2, capacity_factor=1.25
    )
    pattern = changed(MOE, model={"moe_layer_freq": [0] + 31 * [1]})
    assert read_entry(pattern).model.experts.layers == (0, *31 * (1,))
    assert read_entry(changed(MOE, model={"ffn": None, "moe_ffn": 2048})).model.experts.ffn_hidden_size == 2048


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"num_experts": None, "name": "Llama 3"}, "model.moe_router_topk is given, and model.num_experts is not"),
        (
            {"num_experts": None},
            "model.name is 'Mixtral 8x7B': encoders and recurrent layers are not modelled, and exp",
        ),
        ({"name": "T5 11B"}, "model.name is 'T5 11B'"),
        ({"moe_router_topk": None}, "model.moe_router_topk is not given; give the number of experts"),
        ({"moe_router_topk": 9}, "a token goes to 9 of 8 experts; lower topk"),
        ({"moe_layer_freq": [1, 0]}, "the pattern of layers with experts has 2 entries, and the model 32"),
        ({"moe_layer_freq": [1, 2]}, "model.moe_layer_freq"),
        ({"name": "Llama 2", "ffn": None}, "model.ffn is not given"),
        ({"kv_heads": 7}, "do not divide into groups for 7 key and value heads"),
        ({"hidden": 4097}, "hidden size 4097 does not divide into 32 heads"),
    ],
)
def test_models_that_cannot_be(model, told):
    found = read_entry(changed(MOE, model=model))
    assert isinstance(found, Unpredictable) and told in found.reason and "; " in found.reason
