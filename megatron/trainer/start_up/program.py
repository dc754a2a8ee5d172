"""What a training program, such as pretrain_gpt.py, brings to a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pipeline.runtime.stages.megatron.auxiliary import ROUTER_LOSSES, loss_names
from megatron.pipeline.runtime.stages.megatron.stage import ForwardStep
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.data.microbatches import FieldsProvider, gpt_fields
from megatron.trainer.report.metrics import LOSS

if TYPE_CHECKING:
    from megatron.trainer.data.datasets import Datasets  # with megatron.core's datasets, which a dry run never loads


def language_model_losses(args: TrainConfig) -> tuple[str, ...]:
    """The losses of a GPT: that of its tokens, those of further tokens, and those of its routers."""
    of_tokens = (LOSS, *loss_names(args.mtp_num_layers))
    if args.num_experts is None:
        return of_tokens
    factors = dict(zip(args.moe_router_load_balancing_type, args.moe_aux_loss_coeff, strict=False))
    factors["z_loss"] = args.moe_z_loss_coeff
    return (*of_tokens, *(name for kind, name in ROUTER_LOSSES.items() if factors.get(kind)))


ModelProvider = Callable[..., torch.nn.Module]
"""Megatron's `provider(pre_process, post_process)`."""


@dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """What is trained, whatever the flags.

    Attributes:
        model_provider: `model_provider(args, config)` returns Megatron's `provider(pre_process, post_process)`. It is
            called for each stage of the rank, with a configuration by which each stage has a rank of its own.
        forward_step: Megatron's `forward_step(data_iterator, model)`.
        datasets_provider: `datasets_provider(args, tokenizer)` returns the `Datasets` of this rank; an architecture
            without text has no tokenizer.
        fields_provider: `fields_provider(args)` returns the parts of a microbatch.
        loss_names: `loss_names(args)` returns what the forward step's loss function reports; "lm loss" or "loss" is
            among it.
    """

    model_provider: Callable[[TrainConfig, TransformerConfig], ModelProvider]
    forward_step: ForwardStep
    datasets_provider: Callable[[TrainConfig, MegatronTokenizerBase | None], Datasets]
    fields_provider: FieldsProvider = gpt_fields
    loss_names: Callable[[TrainConfig], tuple[str, ...]] = language_model_losses
