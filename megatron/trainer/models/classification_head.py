"""The head that tells a class, on the last stage. Every tensor rank has all of it."""

import argparse

import torch
from torch import nn

from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ClassificationHead(MegatronModule):
    """Dropout and a linear layer: from the features of a sample, [b, hidden], to logits, [b, classes].

    Args:
        dropout: rate before the linear layer.
    """

    dropout_place = "head", 0

    def __init__(self, args: argparse.Namespace, config: TransformerConfig, *, dropout: float = 0.0) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(config.hidden_size, args.num_classes)
        with torch.no_grad():
            config.init_method(self.linear.weight)
            self.linear.bias.zero_()
        for parameter in self.parameters():
            parameter.is_embedding_or_output_parameter = True  # --decoupled-lr

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[b, hidden] to [b, classes]."""
        return self.linear(self.dropout(features))


def pooled(hidden: torch.Tensor, config: TransformerConfig, *, reads_first: bool) -> torch.Tensor:
    """The features of a sample: its first token, else the mean over all. [tokens, b, hidden] to [b, hidden]."""
    if config.sequence_parallel:  # all tensor ranks go on alike, so gradients need no sum
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden[0] if reads_first else hidden.mean(dim=0)
