"""Counted parameters are those of megatron.core's modules."""

from dataclasses import replace

import pytest
import torch

from megatron.planner import Architecture
from megatron.planner.memory.owned_parameters import parameters
from megatron.planner.memory.parameters import stage_parameters
from tests import workers
from tests.planner.memory.test_activations import LATENT
from tests.trainer.arguments.bert_command_line import bert_arguments
from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.text_helper import text_arguments
from tests.trainer.run.vision_helper import vision_arguments

SHAPES = (
    "",
    "--untie-embeddings-and-output-weights --position-embedding-type rope --swiglu --disable-bias-linear "
    "--normalization RMSNorm --group-query-attention --num-query-groups 2 --kv-channels 24",
    "--qk-layernorm --add-qkv-bias --disable-bias-linear --ffn-hidden-size 96",
    "--quick-geglu --position-embedding-type none --num-layers 6 --decoder-first-pipeline-num-layers 1",
    f"{LATENT} --q-lora-rank 40 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias",
    f"{LATENT} --qk-layernorm --softmax-type learnable",
    "--softmax-type learnable --window-size 3,0 --group-query-attention --num-query-groups 2 --quick-geglu",
    "--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--mtp-num-layers 2 --position-embedding-type rope",
    "--mtp-num-layers 1 --position-embedding-type none --untie-embeddings-and-output-weights --disable-bias-linear "
    "--swiglu",
)


def counted_and_real(args, made, tensor: int, stage: int, model) -> tuple[tuple, tuple]:
    """The number of a stage's parameters and the size of each: the planner's, and those of the real model."""
    from megatron.trainer.models.gpt import num_parameters
    from megatron.trainer.plan import from_flags

    shape, layers = from_flags.architecture(args), from_flags.layers_of_stages(made)
    ends = {"is_first": stage == 0, "is_last": stage == len(layers) - 1}
    ends["further"] = shape.further_of_stages(len(layers))[stage]
    sizes = sorted(size for _, size in parameters(shape, tensor, layers[stage], **ends))
    real = sorted(each.numel() for each in model.parameters())
    return (stage_parameters(shape, tensor, layers)[stage], sizes), (num_parameters([model]), real)


def count_case(kind: str, tensor: int, pipeline: int, shapes: list[str]) -> tuple[int, list[tuple]]:
    """This rank's stage, and for each shape what `counted_and_real` gives."""
    from megatron.core import parallel_state
    from megatron.trainer.models import bert, classifiers, core_config, gpt

    arguments_of, build = {
        "GPT": (arguments, gpt.gpt_model),
        "BERT": (bert_arguments, bert.bert_model),
        "ViT classifier": (vision_arguments, classifiers.VisionTransformer.build),
        "BERT classifier": (text_arguments, classifiers.BertClassifier.build),
    }[kind]
    parallel_state.initialize_model_parallel(tensor, pipeline)
    stage, counts = parallel_state.get_pipeline_model_parallel_rank(), []
    try:
        for flags in shapes:
            args = arguments_of(
                f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} {flags}",
                world_size=torch.distributed.get_world_size(),
            )
            args = args if "classifier" in kind else replace(args, padded_vocab_size=256)
            made = core_config.transformer_config(args)
            model = build(
                args, made, pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )  # fmt: skip
            counts.append(counted_and_real(args, made, tensor, stage, model))
    finally:
        parallel_state.destroy_model_parallel()
    return stage, counts


@pytest.mark.parametrize(
    ("kind", "tensor", "pipeline", "shapes"),
    [
        ("GPT", 1, 1, [flags for flags in SHAPES if "pipeline" not in flags]),
        pytest.param("GPT", 2, 2, SHAPES, marks=pytest.mark.full),
        ("BERT", 2, 2, ["", "--bert-no-binary-head --untie-embeddings-and-output-weights"]),
        ("ViT classifier", 2, 2,
         ["", "--disable-vision-class-token --patch-dim 2 --num-classes 70 --normalization RMSNorm"]),
        ("BERT classifier", 2, 2, ["", "--bert-no-binary-head --num-classes 70"]),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_models(kind, tensor, pipeline, shapes):
    """Every stage and tensor rank has as many parameters as counted: of GPTs of several shapes; of BERTs with their
    token types and heads; of classifiers with patches, class token, pooler and classes."""
    case, asked = f"{__name__}:count_case", {"tensor": tensor, "pipeline": pipeline, "shapes": shapes}
    results = workers.run(tensor * pipeline, case, kind=kind, **asked)
    assert {stage for stage, _ in results} == set(range(pipeline))
    for stage, counts in results:
        for flags, (counted, real) in zip(shapes, counts, strict=True):
            assert counted == real, (stage, flags)


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
