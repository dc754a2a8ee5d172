from .fp8_padding import Fp8Padding, Fp8Unpadding
from .grouped_linear import GroupedLinear
from .linear import LayerNormLinear, Linear
from .norm import LayerNorm, RMSNorm

__all__ = ["Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"]
