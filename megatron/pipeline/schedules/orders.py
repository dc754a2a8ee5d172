"""The orders that there are, and the names of their common combinations with a weight policy."""

from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.weights import WeightPolicy

ORDERS: dict[str, type[Order]] = {
    "gpipe": GPipe,
    "1f1b": OneForwardOneBackward,
    "interleaved": Interleaved,
}

PRESETS: dict[str, tuple[str, WeightPolicy]] = {
    "gpipe": ("gpipe", WeightPolicy.FLUSH),
    "flush": ("1f1b", WeightPolicy.FLUSH),
    "2bw": ("1f1b", WeightPolicy.TWO_BW),
    "pipedream": ("1f1b", WeightPolicy.STASH),
    "interleaved": ("interleaved", WeightPolicy.FLUSH),
    "bpipe": ("1f1b", WeightPolicy.FLUSH),
}

BALANCED_PRESETS = frozenset({"bpipe"})  # those that balance saved activations
