"""What NVIDIA's recipes say of a run beside its degrees: precision, splits, dispatchers, graphs."""

import pytest

from megatron.planner.job.software import FLEX
from megatron.planner.published.entries import Entry, read_entry
from megatron.planner.published.prediction import predict
from megatron.planner.time.calibration import default_constants
from tests.planner.published.measured import changed
from tests.planner.published.test_shared_entries import MOE, RUN

FP8 = {"precision": "fp8"}


def entry(given: dict, **config: object) -> Entry:
    found = read_entry(changed(given, config=config))
    assert isinstance(found, Entry), found.reason
    return found


def reason(given: dict, **config: object) -> str:
    return read_entry(changed(given, config=config)).reason


def test_embedding_and_loss_count_as_layers_of_the_split():
    """Llama 3.1 405B: 126 layers in 64 stages, as megatron.core deals them out."""
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    given = changed(RUN, model={"layers": 126})
    found = entry(given, t=1, p=8, v=8, d=8, **both)
    assert found.configuration.layers == (1, *[2] * 62, 1)
    assert predict(found, default_constants()).estimate.seconds > 0
    one = entry(changed(RUN, model={"layers": 31}), account_for_loss_in_pipeline_split=True)
    assert one.configuration.layers == (16, 15)
    assert "31 layers and 2 for embedding and loss do not divide into 2 stages" in reason(
        changed(RUN, model={"layers": 31}), **both
    )
    assert entry(RUN, account_for_loss_in_pipeline_split=False) == read_entry(RUN)


def test_weights_in_fp8_alone():
    """2 bytes less of each element of a linear, and a byte less to gather."""
    found, alone = entry(RUN, **FP8), entry(RUN, **FP8, fp8_param_gather=True)
    own, less = (predict(each, default_constants()).estimate for each in (found, alone))
    matrices = 16 * found.model.layer_matrices // 2
    assert own.memory[0].parts.weights - less.memory[0].parts.weights == 2 * matrices
    assert less.seconds < own.seconds


@pytest.mark.parametrize(("gpu", "is_known"), [("H100", False), ("H200", False), ("B200", True), ("GB200", True)])
def test_scales_of_blocks_are_blackwells(gpu, is_known):
    given = changed(RUN, hardware={"gpu": gpu, "gpus_per_node": 8})
    found = read_entry(changed(given, config=FP8 | {"fp8_recipe": "mxfp8"}))
    if is_known:
        assert found == read_entry(changed(given, config=FP8))
    else:
        assert f"which {gpu} does not multiply" in found.reason


def test_dispatchers_and_copies_beside_another_microbatch():
    given = changed(MOE, config={"p": 1, "ep": 4})
    plain, flex = entry(given), entry(given, moe_flex_dispatcher_backend="hybridep")
    beside = entry(given, moe_flex_dispatcher_backend="deepep", overlap_moe_expert_parallel_comm=True)
    assert (plain.software.dispatcher, flex.software.dispatcher) == ("alltoall", FLEX)
    assert entry(given, moe_token_dispatcher_type="flex").software == flex.software
    assert entry(given, moe_token_dispatcher_type="alltoall").software == plain.software
    assert "'alltoall', which has no moe_flex_dispatcher_backend" in reason(
        given, moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend="deepep"
    )
    times = [predict(each, default_constants()).estimate.seconds for each in (plain, flex, beside)]
    assert times[0] > times[1] > times[2]
    assert "one stage on each rank" in reason(MOE, overlap_moe_expert_parallel_comm=True)


@pytest.mark.parametrize(
    ("scope", "is_counted"), [("full_iteration", True), ("full", True), ("attn", False), ("moe_router", False)]
)
def test_graphs_of_whole_layers_count(scope, is_counted):
    assert entry(RUN, cuda_graph_scope=scope).software.cuda_graphs is is_counted


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp8_recipe": "tensorwise"}, "config.fp8_recipe is 'tensorwise' with another precision than fp8"),
        ({"fp8_param_gather": True}, "config.fp8_param_gather is True with another precision"),
        ({"moe_flex_dispatcher_backend": "deepep"}, "config.moe_flex_dispatcher_backend is 'deepep' with no experts"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm is True with no experts"),
        ({"moe_flex_dispatcher_backend": "naive"}, "give one of these"),
        ({"moe_token_dispatcher_type": "flex"}, "config.moe_token_dispatcher_type is 'flex' with no experts"),
        ({"moe_token_dispatcher_type": "allgather"}, "should be 'alltoall' or 'flex'; give one of these"),
        ({"cuda_graph_scope": "banana"}, "graphs are of full, full_iteration, attn"),
        ({"cuda_graph_scope": "attn, ful"}, "graphs are of full, full_iteration, attn"),
        ({"tp_comm_overlap": True, "sequence_parallel": False}, "config.tp_comm_overlap asks for products in pieces"),
        ({"technique": "asyncTP", "sequence_parallel": False}, "config.technique asks for products in pieces"),
        ({"technique": "asyncTP", "tp_comm_overlap": False}, "and config.technique has asyncTP; correct one"),
        ({"grad_reduce_in_bf16": True, "precision": "fp16"}, "grad_reduce_in_bf16 is True with precision fp16"),
        ({"grad_reduce_in_bf16": True, "precision": "fp32"}, "grad_reduce_in_bf16 is True with precision fp32"),
        (FP8 | {"fp8_param_gather": True, "zero1": False}, "with a whole optimizer on each replica"),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_refused(config, words):
    assert words in reason(RUN, **config)


def test_qwen3_and_nemotron():
    """Queries of Qwen3 are wider than its residual stream and normalized; Nemotron has plain MLPs without biases."""
    qwen = changed(MOE, model={"name": "Qwen3 30B-A3B", "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128})
    model = entry(qwen).model
    assert (model.query_width, model.key_width, model.qk_norm, model.gated) == (4096, 512, True, True)
    assert read_entry(changed(qwen, model={"head_dim": None, "kv_channels": 128})).model == model
    nemotron = entry(changed(RUN, model={"name": "Nemotron-4 340B", "ffn": None})).model
    assert (nemotron.gated, nemotron.linear_biases, nemotron.norm_vectors, nemotron.ffn_hidden_size) == (
        False, False, 2, 4 * 4096,
    )  # fmt: skip
    assert nemotron.num_positions == 0 and not nemotron.tied_embeddings
