"""Each fact about a model, and each part that is not built here, refuses a checkpoint on its own."""

import pytest

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint import arguments
from tests.trainer.checkpoint.test_arguments import here, there

ROPE, GATED = "--position-embedding-type rope ", " --swiglu --ffn-hidden-size 4096 "
# Fact -> what the checkpoint has otherwise, and what the flag of that name takes.
PLAIN = dict(
    num_layers=12, hidden_size=512, num_attention_heads=8, ffn_hidden_size=2048, kv_channels=128, swiglu=True,
    normalization="RMSNorm", apply_residual_connection_post_layernorm=True, quick_geglu=True, residual_from_norm=True,
    untie_embeddings_and_output_weights=True, position_embedding_type="rope", max_position_embeddings=1024,
)  # fmt: skip
OF_ROPE = dict(
    rotary_base=500000, rotary_percent=0.5, rotary_interleaved=True, rotary_seq_len_interpolation_factor=4,
    use_rope_scaling=True,
)  # fmt: skip
GROUPS = {"group_query_attention": True, "num_query_groups": 4}
SCALING = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}


FURTHER = ROPE + "--mtp-num-layers 1"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 "
OF_EXPERTS = dict(
    moe_ffn_hidden_size=128, moe_shared_expert_intermediate_size=64, moe_router_topk=3,
    moe_router_pre_softmax=True, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5,
    moe_router_num_groups=2, moe_router_group_topk=2, moe_apply_probs_on_input=True,
    moe_router_enable_expert_bias=True,
)  # fmt: skip
THEIR_EXPERTS = dict(
    num_experts=4, moe_ffn_hidden_size=64, moe_layer_freq=1, moe_router_topk=2, moe_router_score_function="softmax"
)

LATENT, YARN, WINDOW = "--multi-latent-attention ", "--position-embedding-type yarn ", "--window-size 127,0 "
OF_LATENTS = dict(
    q_lora_rank=16, kv_lora_rank=64, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64, rope_type="rope",
    mscale_all_dim=1.0,
)  # fmt: skip
OF_YARN = dict(
    rotary_scaling_factor=32.0, mscale=2.0, yarn_original_max_position_embeddings=512, yarn_beta_fast=16.0,
    yarn_beta_slow=2.0,
)  # fmt: skip


def plain(name, value, flags="", **others):
    return flags, {**others, name: value}, f"Pass --{name.replace('_', '-')}{'' if value is True else f' {value}'}"


# Fact -> flags here, what the checkpoint has otherwise, and what the sentence tells to do.
FACTS = {
    **{name: plain(name, value) for name, value in PLAIN.items()},
    **{name: plain(name, value, ROPE) for name, value in OF_ROPE.items()},
    **{name: plain(name, value, EXPERTS, **THEIR_EXPERTS) for name, value in OF_EXPERTS.items()},
    **{name: plain(name, value, LATENT, multi_latent_attention=True) for name, value in OF_LATENTS.items()},
    **{name: plain(name, value, YARN, position_embedding_type="yarn") for name, value in OF_YARN.items()},
    "yarn_correction_range_round_to_int": (
        YARN,
        {"position_embedding_type": "yarn", "yarn_correction_range_round_to_int": False},
        "Pass --no-yarn-corr.*",
    ),
    "multi_latent_attention": plain("multi_latent_attention", True),
    "softmax_type": plain("softmax_type", "learnable"),
    "window_size": ("", {"window_size": (128, 0)}, "Pass --window-size 128,0"),
    "window_attn_skip_freq": (
        WINDOW,
        {"window_size": (127, 0), "window_attn_skip_freq": 2},
        r"Pass --window-attn-skip-freq \[1, 0, 1.*",
    ),
    "glu_linear_offset": plain("glu_linear_offset", 1.0),
    "activation_func_clamp_value": (
        "--swiglu --ffn-hidden-size 4096 --activation-func-clamp-value 7",
        {"swiglu": True},
        "Leave --activation-func-clamp-value out",
    ),
    "num_experts": plain("num_experts", 8),
    "hybrid_layer_pattern": ("", {"hybrid_layer_pattern": "*-" * 24}, "Pass --hybrid-layer-pattern [*-]*"),
    "mtp_num_layers": plain("mtp_num_layers", 2, ROPE),
    "moe_layer_freq": (EXPERTS, THEIR_EXPERTS | {"moe_layer_freq": 2}, r"Pass --moe-layer-freq \[1, 0, 1.*"),
    "norm_epsilon": ("", {"layernorm_epsilon": 1e-6}, "Pass --norm-epsilon 1e-06"),
    "apply_layernorm_1p": ("", {"layernorm_zero_centered_gamma": True}, "Pass --apply-layernorm-1p"),
    "squared_relu": ("--squared-relu", {}, "Leave --squared-relu out"),
    "qk_layernorm": ("--qk-layernorm", {}, "Leave --qk-layernorm out"),
    "num_query_groups": ("", GROUPS, "Pass --group-query-attention --num-query-groups 4"),
    "rope_scaling_factor": (ROPE + "--use-rope-scaling", SCALING, "Pass --rope-scaling-factor 32.0"),
    "add_bias_linear": ("--disable-bias-linear", {}, "Leave --disable-bias-linear out"),
    "add_qkv_bias": ("--disable-bias-linear", {"add_bias_linear": False}, "Pass --add-qkv-bias"),
    "bert_binary_head": ("--bert-no-binary-head", {}, "Leave --bert-no-binary-head out"),
}
# Megatron-LM's argument -> a value that asks for what is not built here.
PARTS = {
    "experimental_attention_variant": "gated_delta_net",
    "attention_output_gate": True,
    "softmax_scale": 0.1,
    "no_rope_freq": 4,
    "qk_l2_norm": True,
    "use_mup": True,
    "moe_shared_expert_gate": True,
    "moe_latent_size": 64,
    "is_hybrid_model": True,
    "hybrid_override_pattern": "M-M*",
    "hybrid_layer_pattern": "M-M*",
    "heterogeneous_layers_config_path": "blocks.json",
    "heterogeneous_layers_config_encoded_json": "{}",
    "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    "position_embedding_type": "mrope",
    "normalization": "L2Norm",
}
# Argument that a checkpoint of an older program lacks -> flags here that ask for something else than it had.
LATE = {
    "use_rope_scaling": ROPE + "--use-rope-scaling",
    "rope_scaling_factor": ROPE + "--use-rope-scaling --rope-scaling-factor 32",
    "rotary_interleaved": ROPE + "--rotary-interleaved",
    "rotary_base": ROPE + "--rotary-base 500000",
    "rotary_percent": ROPE + "--rotary-percent 0.5",
    "rotary_seq_len_interpolation_factor": ROPE + "--rotary-seq-len-interpolation-factor 2",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "layernorm_epsilon": "--norm-epsilon 1e-6",
    "position_embedding_type": ROPE,
    "normalization": "--normalization RMSNorm",
    "apply_residual_connection_post_layernorm": "--apply-residual-connection-post-layernorm",
    "residual_from_norm": "--residual-from-norm",
    "swiglu": "--swiglu --ffn-hidden-size 4096",
    "squared_relu": "--squared-relu",
    "quick_geglu": "--quick-geglu --ffn-hidden-size 4096",
    "qk_layernorm": "--qk-layernorm",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "add_bias_linear": "--disable-bias-linear --add-qkv-bias",
    "num_experts": EXPERTS,
    "multi_latent_attention": LATENT,
    "softmax_type": "--softmax-type off-by-one",
    "window_size": WINDOW,
    "glu_linear_offset": GATED + "--glu-linear-offset 1",
    "activation_func_clamp_value": GATED + "--activation-func-clamp-value 7",
    "mtp_num_layers": FURTHER,
}


def late(name, flags):
    """A checkpoint of a program without the argument `name`, of a model with rotary positions where `flags` ask so."""
    saved = there(use_rope_scaling="--rope-scaling-factor" in flags)
    if ROPE in flags and name != "position_embedding_type":
        saved.position_embedding_type = "rope"
    saved.swiglu = GATED in flags
    delattr(saved, name)
    return saved


def test_the_tables_know_every_entry():
    """What is compared later needs a line here, too."""
    classes = arguments._ONLY_OF.keys() - {"bert_binary_head"}  # tests/trainer/run/test_texts.py
    assert set(FACTS) | classes == set(arguments._facts(there()))
    assert set(PARTS) == {*arguments._NOT_BUILT_HERE, "hybrid_layer_pattern"}
    theirs = arguments.OTHER_NAMES
    of_t5 = {name for name, owners in arguments._ONLY_OF.items() if owners == ("t5",)}  # tests/trainer/run/test_t5.py
    with_layers = {"hybrid_layer_pattern"}  # says their number, too
    late_ones = arguments.WITHOUT_IT.keys() - with_layers - of_t5
    assert set(LATE) == {theirs.get(name, name) for name in late_ones}
    assert set(arguments.WITHOUT_IT) <= set(arguments.MODEL_ARGUMENTS)


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_is_compared(name):
    """The sentence names it, and the flag to give or to leave out; with that flag the checkpoint is of this model."""
    flags, changes, remedy = FACTS[name]
    if ROPE in flags:
        changes = {"position_embedding_type": "rope", **changes}
    bert = name == "bert_binary_head"
    with pytest.raises(CheckpointError, match=f"another model: {name} is .* there and .* here. {remedy}, or pass"):
        arguments.check_same_model(here(flags, bert=bert), there(**changes), "DIR")


@pytest.mark.parametrize("name", PARTS)
def test_every_part_that_is_not_built_is_refused(name):
    """By its name, also where --use-checkpoint-args asks for it; its neutral values pass."""
    with pytest.raises(CheckpointError, match=f"not built here: {name} is .* there; train it with Megatron-LM"):
        arguments.check_same_model(here(), there(**{name: PARTS[name]}), "DIR")
    for value in arguments._NOT_BUILT_HERE.get(name, (None, "")):
        assert not list(arguments.parts_not_built(there(**{name: value})))


@pytest.mark.parametrize("name", LATE)
def test_a_switch_that_came_later_was_off(name):
    """A checkpoint of a program without the argument holds a model without it, and gives that to whoever asks."""
    ours = next((ours for ours, theirs in arguments.OTHER_NAMES.items() if theirs == name), name)
    saved = late(name, LATE[name])
    plain = ROPE if getattr(saved, "position_embedding_type", None) == "rope" else ""
    if getattr(saved, "use_rope_scaling", False):
        plain += "--use-rope-scaling"
    plain += GATED * getattr(saved, "swiglu", False)
    args = here(LATE[name])
    with pytest.raises(CheckpointError, match=f"another model: {ours} is "):
        arguments.check_same_model(args, saved, "DIR")
    arguments.check_same_model(here(plain), saved, "DIR")
    args.given = (ours,)
    args = arguments.with_saved_arguments(args, saved, "DIR")
    arguments.check_same_model(args, saved, "DIR")


def test_a_vocabulary_one_multiple_larger_is_another():
    """Sizes that the same vocabulary could have been padded to pass, and the next ones do not."""
    for size, multiple, same in ((50304, 128, True), (50432, 128, False), (50176, 128, False), (50432, 256, True)):
        saved = there(padded_vocab_size=size, make_vocab_size_divisible_by=multiple)
        if same:
            arguments.check_same_model(here(), saved, "DIR")
            continue
        with pytest.raises(
            CheckpointError, match=f"padded_vocab_size is {size} there and 50304 here. Use the tokenizer"
        ):
            arguments.check_same_model(here(), saved, "DIR")
