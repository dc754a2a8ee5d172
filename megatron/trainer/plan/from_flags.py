"""From checked flags to the planner's records. Without torch, so that a search starts at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.planner import ActivationSetting, Architecture, Configuration, Recompute, TrainingState
from megatron.planner.job.software import Software, has_flash_attention
from megatron.planner.memory.hosted import Hosting
from megatron.trainer.arguments.flags.model import CLASSIFIERS, NUM_TOKEN_TYPES
from megatron.trainer.arguments.flags.values import choice_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_FP32, _HALF = 4, 2


def architecture(args: argparse.Namespace) -> Architecture:
    """The model's shape; `args.padded_vocab_size` is set."""
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
        gated=args.swiglu or args.quick_geglu,
        linear_biases=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm_vectors=2 if args.normalization == "LayerNorm" else 1,
        qk_norm=args.qk_layernorm,
        hidden_dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
    )


def activation_setting(args: argparse.Namespace) -> ActivationSetting:
    """How the run keeps activations; `args.transformer_impl` is resolved."""
    element = _HALF if args.fp16 or args.bf16 else _FP32
    return ActivationSetting(
        tensor=args.tensor_model_parallel_size,
        micro_batch_size=args.micro_batch_size,
        element_bytes=element,
        residual_bytes=_FP32 if args.fp32_residual_connection else element,
        sequence_parallel=args.sequence_parallel,
        saves_scores=not has_flash_attention(args.transformer_impl, args.attention_backend, element),
        softmax_in_fp32=args.attention_softmax_in_fp32,
        fused_gate=args.swiglu and args.bias_swiglu_fusion,
        recompute=_recompute(args),
    )


def training_state(args: argparse.Namespace) -> TrainingState:
    """What the run keeps for each parameter."""
    weight = _HALF if args.fp16 or args.bf16 else _FP32
    return TrainingState(
        weight_bytes=weight,
        gradient_bytes=_FP32 if args.accumulate_allreduce_grads_in_fp32 else weight,
        num_moments=int(args.sgd_momentum > 0) if args.optimizer == "sgd" else 2,
        distributed_optimizer=args.use_distributed_optimizer,
        data=args.data_parallel_size,
    )


def uses_nccl(args: argparse.Namespace) -> bool:
    """Whether the run communicates over NCCL where it has CUDA."""
    return args.distributed_backend != "gloo"


def layers_of_stages(config: TransformerConfig) -> tuple[int, ...]:
    """How many layers each stage has, as megatron.core splits them."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    num_ranks, num_virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    layout = config.pipeline_model_parallel_layout

    def count(rank: int, virtual: int) -> int:
        if layout is not None:
            return layout.layout[rank][virtual].count(LayerType.decoder)
        return get_num_layers_to_build(config, vp_stage=virtual, pp_rank=rank)

    return tuple(count(rank, virtual) for virtual in range(num_virtual) for rank in range(num_ranks))


def _recompute(args: argparse.Namespace) -> Recompute:
    if args.recompute_granularity == "full":
        return Recompute(method=args.recompute_method, num_layers=args.recompute_num_layers)
    modules = frozenset(args.recompute_modules or ()) if args.recompute_granularity == "selective" else frozenset()
    return Recompute(modules=modules, whole_stage=args.pipeline_recompute or choice_of(args).recompute)


@dataclass(frozen=True, kw_only=True)
class RunSoftware(Software):
    """What a run's flags say of its software, whatever the degrees.

    Attributes:
        setting, state: of any configuration of it.
        with_halves: what trains where backwards are split, if that takes other layers; None: the same.
    """

    setting: ActivationSetting
    state: TrainingState
    with_halves: RunSoftware | None = None

    def of(self, configuration: Configuration) -> RunSoftware:
        return self if self.with_halves is None or not configuration.splits_backward else self.with_halves

    def activation_setting(self, configuration: Configuration) -> ActivationSetting:
        general = super().activation_setting(configuration)
        return replace(
            self.setting,
            tensor=configuration.tensor,
            micro_batch_size=configuration.micro_batch_size,
            sequence_parallel=configuration.sequence_parallel and configuration.tensor > 1,
            recompute=general.recompute,
            context=general.context,
            gathers_keys=general.gathers_keys,
            experts=general.experts,
        )

    def training_state(self, configuration: Configuration) -> TrainingState:
        return replace(
            self.state, distributed_optimizer=configuration.distributed_optimizer, data=configuration.replicas,
            expert_data=configuration.expert_replicas,
        )  # fmt: skip


def software(args: argparse.Namespace) -> RunSoftware:
    """What trains; `args` are resolved for their platform."""
    setting, state = activation_setting(args), training_state(args)
    return RunSoftware(
        setting=setting,
        state=state,
        element_bytes=setting.element_bytes,
        gradient_bytes=state.gradient_bytes,
        transformer_impl=args.transformer_impl,
        flash_attention=not setting.saves_scores,
        fuses_softmax=args.masked_softmax_fusion and setting.element_bytes == _HALF,
        fuses_gradient_accumulation=args.gradient_accumulation_fusion,
        own_communicators=uses_nccl(args),
        overlaps_in_pieces=args.tp_comm_overlap,
    )


def hosting_of(args: argparse.Namespace) -> Hosting | None:
    """How weights live on the host; None where they live on the device."""
    residency = args.schedule.residency
    if residency is None:
        return None
    most = max(args.batch_sizes.all_num_microbatches())
    return Hosting(stages=residency.stages, stash=residency.stash, num_microbatches=most)
