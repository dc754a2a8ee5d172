"""What a frozen prefix of layers puts out, per sample, in files on the node (PipeTransformer, section 3.4).

activation_cache  the face: get, put, prefetch, deepen; what reading and writing takes on a disk
background        a thread that reads ahead, and one that writes
store             the files of values and their indexes, the limit, what is done about errors
folder            opening what was left there: locks, the limit, damage
generation        what decides the bits of a value
measured          counts, medians, and whether reading pays
"""

from megatron.elastic.cache.activation_cache import ActivationCache, CacheSeconds, measure
from megatron.elastic.cache.folder import require_usable
from megatron.elastic.cache.generation import Generation, weights_digest
from megatron.elastic.cache.measured import CacheCounts, Measured, reading_pays

__all__ = [
    "ActivationCache",
    "CacheCounts",
    "CacheSeconds",
    "Generation",
    "Measured",
    "measure",
    "reading_pays",
    "require_usable",
    "weights_digest",
]
