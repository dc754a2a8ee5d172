"""The gradient norms of layers: which layer of the model each parameter of a rank's chunks belongs to."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron import backend
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import unwrap_model


class LayersOfParameters:
    """The transformer layer that each trainable parameter of `chunks` belongs to, in a model of `num_layers`.

    What is in front of the layers or behind them (embeddings, heads) belongs to none.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int) -> None:
        self.num_layers = num_layers
        self._numbers = {
            parameter: module.layer_number - 1
            for chunk in chunks
            for module in unwrap_model(chunk).modules()
            if isinstance(module, BaseTransformerLayer)
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        assert all(0 <= number < num_layers for number in self._numbers.values()), "layers are numbered over the model"

    def squared_norms(self, norms: Mapping[Parameter, Tensor]) -> Tensor:
        """From the norms of parameters' gradients, FP32 scalars, the squared norm of each layer: float64
        [num_layers], 0 of layers without any.
        """
        result = torch.zeros(self.num_layers, dtype=torch.float64, device=backend.device())
        own = [(self._numbers[parameter], norm) for parameter, norm in norms.items() if parameter in self._numbers]
        if own:
            numbers = torch.tensor([number for number, _ in own], device=result.device)
            squares = torch.stack([norm for _, norm in own]).double().square()
            result.index_add_(0, numbers, squares)
        return result
