"""Latent attention, windows, sinks, clamped gates and YaRN train as in one process, whatever the schedule."""

from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron.megatron_model import (
    Case,
    forward_step,
    gpt_model,
    parallel,
    training_data,
)
from tests.pipeline.runtime.stages.megatron.test_provisional import check_predictions
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, EXACT, SPREAD, Outcomes, Row, check, marked

LATENT = {
    "layers": 4,
    "swiglu": True,
    "position": "rope",
    "normalization": "RMSNorm",
    "attention": (
        ("kv_lora_rank", 12), ("qk_head_dim", 8), ("qk_pos_emb_head_dim", 4), ("v_head_dim", 6), ("q_lora_rank", 16),
        ("qk_layernorm", True), ("rotary_scaling_factor", 40.0), ("mscale_all_dim", 1.0),
        ("original_max_position_embeddings", 8),
    ),
}  # fmt: skip
DIRECT = LATENT | {"attention": (*LATENT["attention"][:4], ("q_lora_rank", None), ("rope_type", "rope"))}
SINKS = {
    "layers": 4,
    "swiglu": True,
    "position": "yarn",
    "attention": (
        ("softmax_type", "learnable"), ("window_size", (3, 0)), ("window_attn_skip_freq", 2), ("quick_geglu", True),
        ("glu_linear_offset", 1.0), ("activation_func_clamp_value", 0.5), ("num_query_groups", 2),
        ("yarn_rotary_scaling_factor", 32.0), ("yarn_original_max_position_embeddings", 4), ("yarn_beta_fast", 32.0),
        ("yarn_beta_slow", 1.0), ("yarn_mscale", 1.0), ("yarn_mscale_all_dim", 0.0),
        ("yarn_correction_range_round_to_int", False),
    ),
}  # fmt: skip
FLUSH, TWO_BW = {"schedule": "flush", "batches": (4,) * 4}, {"schedule": "2bw", "batches": (4,) * 5}
EXPERTS = {
    "experts": 4,
    "router": (("moe_shared_expert_intermediate_size", 32), ("moe_router_score_function", "sigmoid")),
}
SELECTED = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mla_up_proj")}
TWO, FOUR = (2, 1, 1), (4, 1, 1)

TABLE = {
    "latents, flush": Row(LATENT | FLUSH, layouts=((1, 1, 1), FOUR)),
    "latents, 2bw": Row(LATENT | TWO_BW, layouts=((1, 1, 1), FOUR)),
    "latents, 2bw, clipped, tied": Row(LATENT | TWO_BW | {"clip": 0.5, "tied": True}, layouts=(FOUR,), allowed=CLOSE),
    "latents, 2bw, experts, recomputed parts": Row(LATENT | TWO_BW | EXPERTS | SELECTED, layouts=(TWO,)),
    "latents, 2bw, recompute instructions": Row(LATENT | TWO_BW | {"recompute": True, "dropout": 0.1}, layouts=(TWO,)),
    "latents, 2bw, full recompute": Row(LATENT | TWO_BW | {"recompute_granularity": "full"}, layouts=(TWO,)),
    "latents, 2bw, balanced": Row(LATENT | TWO_BW | {"balance": True}, layouts=(FOUR,)),
    "latents, 2bw, bf16": Row(LATENT | TWO_BW | {"dtype": "bfloat16"}, layouts=(TWO,)),
    "latents, 2bw, tensor ranks": Row(LATENT | TWO_BW, layouts=((1, 2, 1),), allowed=SPREAD),
    "latents, 2bw, sequence parallel": Row(
        LATENT | TWO_BW | {"sequence_parallel": True}, layouts=((2, 2, 1),), allowed=SPREAD
    ),
    "latents, 2bw, distributed optimizer": Row(
        LATENT | TWO_BW | {"distributed_optimizer": True}, layouts=((2, 1, 2),), allowed=CLOSE
    ),
    "latents, zb-h1": Row(LATENT | FLUSH | {"schedule": "zb-h1"}, layouts=(FOUR,)),
    "latents, zb-h1, recomputed parts": Row(LATENT | FLUSH | SELECTED | {"schedule": "zb-h1"}, layouts=(TWO,)),
    "latents, interleaved": Row(LATENT | FLUSH | {"schedule": "interleaved", "v": 2, "drains": (1,)}, layouts=(TWO,)),
    "direct queries, 2bw": Row(DIRECT | TWO_BW, layouts=(TWO,)),
    "sinks, flush": Row(SINKS | FLUSH, layouts=((1, 1, 1), FOUR)),
    "sinks, 2bw": Row(SINKS | TWO_BW, layouts=((1, 1, 1), FOUR)),
    "sinks, 2bw, recompute": Row(SINKS | TWO_BW | {"recompute": True, "dropout": 0.1}, layouts=(TWO,)),
    "sinks, 2bw, sequence parallel": Row(
        SINKS | TWO_BW | {"sequence_parallel": True, "clip": 0.5}, layouts=((2, 2, 1),), allowed=SPREAD
    ),
    "sinks, 2bw, distributed optimizer": Row(
        SINKS | TWO_BW | {"distributed_optimizer": True}, layouts=((2, 1, 2),), allowed=CLOSE
    ),
    "sinks, 2bw, experts": Row(SINKS | TWO_BW | EXPERTS, layouts=(TWO,)),
    "sinks, zb-h1": Row(SINKS | FLUSH | {"schedule": "zb-h1"}, layouts=(TWO,)),
}  # fmt: skip
USUAL = {
    "latents, 2bw", "latents, 2bw, tensor ranks", "latents, zb-h1", "sinks, 2bw, sequence parallel",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(TABLE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=TABLE.keys() - USUAL), ids=str)
def test_training_equals_one_process(outcomes, name, layout):
    """Losses, norms and weights, sinks of heads included, are those of a plain loop."""
    check(outcomes[name, layout], TABLE[name].allowed)


@pytest.mark.full
@pytest.mark.parametrize("model", [LATENT, SINKS], ids=["latents", "sinks"])
def test_predictions_equal_one_process(model):
    """Provisional weights are those of the plain loop."""
    case = Case(**model | TWO_BW | {"predict": True}, p=2)
    check_predictions(case, EXACT)


def put_off() -> tuple[set[str], set[str]]:
    """Names of weights whose products a split backward puts off, and of those that have a gradient behind its I."""
    from megatron.pipeline.runtime.stages.megatron.split_linears import putting_off

    case = Case(**LATENT | FLUSH)
    with parallel(case):
        model = gpt_model(case)
        names = {parameter: name.split(".")[-2] for name, parameter in model.named_parameters()}
        late = mock.Mock()
        output, loss = forward_step(case)(training_data(case, 0), model)
        with putting_off(late):
            loss(output)[0].backward()
        called = {names[call.args[0]] for call in late.put_off.call_args_list}
        return called, {name for parameter, name in names.items() if parameter.grad is not None}


def test_products_of_latents_wait_for_their_w():
    """All five linear layers of latents are split, the norms between them are not."""
    ((late, early),) = workers.run(1, f"{__name__}:put_off")
    assert late >= {f"linear_{name}" for name in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")}
    assert early >= {"q_layernorm", "kv_layernorm"} and not late & early
