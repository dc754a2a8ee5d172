"""The tables of orders, of placements, and of presets: names of common combinations of an order with the other choices.

A placement says which rank holds which stage where ranks hold several:

    placement     2 ranks, 2 stages on each
    round-robin   0 1 0 1    Megatron-LM's interleaving: dealt out in turn
    v             0 1 1 0    there and back again, so that a rank holds the first and the last stage (Qi et al. 2024)

With one stage on each rank both are the same. Everything else reads `rank_of_stage`, and so follows the stage and not
the rank: layers, data, loss, seeds, checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.documents import counted
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import WeightPolicy, weight_policy
from megatron.pipeline.schedules.asynchronous import Asynchronous
from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.merged import MergedGPipe, MergedOneForwardOneBackward
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.relay import Relay
from megatron.pipeline.schedules.zero_bubble_h1 import ZeroBubbleH1
from megatron.pipeline.schedules.zero_bubble_v import ZeroBubbleV


def round_robin(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage; rank r has the stages r, r + num_ranks, r + 2 * num_ranks, ..."""
    return tuple(range(num_ranks)) * num_virtual_stages


def v(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage; every second turn goes backwards."""
    there = tuple(range(num_ranks))
    return sum((there if turn % 2 == 0 else there[::-1] for turn in range(num_virtual_stages)), start=())


PLACEMENTS: dict[str, Callable[[int, int], Sequence[int]]] = {"round-robin": round_robin, "v": v}


def rank_of_stage(placement: str, num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Where a placement of that name puts the stages of all ranks.

    Raises:
        ValueError: another name, or one that puts them on fewer or more ranks.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"there is no placement {placement!r}; choose from {', '.join(PLACEMENTS)}")
    placed = tuple(PLACEMENTS[placement](num_ranks, num_virtual_stages))
    validate_placement(placed, num_ranks * num_virtual_stages)
    if max(placed) + 1 != num_ranks:
        raise ValueError(
            f"placement {placement} puts the {len(placed)} stages on {counted(max(placed) + 1, 'rank')}, and the "
            f"pipeline has {num_ranks}; give each rank a stage, and none to others"
        )
    return placed


def validate_placement(rank_of_stage: Sequence[int], num_stages: int) -> None:
    """Raises ValueError where it does not place `num_stages` stages on ranks 0, 1, ... without a gap."""
    if len(rank_of_stage) != num_stages:
        raise ValueError(
            f"rank_of_stage places {len(rank_of_stage)} stages, and the pipeline has {num_stages}; give each its rank"
        )
    if sorted(set(rank_of_stage)) != list(range(max(rank_of_stage, default=0) + 1)):
        raise ValueError(
            f"rank_of_stage {tuple(rank_of_stage)} leaves a rank without a stage; number them 0, 1, ... and use all"
        )


ORDERS: dict[str, type[Order]] = {
    "gpipe": GPipe,
    "1f1b": OneForwardOneBackward,
    "interleaved": Interleaved,
    "relay": Relay,
    "zb-h1": ZeroBubbleH1,
    "zbv": ZeroBubbleV,
    "async": Asynchronous,
    "merged-gpipe": MergedGPipe,
    "merged-1f1b": MergedOneForwardOneBackward,
}


MERGED = {"gpipe": "merged-gpipe", "1f1b": "merged-1f1b"}
"""The order of one stage on each rank -> the one that merges it where ranks have several, in any placement."""


@dataclass(frozen=True)
class Preset:
    """A combination with a name.

    Attributes:
        order: in `ORDERS`.
        weights: in `POLICIES`.
        balance: saved activations are moved between the ranks of a pair.
        placement: in `PLACEMENTS`.
        recompute: backwards are preceded by a recompute.
        residency: weights live on the host, and how; None: on the device.
    """

    order: str
    weights: str
    balance: bool = False
    placement: str = "round-robin"
    recompute: bool = False
    residency: Residency | None = None

    def validate(self) -> None:
        """Raises ValueError where an order, a policy or a placement of that name is in no table."""
        if self.order not in ORDERS:
            raise ValueError(f"there is no order {self.order!r}; choose from {', '.join(ORDERS)}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"there is no placement {self.placement!r}; choose from {', '.join(PLACEMENTS)}")
        weight_policy(self.weights)

    @property
    def policy(self) -> WeightPolicy:
        """The row of `weights`."""
        return weight_policy(self.weights)

    @property
    def interleaves(self) -> bool:
        """Whether ranks have several stages."""
        return ORDERS[self.order].interleaves

    @property
    def virtual_stages(self) -> int | None:
        """How many stages a rank has, where there is one number that the order takes."""
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
    "zbv": Preset("zbv", "flush", placement="v"),
    "l2l": Preset("relay", "flush", recompute=True, residency=Residency()),
}
