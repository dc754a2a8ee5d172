"""LayerNorm and RMSNorm."""

import torch
from torch import Tensor

from ..._release import pinned


def normalized(input: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, zero_centered: bool) -> Tensor:
    """LayerNorm where there is a bias, else RMSNorm."""
    weight = weight + 1 if zero_centered else weight
    if bias is None:
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
    return torch.nn.functional.layer_norm(input, weight.shape, weight, bias, eps)


class _Norm(torch.nn.Module):
    def __init__(self, size: int, eps: float, zero_centered: bool, dtype: torch.dtype | None, device, has_bias: bool):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered
        fill = torch.zeros if zero_centered else torch.ones
        self.weight = torch.nn.Parameter(fill(size, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=device)) if has_bias else None

    def forward(self, input: Tensor) -> Tensor:
        return normalized(input, self.weight, self.bias, eps=self.eps, zero_centered=self.zero_centered_gamma)

    def _mark(self, sequence_parallel: bool | None) -> None:
        for parameter in self.parameters() if sequence_parallel is not None else ():
            parameter.sequence_parallel = sequence_parallel


class LayerNorm(_Norm):
    @pinned
    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, device=None):  # fmt: skip
        size = hidden_size if normalized_shape is None else normalized_shape
        _Norm.__init__(self, size, eps, zero_centered_gamma, params_dtype, device, has_bias=True)
        self._mark(sequence_parallel)


class RMSNorm(_Norm):
    @pinned
    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, device=None):  # fmt: skip
        size = hidden_size if normalized_shape is None else normalized_shape
        _Norm.__init__(self, size, eps, zero_centered_gamma, params_dtype, device, has_bias=False)
        self._mark(sequence_parallel)
