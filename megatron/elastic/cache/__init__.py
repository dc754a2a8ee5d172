"""What a frozen prefix of layers puts out, per sample, in LMDB on the node (PipeTransformer, section 3.4).

activation_cache  the face: get, put, prefetch, deepen
probe             what reading and writing takes here, before there is anything to read
window, writer    a thread that reads ahead, and one that writes
store             values in transactions, the limit, what is done about errors
folder            opening what was left there: locks, boots, damage
structure         whether a file is one that LMDB can work with
environment       one for each folder and process, and forks
value             header and checksum
generation        what decides the bits of a value
measured          counts, medians, and whether reading pays
"""

from megatron.elastic.cache.activation_cache import ActivationCache
from megatron.elastic.cache.folder import require_usable
from megatron.elastic.cache.generation import Generation, weights_digest
from megatron.elastic.cache.measured import CacheCounts, Measured, reading_pays
from megatron.elastic.cache.probe import CacheSeconds, measure

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
