"""Memory of a model in FP8 but for its first and last layers: against what the stand-in casts, and at the limits."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.parameters import FP8_COPY_BYTES, stage_matrices
from megatron.planner.memory.unquantized import unquantized_matrices
from megatron.trainer.plan import from_flags
from tests import workers
from tests.trainer.arguments.command_line import GPU, arguments

LAYERS = (3, 3)
HALF = "--num-layers 6 --pipeline-model-parallel-size 2 --bf16 --attention-backend unfused"
SIZES = "--micro-batch-size 2 --seq-length 16 --hidden-size 32"
FP8 = f"{HALF} {SIZES} --no-gradient-accumulation-fusion --fp8-format hybrid --fp8-recipe tensorwise"
ENDS = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 {} --num-layers-at-end-in-bf16 {}"
MODELS = ("", "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2")


def parsed(flags: str):
    found = arguments(f"{FP8} {flags}", world_size=2, platform=GPU)
    return replace(found, padded_vocab_size=128)


def cast_elements(flags: str) -> list[tuple[int, int]]:
    """Of each stage: the elements of inputs, and of weights, that a forward of its layers casts."""
    from transformer_engine.pytorch.module import base

    from megatron.core import parallel_state
    from megatron.trainer.models import core_config, gpt

    parallel_state.initialize_model_parallel()
    found, quantize = [], base.quantize
    try:
        args = parsed(flags)
        made = core_config.transformer_config(args)
        stages = gpt.build_chunks(lambda own: lambda first, last: gpt.gpt_model(
            args, own, pre_process=first, post_process=last
        ), made, stages=(0, 1), layers=LAYERS)  # fmt: skip
        for stage in stages:
            counts = Counter()

            def counted(tensor, recipe, state, slot, kind, counts=counts):
                counts[kind] += tensor.numel()
                return quantize(tensor, recipe, state, slot, kind)

            block = stage.module.decoder
            block.set_input_tensor(
                hidden := torch.randn(16, 2, args.hidden_size, dtype=torch.bfloat16).requires_grad_()
            )
            with mock.patch.object(base, "quantize", counted):
                block(hidden, None)
            found.append((counts["input"], counts["weight"]))
    finally:
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("ends", [(1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_cast_is_what_is_counted(model, ends):
    """An input that is cast is kept in a byte in place of two, and a weight has copies of two bytes an element."""
    flags = f"{model} {ENDS.format(*ends)}"
    [cast] = workers.run(1, f"{__name__}:cast_elements", device="engine", flags=flags)
    args = parsed(flags)
    shape, setting = from_flags.architecture(args), from_flags.activation_setting(args)
    assert setting.fp8 and setting.saves_scores and setting.unquantized == ends
    half, mixed = (activations_of(shape, each).by_stage(LAYERS)[0] for each in (replace(setting, fp8=False), setting))
    matrices = zip(stage_matrices(shape, 1, LAYERS), unquantized_matrices(shape, setting, LAYERS), strict=True)
    assert [(a - b) for a, b in zip(half, mixed, strict=True)] == [inputs for inputs, _ in cast]
    assert [all_of_it - uncast for all_of_it, uncast in matrices] == [weights for _, weights in cast]
    assert FP8_COPY_BYTES == 2


RECOMPUTED = "--recompute-granularity full --recompute-method"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        f"{RECOMPUTED} uniform --recompute-num-layers 3",
        f"{RECOMPUTED} block --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules core_attn mlp --disable-bias-linear",
        "--pipeline-recompute",
        "--num-experts 4 --moe-ffn-hidden-size 64 --moe-layer-freq [0]*1+[1]*5 --disable-bias-linear",
        "--mtp-num-layers 1 --position-embedding-type rope",
    ],
)
def test_limits_and_sums(flags):
    """With no such layer all is in FP8, with nothing but such layers all but further layers in 16 bits; what both ends
    take more is the sum of what each takes."""
    args = parsed(flags)
    shape, setting = from_flags.architecture(args), from_flags.activation_setting(args)

    def stages(**changes) -> torch.Tensor:
        changed = replace(setting, **changes)
        of_stages = activations_of(shape, changed).by_stage(LAYERS)
        return torch.tensor([*of_stages, unquantized_matrices(shape, changed, LAYERS)], dtype=torch.float64)

    eighth, both = stages(), stages(unquantized=(1, 3))
    torch.testing.assert_close(
        both - eighth, stages(unquantized=(1, 0)) + stages(unquantized=(0, 3)) - 2 * eighth, rtol=1e-12, atol=0
    )
    assert (both[0] >= eighth[0]).all() and both[3].all() and not eighth[3].any()
    whole = stages(unquantized=(3, 3))
    without = replace(shape, further=None)
    assert whole[3].tolist() == list(stage_matrices(without, setting.tensor, LAYERS, setting.expert_degrees))
    if shape.further is None and "experts" not in flags:
        assert (whole[:3] - stages(fp8=False)[:3]).abs().max() <= 1e-6
