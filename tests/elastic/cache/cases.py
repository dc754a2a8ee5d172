"""Generations, and outputs that follow from the sample, so that any process can say what a value should be."""

from dataclasses import replace

import torch

from megatron.elastic.cache import ActivationCache, Generation

GENERATION = Generation(
    weights="0123",
    depth=2,
    dtype=torch.bfloat16,
    shape=(16, 24),
    tensor_ranks=1,
    tensor_rank=0,
    microbatch_rows=4,
    padding="to 16",
    threads=1,
    kernels="local, CPU",
    data="sentences",
)
DEEPER = replace(GENERATION, weights="4567", depth=3)
DEEPEST = replace(GENERATION, weights="89ab", depth=5)
LARGE = replace(GENERATION, shape=(64, 256))  # 32 KiB
MOST_BYTES = 8 << 20


def output(sample, generation=GENERATION):
    """Any bits, NaNs too."""
    random = torch.Generator().manual_seed(sample * 100 + generation.depth)
    number = generation.dtype.itemsize * 8 - 1
    kind = {15: torch.int16, 31: torch.int32}[number]
    return torch.randint(-(2**number), 2**number, generation.shape, generator=random, dtype=kind).view(generation.dtype)


def outputs(samples, generation=GENERATION):
    return [output(sample, generation) for sample in samples]


def bits(tensor):
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())


def same(found, expected):
    return [bits(each) for each in found] == [bits(each) for each in expected]


def open_cache(folder, generation=GENERATION, most_bytes=MOST_BYTES, **options):
    return ActivationCache(folder, generation, most_bytes=most_bytes, **options)


def fill(folder, samples, generation=GENERATION, **options):
    """A folder whose cache has these samples, and is closed."""
    with open_cache(folder, generation, **options) as cache:
        cache.put(samples, outputs(samples, generation))
    return folder / "activations"
