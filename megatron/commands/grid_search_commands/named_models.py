"""Models that `--model` knows by name: what the `config.json` of each says of its shape.

GPT-3 has GPT-2's layers; its sizes are those of Brown et al. 2020 (175B), and of BPipe's Table 1. The others are the
files that their makers published beside the weights.
"""

from typing import Any

_LLAMA = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size")  # fmt: skip
_GPT2 = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
_BERT = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
         "max_position_embeddings")  # fmt: skip
_LLAMA_31 = {
    "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}
}  # fmt: skip
_QWEN = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6}
_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ("gpt2", "gpt2", _GPT2, (12, 768, 12, 50257, 1024), {}),
    ("gpt2-medium", "gpt2", _GPT2, (24, 1024, 16, 50257, 1024), {}),
    ("gpt2-large", "gpt2", _GPT2, (36, 1280, 20, 50257, 1024), {}),
    ("gpt2-xl", "gpt2", _GPT2, (48, 1600, 25, 50257, 1024), {}),
    ("gpt3-13b", "gpt2", _GPT2, (40, 5120, 40, 51200, 2048), {}),
    ("gpt3-96b", "gpt2", _GPT2, (80, 9984, 104, 51200, 2048), {}),
    ("gpt3-134b", "gpt2", _GPT2, (84, 11520, 120, 51200, 2048), {}),
    ("gpt3-175b", "gpt2", _GPT2, (96, 12288, 96, 51200, 2048), {}),
    ("bert-large", "bert", _BERT, (24, 1024, 16, 4096, 30522, 512), {}),
    ("gpt-neox-20b", "gpt_neox", (*_LLAMA[:3], *_LLAMA[4:]), (44, 6144, 64, 24576, 50432),
     {"rotary_pct": 0.25, "rotary_emb_base": 10_000, "layer_norm_eps": 1e-5, "use_parallel_residual": True,
      "hidden_act": "gelu_fast", "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    ("llama-2-7b", "llama", _LLAMA, (32, 4096, 32, 32, 11008, 32000), {"rms_norm_eps": 1e-5}),
    ("llama-2-13b", "llama", _LLAMA, (40, 5120, 40, 40, 13824, 32000), {"rms_norm_eps": 1e-5}),
    ("llama-2-70b", "llama", _LLAMA, (80, 8192, 64, 8, 28672, 32000), {"rms_norm_eps": 1e-5}),
    ("llama-3.1-8b", "llama", _LLAMA, (32, 4096, 32, 8, 14336, 128256), _LLAMA_31),
    ("llama-3.1-70b", "llama", _LLAMA, (80, 8192, 64, 8, 28672, 128256), _LLAMA_31),
    ("llama-3.1-405b", "llama", _LLAMA, (126, 16384, 128, 8, 53248, 128256), _LLAMA_31),
    ("mistral-7b", "mistral", _LLAMA, (32, 4096, 32, 8, 14336, 32768), _QWEN | {"rms_norm_eps": 1e-5}),
    ("mixtral-8x7b", "mixtral", _LLAMA, (32, 4096, 32, 8, 14336, 32000),
     _QWEN | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("mixtral-8x22b", "mixtral", _LLAMA, (56, 6144, 48, 8, 16384, 32000),
     _QWEN | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("qwen2.5-0.5b", "qwen2", _LLAMA, (24, 896, 14, 2, 4864, 151936), _QWEN | {"tie_word_embeddings": True}),
    ("qwen2.5-7b", "qwen2", _LLAMA, (28, 3584, 28, 4, 18944, 152064), _QWEN),
    ("qwen2.5-72b", "qwen2", _LLAMA, (80, 8192, 64, 8, 29568, 152064), _QWEN),
    ("qwen3-8b", "qwen3", _LLAMA, (36, 4096, 32, 8, 12288, 151936), _QWEN | {"head_dim": 128}),
    ("qwen3-32b", "qwen3", _LLAMA, (64, 5120, 64, 8, 25600, 151936), _QWEN | {"head_dim": 128}),
    ("qwen3-30b-a3b", "qwen3_moe", _LLAMA, (48, 2048, 32, 4, 6144, 151936),
     _QWEN | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
)  # fmt: skip

NAMED: dict[str, dict[str, Any]] = {
    name: {"model_type": family, **dict(zip(keys, sizes, strict=True)), **more}
    for name, family, keys, sizes, more in _ROWS
}
"""By name."""
