"""From flags to the planner's records."""

import pytest

from megatron import backend

backend.install()

from megatron.planner import Recompute
from megatron.trainer.models.core_config import transformer_config
from megatron.trainer.plan import from_flags
from tests.trainer.arguments.command_line import GPU, arguments


@pytest.mark.parametrize(
    "flags, layers",
    [
        ("--num-layers 6", (6,)),
        ("--num-layers 8 --pipeline-model-parallel-size 4", (2, 2, 2, 2)),
        ("--num-layers 8 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2", (2, 2, 2, 2)),
        ("--num-layers 9 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 3", (2, 2, 2, 3)),
        ("--num-layers 7 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split", (1, 2, 2, 2)),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            (2, 2, 2, 2),
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            (1, 3, 1, 3),
        ),
        ("--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t*2|t|L", (1, 2, 1, 0)),
    ],
)
def test_layers_of_stages(flags, layers):
    """Each stage has the layers that megatron.core gives it, in the order of the stages and not of the ranks."""
    args = arguments(flags, world_size=max(1, int(flags.partition("parallel-size ")[2][:1] or 1)))
    assert from_flags.layers_of_stages(transformer_config(args)) == layers


@pytest.mark.parametrize(
    "flags, recompute",
    [
        ("", Recompute()),
        ("--recompute-activations", Recompute(modules=frozenset({"core_attn"}))),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            Recompute(method="block", num_layers=3),
        ),
        ("--pipeline-recompute", Recompute(whole_stage=True)),
    ],
)
def test_scopes(flags, recompute):
    """Every way to recompute arrives."""
    assert from_flags.activation_setting(arguments(flags)).recompute == recompute


def test_formats():
    """Formats of weights, gradients and activations, and whether attention keeps its scores."""
    state, setting = from_flags.training_state(arguments("--bf16")), from_flags.activation_setting(arguments("--bf16"))
    assert (state.weight_bytes, state.gradient_bytes, setting.element_bytes) == (2, 4, 2)
    assert setting.saves_scores and not from_flags.activation_setting(arguments("--bf16", platform=GPU)).saves_scores
    assert from_flags.activation_setting(arguments("--bf16 --attention-backend unfused", platform=GPU)).saves_scores
    assert from_flags.activation_setting(arguments("", platform=GPU)).saves_scores  # flash attention takes 16 bits only
    assert from_flags.training_state(arguments("--bf16 --grad-reduce-in-bf16")).gradient_bytes == 2
    assert from_flags.training_state(arguments("--fp16")).gradient_bytes == 2
    assert from_flags.training_state(arguments("--optimizer sgd --sgd-momentum 0")).num_moments == 0
    wide = arguments("--bf16 --fp32-residual-connection", platform=GPU)
    assert from_flags.activation_setting(wide).residual_bytes == 4
