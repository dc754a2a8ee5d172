"""config.json and flags: what each key means, both ways; nothing is assumed, and contradictions are refused by name."""

import json

import pytest

from megatron.trainer.arguments.hugging_face import config_of, facts_of, model_of
from megatron.trainer.arguments.model_families import FAMILIES
from tests.trainer.arguments.command_line import argv, configuration

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "rope_theta": 500000.0, "torch_dtype": "bfloat16", "bos_token_id": 1,
}  # fmt: skip
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
QWEN_2 = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
QWEN_3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32}
QWEN_3_MOE = {**QWEN_3, **EXPERTS, "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
GPT_2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 100, "n_positions": 32,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
ALL = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN_2,
    "qwen3": QWEN_3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN_3_MOE,
    "gpt2": GPT_2,
}
MODEL = "--num-layers --hidden-size --num-attention-heads --max-position-embeddings --vocab-size --seq-length"


def with_model(folder, config: dict, flags: str = "", *, without: str = MODEL):
    """The configuration of a run that starts from a model with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return configuration(argv(f"--seq-length 16 --load-hf {folder} {flags}", without=without))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_takes_the_model_over(kind, tmp_path):
    """From config.json alone; and its flags say the same model, which makes the same config.json."""
    config = ALL[kind]
    args = with_model(tmp_path / "model", config)
    model = model_of(config, "it")
    assert {name: value for name, value in facts_of(args).items() if name in model.facts} == model.facts
    again = config_of(args, dtype="bfloat16", model_type=kind)
    assert again["model_type"] == kind and model_of(again, "again").facts == model.facts
    by_flags = configuration(argv(f"--seq-length 16 {' '.join(model.argv())}", without=MODEL))
    assert config_of(by_flags, dtype="bfloat16", model_type=kind) == again
    found = config_of(args, dtype="bfloat16")["model_type"]
    assert found == ("llama" if kind == "mistral" else kind)  # the same model
    with_model(tmp_path / "model", config, " ".join(model.argv()))  # who says the same may say it


def test_what_the_keys_mean(tmp_path):
    """The values that a user of Megatron-LM would write by hand."""
    args = with_model(tmp_path, {**MIXTRAL, "rope_theta": 1e6})
    assert (args.rotary_base, args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (1_000_000, 8, 2, 96)
    assert (args.group_query_attention, args.num_query_groups, args.kv_channels) == (True, 2, 16)
    assert args.swiglu and args.normalization == "RMSNorm" and not args.add_bias_linear
    assert args.untie_embeddings_and_output_weights and args.norm_epsilon == 1e-6 and args.hidden_dropout == 0.0
    args = with_model(tmp_path, {**LLAMA, "rope_scaling": {**LLAMA_3, "factor": 32.0}, "tie_word_embeddings": True})
    assert args.use_rope_scaling and args.rope_scaling_factor == 32.0
    assert not args.untie_embeddings_and_output_weights
    args = with_model(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert args.rotary_seq_len_interpolation_factor == 4
    assert not with_model(tmp_path, QWEN_3_MOE).moe_router_pre_softmax
    assert with_model(tmp_path, {**QWEN_3_MOE, "norm_topk_prob": False}).moe_router_pre_softmax
    args = with_model(tmp_path, QWEN_2, "--max-position-embeddings 16 --attention-dropout 0.1")
    assert args.add_qkv_bias and (args.max_position_embeddings, args.attention_dropout) == (16, 0.1)
    assert not with_model(tmp_path, {**GPT_2, "activation_function": "gelu"}).bias_gelu_fusion


@pytest.mark.parametrize(
    "config, message",
    [
        ({**LLAMA, "rope_theta": None}, "rope_theta is missing, and no default is assumed"),
        ({**MIXTRAL, "rope_theta": None}, "rope_theta is missing, and no default is assumed"),
        ({**LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps is nan; give a number"),
        ({**LLAMA, "rope_theta": 10000.5}, "rope_theta is 10000.5; give a whole number"),
        ({**LLAMA, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}, "keep the right one"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled by 'yarn', and flags say"),
        ({**LLAMA, "rope_scaling": {"factor": 4.0}}, "scaled by None"),
        ({**LLAMA, "rope_scaling": {**LLAMA_3, "low_freq_factor": 2.0}}, "low_freq_factor is 2.0, and"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 1.5}}, "factor is 1.5; give a whole number"),
        ({**LLAMA, "rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu': the gated layers of this family"),
        ({**LLAMA, "hidden_act": None}, "hidden_act is None"),
        ({**LLAMA, "rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({**LLAMA, "attention_bias": True}, "attention_bias is True: linear layers with this bias alone"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias is True"),
        ({**LLAMA, "tie_word_embeddings": None}, "tie_word_embeddings is missing"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings is 1; give true or false"),
        ({**LLAMA, "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64'; give a whole number"),
        ({**QWEN_3, "head_dim": None}, "head_dim is missing"),
        ({**LLAMA, "num_attention_heads": 5}, "hidden_size 64 is not divisible by num_attention_heads 5"),
        ({**LLAMA, "head_dims": 16}, r"head_dims is 16, and no such key of llama is .* nearest is head_dim"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({**LLAMA, "model_type": "gpt_oss"}, "model_type is 'gpt_oss', and these can be converted: llama"),
        ({**MIXTRAL, "sliding_window": 4096}, "sliding_window is 4096, and windows are not taken over"),
        ({**QWEN_2, "use_sliding_window": True}, "sliding_window is 4096, and windows are not taken over"),
        ({**QWEN_3, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types names 'sliding_attention'"),
        ({**QWEN_3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step is 2: every layer has experts here"),
        ({**QWEN_3_MOE, "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({**QWEN_3_MOE, "norm_topk_prob": None}, "norm_topk_prob is missing"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({**GPT_2, "activation_function": "relu"}, "activation_function is 'relu'"),
        ({**GPT_2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ],
)  # fmt: skip
def test_what_no_flag_says_is_refused(config, message):
    """By key and value: no default, no second guess."""
    with pytest.raises(ValueError, match=message) as error:
        model_of({key: value for key, value in config.items() if value is not None or key == "hidden_act"}, "it")
    assert "\n" not in str(error.value) and str(error.value).startswith("it: ")


@pytest.mark.parametrize(
    "config, flags, message",
    [
        (MIXTRAL, "--rotary-base 10000", "10000 contradicts .*config.json, which says --rotary-base 500000; give"),
        (LLAMA, "--norm-epsilon 1e-5", "--norm-epsilon 1e-05 contradicts .* --norm-epsilon 1e-06"),
        (LLAMA, "--qk-layernorm", "--qk-layernorm contradicts .* says that qk_layernorm is False; leave the flag out"),
        (LLAMA, "--use-rope-scaling", "--use-rope-scaling contradicts"),
        (LLAMA, "--kv-channels 32", "--kv-channels 32 contradicts .* --kv-channels 16"),
        (LLAMA, "--squared-relu", "--squared-relu contradicts"),
        (LLAMA, "--vocab-size 128", "--vocab-size 128 contradicts .* --vocab-size 100"),
        ({**LLAMA, "tie_word_embeddings": True}, "--untie-embeddings-and-output-weights",
         "--untie-embeddings-and-output-weights contradicts .* is False; leave the flag out"),
        (LLAMA, "--num-experts 4", "--num-experts 4 contradicts .* says nothing of --num-experts; leave the flag out"),
        (QWEN_3_MOE, "--moe-router-pre-softmax", "--moe-router-pre-softmax contradicts"),
        (MIXTRAL, "--moe-layer-freq 2", "--moe-layer-freq 2 contradicts"),
        (GPT_2, "--no-bias-gelu-fusion", "--no-bias-gelu-fusion contradicts .*_fusion is True; leave the flag out"),
        (GPT_2, "--use-rotary-position-embeddings", "--use-rotary-position-embeddings contradicts"),
        (GPT_2, "--no-position-embedding", "--no-position-embedding contradicts"),
        (GPT_2, "--max-position-embeddings 16", "--max-position-embeddings 16 contradicts"),
        (LLAMA, "--pretrained-checkpoint x", "--load-hf and --pretrained-checkpoint exclude each other"),
        (LLAMA, "--load-hf /none", "--load-hf /none is no folder"),
    ],
)  # fmt: skip
def test_a_contradicting_flag_is_refused(config, flags, message, tmp_path):
    """By the flag, both values and the remedy."""
    with pytest.raises(ValueError, match=message) as error:
        with_model(tmp_path, config, flags)
    assert "\n" not in str(error.value)


def test_the_same_in_other_words(tmp_path):
    """Flags of a published command line that say what config.json says."""
    flags = "--no-position-embedding --use-rotary-position-embeddings --moe-layer-freq ([1]*4) --hidden-dropout 0.1"
    assert with_model(tmp_path, MIXTRAL, flags).position_embedding_type == "rope"
    every_head = {**LLAMA, "num_key_value_heads": 4}
    flags = "--group-query-attention --num-query-groups 4"
    assert with_model(tmp_path, every_head, flags).kv_channels == 16


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--squared-relu", "the model is of no family that can be converted; nearest is"),
        ("--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --rotary-percent 0.5",
         "nearest is llama, where --rotary-percent is 1.0, and it is 0.5 here"),
    ],
)  # fmt: skip
def test_a_model_of_no_family_is_refused(flags, message):
    """With the flag that does not fit."""
    with pytest.raises(ValueError, match=message):
        config_of(configuration(argv(flags)), dtype="float32")


def test_other_programs_do_not_take_it(tmp_path):
    """A BERT, whose layers Hugging Face's differ from, says so."""
    words = argv(f"--load-hf {tmp_path} --data-path x", without="--mock-data")
    with pytest.raises(ValueError, match=r"--load-hf belongs to pretrain_gpt\.py"):
        configuration(words, defaults={"architecture": "bert"})
