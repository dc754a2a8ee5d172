"""The tables of orders and of presets; a preset is a named combination of an order with other choices."""

from dataclasses import dataclass

from megatron.pipeline.program.edges import PLACEMENTS
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import WeightPolicy, weight_policy
from megatron.pipeline.schedules.controllable_memory import VHalf, VMin
from megatron.pipeline.schedules.interleaved import Interleaved, Relay
from megatron.pipeline.schedules.interleaved_zero_bubble import InterleavedZeroBubble
from megatron.pipeline.schedules.merged import Asynchronous, MergedGPipe, MergedOneForwardOneBackward
from megatron.pipeline.schedules.one_f_one_b import GPipe, OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1
from megatron.pipeline.schedules.zero_bubble_h2 import ZeroBubbleH2
from megatron.pipeline.schedules.zero_bubble_v import ZeroBubbleV

ORDERS: dict[str, type[Order]] = {
    "gpipe": GPipe,
    "1f1b": OneForwardOneBackward,
    "interleaved": Interleaved,
    "relay": Relay,
    "zb-h1": ZeroBubbleH1,
    "zb-h2": ZeroBubbleH2,
    "interleaved-zb": InterleavedZeroBubble,
    "zbv": ZeroBubbleV,
    "v-half": VHalf,
    "v-min": VMin,
    "async": Asynchronous,
    "merged-gpipe": MergedGPipe,
    "merged-1f1b": MergedOneForwardOneBackward,
}


MERGED = {"gpipe": "merged-gpipe", "1f1b": "merged-1f1b"}
"""Order for one stage on each rank -> order that merges it for several stages on a rank, in any placement."""


@dataclass(frozen=True)
class Preset:
    """The choices of a preset.

    Attributes:
        order: a key of `ORDERS`.
        weights: a key of `POLICIES`.
        balance: saved activations are moved between the ranks of a pair.
        placement: a key of `PLACEMENTS`.
        recompute: a recompute precedes each backward.
        residency: how weights live on the host; None: they live on the device.
        by_default: a search tries the preset if no schedules are named. False if its rows take long to build and to
            simulate.
    """

    order: str
    weights: str
    balance: bool = False
    placement: str = "round-robin"
    recompute: bool = False
    residency: Residency | None = None
    by_default: bool = True

    def validate(self) -> None:
        """Raise ValueError if the order, the weight policy or the placement is unknown."""
        if self.order not in ORDERS:
            raise ValueError(f"there is no order {self.order!r}; choose from {', '.join(ORDERS)}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"there is no placement {self.placement!r}; choose from {', '.join(PLACEMENTS)}")
        weight_policy(self.weights)

    @property
    def policy(self) -> WeightPolicy:
        """The weight policy with the name `weights`."""
        return weight_policy(self.weights)

    @property
    def interleaves(self) -> bool:
        """Whether the order supports several stages on a rank."""
        return ORDERS[self.order].interleaves

    @property
    def virtual_stages(self) -> int | None:
        """The only number of stages on a rank that the order supports; None: any number, or an unknown order."""
        if self.order not in ORDERS:
            return None
        return ORDERS[self.order].virtual_stages if self.interleaves else 1


PRESETS: dict[str, Preset] = {
    "gpipe": Preset("gpipe", "flush"),
    "flush": Preset("1f1b", "flush"),
    "2bw": Preset("1f1b", "2bw"),
    "pipedream": Preset("1f1b", "stash"),
    "interleaved": Preset("interleaved", "flush"),
    "bpipe": Preset("1f1b", "flush", balance=True),
    "zb-h1": Preset("zb-h1", "flush"),
    "zb-h2": Preset("zb-h2", "flush", by_default=False),
    "interleaved-zb": Preset("interleaved-zb", "flush", by_default=False),
    "zbv": Preset("zbv", "flush", placement="v"),
    "v-half": Preset("v-half", "flush", placement="v", by_default=False),
    "v-min": Preset("v-min", "flush", placement="v", by_default=False),
    "l2l": Preset("relay", "flush", recompute=True, residency=Residency()),
}
