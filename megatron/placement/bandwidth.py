"""How fast the link of a pair has to be: BPipe, appendix B, equations 4 to 12.

Balanced activations cost no time as long as the transfer of a microbatch's saved activations ends within a forward.
So the bytes (equations 4 to 6, after Korthikanti et al. 2022) over the time of a forward are the bandwidth that a
GPU needs (7 to 9). In the steady phase an eviction and the load beside it may together take a backward and a forward,
that is three forwards, which lowers the need to two thirds (10 to 12).

Units: bytes, seconds, and GB/s of 10^9 bytes per second, all of one GPU.
"""

from dataclasses import dataclass
from enum import Enum

_GIGA, _TERA = 1e9, 1e12


class RecomputeScope(str, Enum):
    """What is recomputed in the backward: nothing, the core of attention (selective), or whole layers (full)."""

    NONE = "none"
    ATTENTION = "attention"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer on a pipeline; Table 5's L, H, h (D in Table 1), l, b, p and t, in this order.

    The formulas take a feed-forward width of 4h. With the defaults of the other fields they are the paper's: 16-bit
    activations, split along the sequence over tensor parallel ranks, one stage on each rank. Raises ValueError where a
    number is below 1.

    Attributes:
        num_virtual_stages: stages on each rank; a microbatch is saved and moved at each of them on its own.
        sequence_parallel: tensor parallel ranks share what is not split by heads or columns.
        element_bytes: of an activation.
    """

    num_layers: int
    num_attention_heads: int
    hidden_size: int
    sequence_length: int
    micro_batch_size: int
    pipeline: int
    tensor: int
    num_virtual_stages: int = 1
    sequence_parallel: bool = True
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not False and value < 1:
                raise ValueError(f"{name} {value} is below 1; give 1 or more")

    @property
    def activation_elements(self) -> int:
        """Elements of one microbatch between two layers: l * b * h."""
        return self.sequence_length * self.micro_batch_size * self.hidden_size

    @property
    def layers_of_stage(self) -> float:
        return self.num_layers / (self.pipeline * self.num_virtual_stages)


def saved_activation_bytes(shape: ModelShape, scope: RecomputeScope) -> float:
    """Bytes that one GPU saves for one microbatch at one stage: equations 4 (none), 5 (attention) and 6 (layer).

    34 and 5 bytes are, after Korthikanti et al. (section 4.1), 16 elements and 2 masks, and 2 elements and a mask; of
    the 34, 4 elements and both masks are held by every tensor parallel rank unless sequences are split. Equation 6 has
    no t, so it bounds what is saved from above where they are.
    """
    element, mask = shape.element_bytes, 1
    elements = shape.layers_of_stage * shape.activation_elements
    if scope is RecomputeScope.LAYER:
        return element * elements
    held_by = shape.tensor if shape.sequence_parallel else 1
    width = (4 * element + 2 * mask) / held_by + 12 * element / shape.tensor
    if scope is RecomputeScope.NONE:
        scores = shape.num_attention_heads * shape.sequence_length / shape.hidden_size
        width += (2 * element + mask) * scores / shape.tensor
    return elements * width


def required_bandwidth(shape: ModelShape, scope: RecomputeScope, *, forward_seconds: float) -> float:
    """GB/s at which the transfer takes as long as a forward: equations 7 to 9."""
    return saved_activation_bytes(shape, scope) / _positive(forward_seconds) / _GIGA


def required_steady_bandwidth(shape: ModelShape, scope: RecomputeScope, *, forward_seconds: float) -> float:
    """GB/s at which an eviction and a load take as long as a backward and a forward, a backward being two forwards:
    equations 10 to 12."""
    return 2 / 3 * required_bandwidth(shape, scope, forward_seconds=forward_seconds)


def estimated_forward_seconds(shape: ModelShape, *, teraflops: float) -> float:
    """Time of one stage's forward of a microbatch on a GPU that sustains `teraflops` (10^12 operations per second).

    24 l b h^2 + 4 b l^2 h operations a layer (Narayanan et al. 2021b, appendix), without embedding and output layer.
    """
    per_layer = (
        24 * shape.activation_elements * shape.hidden_size + 4 * shape.activation_elements * shape.sequence_length
    )
    return shape.layers_of_stage * per_layer / shape.tensor / (_positive(teraflops) * _TERA)


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError(f"{value} is not positive; give a time or a rate above 0")
    return value
