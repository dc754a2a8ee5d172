"""The Transformer Engine that is installed: whether batches with gradient buffers of their own may use its fusion."""

import importlib.metadata

from packaging.version import Version

LOOKS_UP_GRADIENTS = "2.6.0"
"""The first Transformer Engine whose linear layers (`Linear`, `LayerNormLinear`, `LayerNormMLP`) look up a weight's
`main_grad` in the backward. Older ones take it in the forward (2.0 to 2.5), or from the weight that the graph has
saved, which need not be the parameter (1.x)."""


def installed_version() -> str:
    """Of Transformer Engine; one that never was where it is not installed, or cannot say (built from source)."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "0.0"


def engine_keeps_main_grad(version: str) -> bool:
    """Whether this version of Transformer Engine ("2.5.0+a1b2c3") adds to the gradient buffer of its forward's time."""
    return Version(version) < Version(LOOKS_UP_GRADIENTS)
