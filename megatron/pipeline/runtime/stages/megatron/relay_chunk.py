"""A model chunk whose weights and gradients come and go, where megatron.core's DDP would keep all of them.

Problem: DDP gives every parameter a `main_grad` in one flat buffer, for as long as it lives. Where weights live on the
host, a stage has gradients on the device from its first backward of a batch until they have left.

Solution: a wrapper that megatron.core takes for its DDP, but without buffers. A hook on each parameter adds what a
backward gives to the `main_grad` that the parameter has then, as DDP's does, and drops it.
"""

import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig


class RelayChunk(DistributedDataParallel):
    """`module` under the face of DDP. All that DDP does with its buffers is done with none."""

    def __init__(
        self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, module: torch.nn.Module
    ) -> None:
        super(DistributedDataParallel, self).__init__(config, module)
        self.ddp_config = ddp_config
        self.buffers: list = []
        self.expert_parallel_buffers: list = []
        self.bucket_groups: list = []
        self.expert_parallel_bucket_groups: list = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def show_as_main_grad(parameter: torch.nn.Parameter, view: Tensor | None) -> None:
    """Backwards add to `view`, in its dtype; None: no backward follows."""
    parameter.main_grad = view


def _add_to_main_grad(parameter: torch.nn.Parameter) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
