"""The head that tells a class: a token, or the mean over all, through dropout and a linear layer."""

import argparse

import torch
from torch import nn

from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ClassificationHead(MegatronModule):
    """From the last layer's output (behind the final norm) to logits. Every tensor rank has all of it.

    Args:
        reads_first: the first token, else the mean over all.
        dropout: rate before the linear layer.
    """

    dropout_place = "head", 0

    def __init__(
        self, args: argparse.Namespace, config: TransformerConfig, *, reads_first: bool, dropout: float = 0.0
    ) -> None:
        super().__init__(config)
        self.reads_first = reads_first
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(config.hidden_size, args.num_classes)
        with torch.no_grad():
            config.init_method(self.linear.weight)
            self.linear.bias.zero_()
        for parameter in self.parameters():
            parameter.is_embedding_or_output_parameter = True  # --decoupled-lr

    def pool(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, b, hidden] to [b, hidden]."""
        if self.config.sequence_parallel:  # all tensor ranks go on alike, so gradients need no sum
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[0] if self.reads_first else hidden.mean(dim=0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, b, hidden] to logits [b, classes]."""
        return self.linear(self.dropout(self.pool(hidden)))
