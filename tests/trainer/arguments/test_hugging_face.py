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
YARN = {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 8}
GPT_OSS = {  # as published, but for its size
    **LLAMA, "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "initial_context_length": 4096, "num_experts_per_tok": 4, "num_local_experts": 8, "output_router_logits": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_scaling": {**YARN, "truncate": False},
    "router_aux_loss_coef": 0.9, "sliding_window": 8, "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip
DEEPSEEK_V3 = {  # as published, but for its size
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "attention_bias": False, "ep_size": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "moe_intermediate_size": 32, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 16, "n_shared_experts": 2, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                            "activation_scheme": "dynamic"},
}  # fmt: skip
DEEPSEEK_V2 = {  # Lite, as published, but for its size
    **{key: value for key, value in DEEPSEEK_V3.items() if not key.startswith(("num_next", "quanti"))},
    "model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "seq_aux": True, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": False, "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "topk_method": "greedy", "num_experts_per_tok": 6,
}  # fmt: skip
BERT = {
    "model_type": "bert", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_size": 64,
    "hidden_dropout_prob": 0.1, "intermediate_size": 128, "layer_norm_eps": 1e-12, "max_position_embeddings": 32,
    "num_attention_heads": 4, "num_hidden_layers": 4, "type_vocab_size": 2, "vocab_size": 100,
}  # fmt: skip
MEGATRON_BERT = {**BERT, "model_type": "megatron-bert"}
T5 = {
    "model_type": "t5", "d_ff": 128, "d_kv": 16, "d_model": 64, "dropout_rate": 0.1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-6, "num_heads": 4, "num_layers": 4,
    "num_decoder_layers": 2, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "tie_word_embeddings": False, "vocab_size": 100, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
ALL = {
    "t5": T5,
    "mt5": {**T5, "model_type": "mt5"},
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V2,
    "bert": BERT,
    "megatron-bert": MEGATRON_BERT,
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
    return of_program(config, f"--seq-length 16 --load-hf {folder} {flags}", without)


def of_program(config: dict, flags: str, without: str = MODEL):
    """The configuration of a run of the program that trains this model."""
    if config.get("model_type") in ("bert", "megatron-bert"):
        words = argv(f"{flags} --data-path x --vocab-file y", without=f"{without} --mock-data --tokenizer-type")
        return configuration(words, defaults={"architecture": "bert", "tokenizer_type": "BertWordPieceLowerCase"})
    if config.get("model_type") in ("t5", "mt5"):
        flags = flags.replace("--seq-length 16", "--encoder-seq-length 16 --decoder-seq-length 8")
        flags += " --data-path x --tokenizer-type HuggingFaceTokenizer --tokenizer-model y"
        words = argv(flags, without=f"{without} --mock-data --tokenizer-type")
        return configuration(words, defaults={"architecture": "t5"})
    return configuration(argv(flags, without=without))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_run_takes_the_model_over(kind, tmp_path):
    """From config.json alone; and its flags say the same model, which makes the same config.json."""
    config = ALL[kind]
    args = with_model(tmp_path / "model", config)
    model = model_of(config, "it")
    assert {name: value for name, value in facts_of(args).items() if name in model.facts} == model.facts
    again = config_of(args, dtype="bfloat16", model_type=kind)
    assert again["model_type"] == kind and model_of(again, "again").facts == model.facts
    by_flags = of_program(config, f"--seq-length 16 {' '.join(model.argv())}")
    assert config_of(by_flags, dtype="bfloat16", model_type=kind) == again
    found = config_of(args, dtype="bfloat16")["model_type"]
    assert found == {"mistral": "llama", "mt5": "t5"}.get(kind, kind)  # the same model
    with_model(tmp_path / "model", config, " ".join(model.argv()))  # who says the same may say it


def test_what_tells_a_t5_from_the_first(tmp_path):
    """The published files of the first have neither key; newer files of T5 1.1 have a third one."""
    first = {key: value for key, value in T5.items() if key not in ("feed_forward_proj", "tie_word_embeddings")}
    args = with_model(tmp_path / "first", first)
    assert args.relu and args.scaled_tied_head and not (args.gated_gelu or args.untie_embeddings_and_output_weights)
    again = config_of(args, dtype="float32", model_type="t5")
    assert (again["feed_forward_proj"], again["tie_word_embeddings"]) == ("relu", True)
    newer = {**T5, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert model_of(newer, "it").facts == model_of(T5, "it").facts


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


def test_what_the_keys_of_windows_latents_and_experts_mean(tmp_path):
    """The values of Megatron-LM's own recipes."""
    args = with_model(tmp_path, {**MISTRAL, "sliding_window": 8})
    assert (args.window_size, args.window_attn_skip_freq) == ((7, 0), None)
    args = with_model(tmp_path, {**QWEN_2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3})
    assert (args.window_size, args.window_attn_skip_freq) == ((7, 0), [0, 0, 0, 1])
    args = with_model(tmp_path, GPT_OSS, "--window-size 7,0 --window-attn-skip-freq 2 --quick-geglu")
    assert (args.position_embedding_type, args.rotary_scaling_factor, args.rotary_base) == ("yarn", 4.0, 500_000)
    assert not args.yarn_correction_range_round_to_int and args.yarn_original_max_position_embeddings == 8
    assert (args.glu_linear_offset, args.activation_func_clamp_value, args.softmax_type) == (1.0, 7.0, "learnable")
    assert args.add_bias_linear and not args.swiglu and not args.moe_router_pre_softmax
    args = with_model(tmp_path, DEEPSEEK_V3, "--moe-layer-freq [0]+[1]*3 --rope-type yarn --kv-channels 128")
    assert args.multi_latent_attention and args.qk_layernorm and args.moe_layer_freq == [0, 1, 1, 1]
    assert (args.q_lora_rank, args.kv_lora_rank, args.qk_head_dim) == (24, 16, 8)
    assert (args.qk_pos_emb_head_dim, args.v_head_dim, args.mscale, args.mscale_all_dim) == (4, 12, 1.0, 1.0)
    assert (args.moe_router_score_function, args.moe_router_enable_expert_bias) == ("sigmoid", True)
    assert (args.moe_router_num_groups, args.moe_router_group_topk) == (8, 4)
    assert (args.moe_router_topk_scaling_factor, args.moe_shared_expert_intermediate_size) == (2.5, 64)
    assert (args.mtp_num_layers, args.moe_router_dtype) == (1, "fp32")
    assert with_model(tmp_path, DEEPSEEK_V3, "--mtp-num-layers 0").mtp_num_layers is None
    args = with_model(tmp_path, DEEPSEEK_V2)
    assert (args.q_lora_rank, args.moe_router_topk_scaling_factor, args.moe_router_num_groups) == (None, None, None)
    assert args.moe_router_pre_softmax and not args.moe_router_enable_expert_bias
    for config in (BERT, MEGATRON_BERT):
        args = with_model(tmp_path, config)
        assert (args.architecture, args.bias_gelu_fusion, args.norm_epsilon) == ("bert", False, 1e-12)
        assert args.residual_from_norm == (config is BERT)


@pytest.mark.parametrize(
    "config, message",
    [
        ({**LLAMA, "rope_theta": None}, "rope_theta is missing, and no default is assumed"),
        ({**MIXTRAL, "rope_theta": None}, "rope_theta is missing, and no default is assumed"),
        ({**LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps is nan; give a number"),
        ({**LLAMA, "rope_theta": 10000.5}, "rope_theta is 10000.5; give a whole number"),
        ({**LLAMA, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}, "keep the right one"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "scaled by 'dynamic', and flags can"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "beta_fast is missing"),
        ({**LLAMA, "rope_scaling": {**YARN, "mscale": 0.7}}, "mscale_all_dim None, which implementations"),
        ({**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.2}}, "attention_factor of the rotary positions is"),
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
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "only weights quantized to MXFP4"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "128 x 128 block"),
        ({**LLAMA, "model_type": "gemma"}, "model_type is 'gemma', and these can be converted: llama"),
        ({**LLAMA, "model_type": "roberta"}, "model_type is 'roberta': its positions begin behind the padding's"),
        ({**LLAMA, "model_type": "umt5"}, "model_type is 'umt5': each of its layers has a table of distances"),
        ({**T5, "feed_forward_proj": "gated-silu"}, "'gated-silu', and flags can express only relu and"),
        ({**T5, "dense_act_fn": "relu"}, "feed_forward_proj is gated-gelu, and dense_act_fn 'relu'; keep"),
        ({**T5, "tie_word_embeddings": 1}, "tie_word_embeddings is 1; give true or false"),
        ({**T5, "scale_decoder_outputs": True}, "no flag scales the input of a head of its own"),
        ({**T5, "model_type": "mt5", "tie_word_embeddings": True}, "tie_word_embeddings is True: an mT5 has a head"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window is 4096, and models of this family have no windows"),
        ({**QWEN_2, "use_sliding_window": True, "max_window_layers": None}, "max_window_layers is missing"),
        ({**MIXTRAL, "sliding_window": 0}, "sliding_window is 0, and a token attends to itself"),
        ({**QWEN_3, "layer_types": ["full_attention"]}, "layer_types is .*; give one for each of the 4 layers"),
        ({**QWEN_3, "layer_types": ["full_attention", "sliding_attention"] * 2}, "names 'sliding_attention', and the"),
        ({**QWEN_3, "layer_types": ["chunked_attention"] * 4}, "layer_types names 'chunked_attention'"),
        ({**GPT_OSS, "layer_types": None}, "layer_types is missing"),
        ({**GPT_OSS, "experts_per_token": 2}, "num_experts_per_tok is 4, and experts_per_token 2; keep the right one"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias is False: all linear layers of this family"),
        ({**GPT_OSS, "swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ({**GPT_OSS, "swiglu_limit": None}, "swiglu_limit is missing"),
        ({**DEEPSEEK_V3, "q_lora_rank": None}, "q_lora_rank is missing"),
        ({**DEEPSEEK_V3, "rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05: the norms of the latents have 1e-06"),
        ({**DEEPSEEK_V3, "topk_group": 2}, "rates a group by its 4 best experts, and this family by 2"),
        ({**DEEPSEEK_V3, "norm_topk_prob": False}, "norm_topk_prob is False, and megatron.core divides the scores"),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, "scoring_func is 'softmax': DeepSeek-V3 scores by sigmoid"),
        ({**DEEPSEEK_V3, "rope_interleave": False}, "rope_interleave is False"),
        ({**DEEPSEEK_V3, "num_key_value_heads": 2}, "num_key_value_heads is 2, and the other keys .* make it 4"),
        ({**DEEPSEEK_V3, "first_k_dense_replace": 4}, "of 4 layers none is left with experts"),
        ({**DEEPSEEK_V3, "moe_layer_freq": 2}, "moe_layer_freq is 2, and behind the first 1"),
        ({**DEEPSEEK_V3, "n_shared_experts": 0}, "n_shared_experts is 0"),
        ({**DEEPSEEK_V3, "rope_scaling": {**YARN, "truncate": False}}, "truncate of YaRN is False"),
        ({**DEEPSEEK_V3, "rope_scaling": LLAMA_3}, "scaled by 'llama3', and flags can express only default and yarn"),
        ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}, "by 1; such a model"),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob is True"),
        ({**MEGATRON_BERT, "hidden_act": "gelu_new"}, "hidden_act is 'gelu_new': megatron.core's head of a BERT"),
        ({**MEGATRON_BERT, "is_decoder": True}, "is_decoder is True"),
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
    is_v2 = config["model_type"] == "deepseek_v2"
    with pytest.raises(ValueError, match=message) as error:
        model_of({key: each for key, each in config.items() if each is not None or key == "hidden_act" or is_v2}, "it")
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
        (GPT_OSS, "--window-size 8,0", "--window-size 8,0 contradicts .* --window-size 7,0"),
        (GPT_OSS, "--window-attn-skip-freq 4", r"contradicts .* --window-attn-skip-freq \[1,0,1,0\]"),
        (DEEPSEEK_V3, "--moe-layer-freq 1", r"--moe-layer-freq 1 contradicts .* --moe-layer-freq \[0,1,1,1\]"),
        (DEEPSEEK_V3, "--rope-type rope", "--rope-type rope contradicts .* --rope-type yarn"),
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
    """A program trains its own kinds of models."""
    words = argv(f"--load-hf {tmp_path} --data-path x", without="--mock-data")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match=r"holds a llama, which pretrain_gpt\.py trains; use that"):
        configuration(words, defaults={"architecture": "bert"})
    with pytest.raises(ValueError, match=r"--load-hf belongs to pretrain_gpt\.py and pretrain_bert\.py"):
        configuration(words, defaults={"architecture": "bert-classify"})
