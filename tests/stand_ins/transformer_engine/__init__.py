"""A stand-in of NVIDIA's Transformer Engine in plain torch, for tests on machines without a GPU.

It has what megatron.core 0.16.1 imports and calls for transformer layers, written from Transformer Engine's documented
behaviour; signatures, and the behaviour that differs between releases, are data (../transformer_engine.json, extracted
from the published sources). What it does not have raises: arguments by NotImplementedError, modules by ImportError. It
is on the path of test processes alone (`tests/workers.py`, `device="engine"`).

What it cannot know, so that no test of it says anything of it:

- the numbers of the kernels: fused attention, norms, products and their order of sums, and so any bit of a GPU;
- streams and events: whether a kernel that W starts late reads what another stream has overwritten;
- memory: what a module saves, and when it is freed;
- FP8: values are rounded by the scales of the recipes, and products have the tensors' own type; attention in FP8, and
  weights in FP8 alone, raise, as does FP4;
- userbuffers, CUDA graphs, context parallelism, padding inside of packed sequences, fused optimizers, permutations and
  routers;
- speed.
"""

from . import common, pytorch
from ._release import newest

__version__ = newest()
__all__ = ["common", "pytorch"]
