"""The part `model` of an entry: what follows from a name."""

import pytest

from megatron.planner.published.entries import read_entry
from megatron.planner.published.model_names import _GPT3_SIZES
from megatron.planner.published.prediction import predict
from megatron.planner.time.calibration import default_constants
from tests.planner.published.measured import BPIPE_TABLE_7, changed
from tests.planner.published.measured import PIPEDREAM_2BW as TABLE_1


def test_names_of_models():
    """PipeDream-2BW's BERTs repeat BERT-large's layer; a Llama's operations are those of its gated MLP."""
    bert = read_entry(changed(TABLE_1[0], model={"name": "BERT-48", "layers": 48})).model
    assert (bert.hidden_size, bert.num_attention_heads, bert.vocabulary_size) == (1024, 16, 30592)
    llama = {"name": "Llama 3.1 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 128256}
    model = read_entry(changed(BPIPE_TABLE_7[0], model=llama)).model
    assert model.gated and not model.tied_embeddings
    untied = changed(
        BPIPE_TABLE_7[0],
        model={"tied_embeddings": False},
        config={"schedule": "pipedream", "global_batch": 2},
    )
    assert predict(read_entry(untied), default_constants()).estimate.seconds > 0
    matrices = model.operations(1) / (6 * 2048) - 32 * 2 * 4096 * 2048
    assert matrices == 8_030_261_248 - 128256 * 4096 - 65 * 4096  # its parameters, but embedding and norms


@pytest.mark.parametrize(
    ("name", "is_known"), [("BERT-24?", True), ("BERT-192", True), ("BERT-base", False), ("BERT 2.2B", False)]
)
def test_a_bert_that_is_named_by_its_layers_has_those_of_bert_large(name, is_known):
    """Others say their hidden size themselves."""
    entry = read_entry(changed(TABLE_1[0], model={"name": name}))
    assert entry.model.hidden_size == 1024 if is_known else entry.reason == "model.hidden is not given; give it"


def test_a_gpt_3_that_is_named_by_its_parameters():
    """Each size of Narayanan et al.'s Table 1 has, by its formula, the parameters that name it."""
    for billions, (layers, hidden, heads) in _GPT3_SIZES.items():
        sizes = {"layers": None, "hidden": None, "heads": None, "name": "", "params_B": billions}
        model = read_entry(changed(BPIPE_TABLE_7[0], model=sizes, config={"t": 1, "p": 1, "d": 32})).model
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, hidden, heads)
        count = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
        assert round(count / 1e9, 1) == pytest.approx(billions, abs=0.051)
    remark = changed(BPIPE_TABLE_7[0], model={"params_B": "about 96"})
    assert read_entry(remark) == read_entry(BPIPE_TABLE_7[0])
