"""Counted parameters are those of megatron.core's modules."""

import pytest
import torch

from megatron.planner import Architecture
from megatron.planner.parameters import stage_parameters
from tests import workers
from tests.training.arguments_helper import arguments

SHAPES = (
    "",
    "--untie-embeddings-and-output-weights --position-embedding-type rope --swiglu --disable-bias-linear "
    "--normalization RMSNorm --group-query-attention --num-query-groups 2 --kv-channels 24",
    "--qk-layernorm --add-qkv-bias --disable-bias-linear --ffn-hidden-size 96",
    "--quick-geglu --position-embedding-type none --num-layers 6 --decoder-first-pipeline-num-layers 1",
    "--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
)


def count_case(tensor: int, pipeline: int, shapes: list[str]) -> tuple[int, list[tuple[int, int]]]:
    """This rank's stage, and for each shape (counted by the planner, elements of the real model's parameters)."""
    from megatron.core import parallel_state
    from megatron.training import config, models, plan

    parallel_state.initialize_model_parallel(tensor, pipeline)
    stage, counts = parallel_state.get_pipeline_model_parallel_rank(), []
    try:
        for flags in shapes:
            args = arguments(
                f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} {flags}",
                world_size=torch.distributed.get_world_size(),
            )
            args.padded_vocab_size = 256
            made = config.transformer_config(args)
            model = models.gpt_model(
                args, made, pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )  # fmt: skip
            counted = stage_parameters(plan.architecture(args), tensor, plan.layers_of_stages(made))
            counts.append((counted[stage], models.num_parameters([model])))
    finally:
        parallel_state.destroy_model_parallel()
    return stage, counts


@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 2)])
def test_parameters_of_gpt(tensor, pipeline):
    """Every stage and tensor rank of GPTs of several shapes has as many parameters as counted."""
    shapes = [flags for flags in SHAPES if pipeline > 1 or "pipeline" not in flags]
    results = workers.run(
        tensor * pipeline, "tests.planner.test_parameters:count_case", tensor=tensor, pipeline=pipeline, shapes=shapes
    )
    assert {stage for stage, _ in results} == set(range(pipeline))
    for stage, counts in results:
        for flags, (counted, real) in zip(shapes, counts, strict=True):
            assert counted == real, (stage, flags)


def bert_case(tensor: int, pipeline: int) -> tuple[int, int]:
    """This rank's stage, and the parameters of its part of a BERT."""
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.training import config

    parallel_state.initialize_model_parallel(tensor, pipeline)
    try:
        args = arguments(
            f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}",
            world_size=torch.distributed.get_world_size(),
        )
        model = BertModel(
            config=config.transformer_config(args), num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec,
            vocab_size=256, max_sequence_length=32, pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(), share_embeddings_and_output_weights=True,
            add_binary_head=True,
        )  # fmt: skip
        count = sum(parameter.nelement() for parameter in model.parameters())
        return parallel_state.get_pipeline_model_parallel_rank(), count
    finally:
        parallel_state.destroy_model_parallel()


def test_parameters_of_bert():
    """BERT's token types, masked-language head and binary head are counted, on the stage that holds them."""
    shape = Architecture(
        num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=4, kv_channels=16,
        sequence_length=32, vocabulary_size=256, num_positions=32, num_token_types=2, masked_head=True,
        binary_head=True,
    )  # fmt: skip
    counted = stage_parameters(shape, 2, (2, 2))
    for stage, count in workers.run(4, "tests.planner.test_parameters:bert_case", tensor=2, pipeline=2):
        assert counted[stage] == count


def test_parameters_of_published_models():
    """The GPT-3 models of BPipe's Table 1 have the parameters that their names say: 12.9, 96 and 134 billion."""
    for num_layers, hidden_size, heads, billions in (
        (40, 5120, 40, 12.9),
        (80, 9984, 104, 96.2),
        (84, 11520, 120, 134.4),
    ):
        shape = Architecture.gpt3(
            num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, sequence_length=2048,
            vocabulary_size=51200,
        )  # fmt: skip
        assert sum(stage_parameters(shape, 1, [num_layers])) == pytest.approx(1e9 * billions, rel=0.01)
