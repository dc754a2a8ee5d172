from . import attention, distributed, fp8, module, ops, tensor
from .attention import DotProductAttention
from .module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm", "attention",
    "distributed", "fp8", "module", "ops", "tensor",
]  # fmt: skip
