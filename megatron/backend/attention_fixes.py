"""Repairs of megatron-core 0.16.1's attention without Transformer Engine: latents (MLA) and softmax sinks.

Transformer Engine's attention hides these faults, so the wheel's own code for other machines is little used. Each
repair wraps one function and states the fault.
"""

import torch
from torch import Tensor

from megatron.backend.replacing import replaces


def repair_attention(core_attention: type[torch.nn.Module], latent_attention, *, has_engine: bool) -> None:
    """Apply the repairs.

    Args:
        core_attention: megatron.core's `DotProductAttention`.
        latent_attention: its module `multi_latent_attention`.
        has_engine: Transformer Engine is installed.
    """
    latent_attention.HAVE_TE = latent_attention.HAVE_TE and has_engine  # the fault: true for stand-ins of its classes
    _repair_core_attention(core_attention)
    _repair_rotated_keys(latent_attention)


def _repair_core_attention(core_attention: type[torch.nn.Module]) -> None:
    """Take the numbers of channels of keys and values, and let tensor ranks have sinks of their own.

    The faults: latent attention passes `k_channels` and `v_channels`, which this class does not take. The width of its
    result follows from the values, not from `kv_channels`. The learned sinks of the heads are not marked as divided
    among tensor ranks, so the norm of the gradients counts only the sinks of the first rank. And all ranks draw the
    same sinks, although their heads differ.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    @replaces(core_attention, "__init__")
    def build_with_channels(build, self, config, *args, k_channels=None, v_channels=None, **options):
        draws, config.perform_initialization = config.perform_initialization, False
        try:
            build(self, config, *args, **options)
        finally:
            config.perform_initialization = draws
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if isinstance(self.softmax_offset, torch.nn.Parameter):
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
            if draws:
                _draw_sinks(self.softmax_offset, config, self.tp_group)


@torch.no_grad()
def _draw_sinks(sinks: torch.nn.Parameter, config, group: torch.distributed.ProcessGroup) -> None:
    """Draw the sinks of all heads, and keep those of this tensor rank."""
    whole = config.init_method(sinks.new_empty(config.num_attention_heads))
    sinks.copy_(whole.chunk(group.size())[group.rank()])


def _repair_rotated_keys(latent_attention) -> None:
    """Sum the gradients of the rotated keys over tensor ranks.

    The fault: all heads share the rotated part of the keys, and the tensor ranks have different heads. Where the down
    projection is divided among the ranks, as without Transformer Engine, its result is gathered. In the backward a rank
    takes its columns of its own gradient, which lacks the contributions of the other ranks' heads. So the gradient of
    these columns, and of all layers before them, is silently wrong.
    """

    @replaces(latent_attention.MLASelfAttention, "__init__")
    def build_with_mark(build, self, config, *args, **options):
        build(self, config, *args, **options)

        def mark(module, inputs, output):
            output[0].rotated_columns = config.qk_pos_emb_head_dim, self.pg_collection.tp

        self.linear_kv_down_proj.register_forward_hook(mark)

    @replaces(latent_attention, "gather_from_tensor_model_parallel_region")
    def gather_and_sum(gather, columns, *args, **options):
        whole = gather(columns, *args, **options)
        num_rotated, group = getattr(columns, "rotated_columns", (0, None))
        return _SumOfLastColumns.apply(whole, num_rotated, group) if num_rotated else whole


class _SumOfLastColumns(torch.autograd.Function):
    """The identity, whose backward sums the gradients of the last columns over a group."""

    @staticmethod
    def forward(ctx, whole: Tensor, num_columns: int, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.num_columns, ctx.group = num_columns, group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        last = gradient[..., -ctx.num_columns :].contiguous()
        torch.distributed.all_reduce(last, group=ctx.group)
        gradient[..., -ctx.num_columns :] = last
        return gradient, None, None
