"""A cache of the outputs of a frozen prefix of layers, per sample, in files on the node (PipeTransformer, section 3.4).

activation_cache  the interface: get, put, prefetch, deepen; the measurement of a disk's times
background        a thread that reads ahead, and a thread that writes
store             the files of values and their indexes, the limit on bytes, the handling of errors
folder            the opening of an existing folder: locks, the limit, damage
generation        the properties that decide the bits of a value
measured          counts, median times, and whether reading is faster than computing
"""

from megatron.elastic.cache.activation_cache import ActivationCache, CacheSeconds, measure
from megatron.elastic.cache.folder import require_usable
from megatron.elastic.cache.generation import Generation, weights_digest
from megatron.elastic.cache.measured import Measured, reading_pays

__all__ = [
    "ActivationCache", "CacheSeconds", "Generation", "Measured", "measure", "reading_pays", "require_usable",
    "weights_digest",
]  # fmt: skip
