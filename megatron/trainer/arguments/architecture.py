"""The conversion of a run's model to the planner's `Architecture`."""

from __future__ import annotations

from megatron.planner import Architecture
from megatron.planner.memory.architecture import Experts, FurtherLayers
from megatron.trainer.arguments.flags.config import TrainConfig, decoder_of, is_gated
from megatron.trainer.arguments.flags.model import CLASSIFIERS, NUM_TOKEN_TYPES
from megatron.trainer.arguments.rules.attention import latents_of, windows_of
from megatron.trainer.arguments.rules.stages import stage_of_further_layers


def architecture(args: TrainConfig) -> Architecture:
    """The model's shape for the planner; `args.padded_vocab_size` must be set."""
    is_bert, is_classifier = args.architecture == "bert", args.architecture in CLASSIFIERS
    has_types = args.architecture in ("bert", "bert-classify") and args.bert_binary_head
    return Architecture(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        kv_channels=args.kv_channels,
        sequence_length=args.seq_length,
        vocabulary_size=args.padded_vocab_size,
        patch_elements=args.patch_dim**2 * args.num_channels if args.architecture == "vit" else 0,
        class_token=args.architecture == "vit" and args.vision_class_token,
        num_classes=args.num_classes if is_classifier else 0,
        pooler=args.architecture == "bert-classify",
        num_token_types=NUM_TOKEN_TYPES if has_types else 0,
        masked_head=is_bert,
        binary_head=is_bert and args.bert_binary_head,
        num_positions=args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        gated=is_gated(args),
        relu=args.relu,
        linear_biases=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm_vectors=2 if args.normalization == "LayerNorm" else 1,
        qk_norm=args.qk_layernorm,
        hidden_dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        experts=None if args.num_experts is None else _experts(args),
        decoder=decoder_of(args) if args.architecture == "t5" else None,
        latents=latents_of(args),
        sinks=args.softmax_type == "learnable",
        windows=windows_of(args),
        further=None if args.mtp_num_layers is None else _further_layers(args),
    )


def _further_layers(args: TrainConfig) -> FurtherLayers:
    """The multi-token prediction layers."""
    return FurtherLayers(count=args.mtp_num_layers, stage=stage_of_further_layers(args))


def _experts(args: TrainConfig) -> Experts:
    """The experts of the model's layers."""
    pattern = args.moe_layer_freq
    return Experts(
        count=args.num_experts,
        topk=args.moe_router_topk,
        ffn_hidden_size=args.moe_ffn_hidden_size,
        shared_ffn_hidden_size=args.moe_shared_expert_intermediate_size or 0,
        layers=pattern if isinstance(pattern, int) else tuple(pattern),
        capacity_factor=args.moe_expert_capacity_factor,
    )
