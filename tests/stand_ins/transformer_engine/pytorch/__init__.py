from . import attention, distributed, fp8, module, ops, tensor
from .attention import DotProductAttention
from .fp8 import fp8_autocast, fp8_model_init
from .module import Fp8Padding, Fp8Unpadding, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear",
    "RMSNorm", "attention", "distributed", "fp8", "fp8_autocast", "fp8_model_init", "module", "ops", "tensor",
]  # fmt: skip
