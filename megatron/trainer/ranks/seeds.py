"""The generators of random numbers, of which no rank has another seed."""

import random

import numpy
import torch

from megatron.core import tensor_parallel


def set_seeds(seed: int) -> None:
    """Seed every generator. The same on all pipeline and data parallel ranks: weights must not depend on the degrees,
    and dropout sets its own state per layer and sample."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
