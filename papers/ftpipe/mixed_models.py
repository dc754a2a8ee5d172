"""The models of `mixed_cuts.py`: transformers' configurations with parts of different cost, without their weights."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megatron.planner.job.devices import DEVICES
from papers.ftpipe.partition_units_graphs import GIB, Case, Device, t5

RTX_3090 = Device(
    "RTX 3090", DEVICES["RTX3090"].memory_gib * GIB, DEVICES["RTX3090"].peak_teraflops_fp32,
    DEVICES["RTX3090"].memory_bandwidth,
)  # fmt: skip
_IMAGE, _PATCHES = 2, 576
"""The token that stands for a patch of LLaVA's image, and the number of patches."""


def _model(name: str, **values: Any) -> Callable[[], nn.Module]:
    kind = getattr(transformers, name)
    return functools.partial(_build, kind, values)


def _build(kind: type, values: dict[str, Any]) -> nn.Module:
    return kind(kind.config_class(**values, attn_implementation="eager"))


def _dialogue(length: int, samples: int) -> Tensor:
    ids = torch.ones(samples, length, dtype=torch.long)
    ids[:, 1 : 1 + _PATCHES] = _IMAGE
    return ids


def _case(build: Callable[[], nn.Module], microbatch: int, **lengths: Any) -> Case:
    return Case(build, lengths, microbatch, RTX_3090, 4, 16, "", microbatches=8)


_BASE = {"heads": 12, "d_ff": 3072, "d_model": 768, "d_kv": 64}
_T5 = t5(layers=12, **_BASE)
_TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_WHISPER = {
    "d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "num_mel_bins": 80,
}  # fmt: skip

MODELS: dict[str, Case] = {
    "T5-base, 512 to 4 tokens": _case(_T5, 1, input_ids=512, labels=4),
    "T5-base, 512 to 4, microbatch of 8": _case(_T5, 8, input_ids=512, labels=4),
    "T5-base, 512 to 128": _case(_T5, 1, input_ids=512, labels=128),
    "T5-base, 64 to 512": _case(_T5, 1, input_ids=64, labels=512),
    "T5-base, 3 decoder layers": _case(t5(layers=12, num_decoder_layers=3, **_BASE), 1, input_ids=256, labels=256),
    "mT5-base, vocabulary of 250,112": _case(
        _model("MT5ForConditionalGeneration", vocab_size=250112, d_model=768, d_kv=64, num_heads=12, d_ff=2048,
               num_layers=12, decoder_start_token_id=0),
        1, input_ids=128, labels=32,
    ),
    "Whisper-small": _case(
        _model("WhisperForConditionalGeneration", decoder_layers=12, **_WHISPER),
        1, input_features=(80, 3000), labels=64,
    ),
    "Whisper, 2 decoder layers": _case(
        _model("WhisperForConditionalGeneration", decoder_layers=2, **_WHISPER),
        1, input_features=(80, 3000), labels=64,
    ),
    "CLIP ViT-L/14": _case(
        _model("CLIPModel", projection_dim=768, vision_config=_TOWER | {"image_size": 224, "patch_size": 14},
               text_config={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                            "num_attention_heads": 12}),
        4, input_ids=77, pixel_values=(3, 224, 224),
    ),
    "LLaVA of ViT-L and a Llama of 1.1 billion": _case(
        _model("LlavaForConditionalGeneration", image_token_index=_IMAGE,
               vision_config=transformers.CLIPVisionConfig(**_TOWER, image_size=336, patch_size=14),
               text_config=transformers.LlamaConfig(
                   vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
                   num_attention_heads=32, num_key_value_heads=4)),
        1, input_ids=functools.partial(_dialogue, 640), pixel_values=(3, 336, 336), labels=640,
    ),
    "Swin-B": _case(
        _model("SwinForImageClassification", embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32],
               drop_path_rate=0.0, num_labels=1000, problem_type="single_label_classification"),
        4, pixel_values=(3, 224, 224), labels=0,
    ),
    "XLM-R base, head of 250,002 words": _case(
        _model("XLMRobertaForMaskedLM", vocab_size=250002, hidden_size=768, num_hidden_layers=12,
               num_attention_heads=12, intermediate_size=3072, max_position_embeddings=514),
        1, input_ids=128, labels=128,
    ),
    "DeepSeek-V3's form: 3 dense layers, 9 of 32 experts": _case(
        _model("DeepseekV3ForCausalLM", vocab_size=32000, hidden_size=1024, intermediate_size=8192,
               moe_intermediate_size=512, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16,
               n_routed_experts=32, n_group=4, topk_group=2, num_experts_per_tok=4, first_k_dense_replace=3,
               q_lora_rank=384, kv_lora_rank=256),
        1, input_ids=512, labels=512,
    ),
    "GPT-2 medium": _case(
        _model("GPT2LMHeadModel", n_embd=1024, n_layer=24, n_head=16), 1, input_ids=1024, labels=1024
    ),
    "Llama 3.2 1B's form": _case(
        _model("LlamaForCausalLM", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
               num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True),
        1, input_ids=1024, labels=1024,
    ),
}  # fmt: skip
"""Name -> the model and a microbatch. Widths, depths and vocabularies are the published ones unless the name says
otherwise."""
