"""Times of stages, updates, transfers and all-reduces of any size, from the times in a profile.

A profile has times of stages with few layers. The time of a layer is the difference between two middle stages of
different length, divided by the difference of their lengths. A stage of n layers takes the time of the profiled stage
and of the additional layers. Times are interpolated between the microbatch sizes, the numbers of working processes and
the numbers of bytes in the profile. Only times of transfers, all-reduces and copies are extrapolated, at the bandwidth
between the two largest sizes in the profile. Below the smallest size they have its time.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron.pipeline.program.weight_policies import POLICIES, WeightPolicy, weight_policy
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import Profile, StagePosition, UpdateTime


@dataclass(frozen=True)
class Seconds:
    """Seconds of a microbatch. `halves`: seconds of I and W; None unless the profile has them for all parts."""

    forward: float
    backward: float
    halves: tuple[float, float] | None = None

    def __add__(self, other: "Seconds") -> "Seconds":
        halves = None
        if self.halves is not None and other.halves is not None:
            halves = self.halves[0] + other.halves[0], self.halves[1] + other.halves[1]
        return Seconds(self.forward + other.forward, self.backward + other.backward, halves)

    def __sub__(self, other: "Seconds") -> "Seconds":
        return self + other * -1.0

    def __mul__(self, factor: float) -> "Seconds":
        halves = None if self.halves is None else (self.halves[0] * factor, self.halves[1] * factor)
        return Seconds(self.forward * factor, self.backward * factor, halves)


class Blocks:
    """Looks up times in a profile. Each method raises ValueError with a remedy if the profile lacks the time.

    `stage` returns the `Seconds` of a microbatch through a stage (see `_stage`), cached.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.stage = lru_cache(maxsize=None)(self._stage)

    # --- times of a microbatch

    def _stage(
        self, place: StagePosition, num_layers: int, *, tensor: int, size: int, recompute: RecomputeScope, working: int
    ) -> Seconds:
        """Return the seconds of `size` sequences through a stage, while `working` processes compute."""
        few, _ = self._layers
        whole = self._timed(place, few, tensor, size, recompute, working)
        return whole + self.layer(tensor=tensor, size=size, recompute=recompute, working=working) * (num_layers - few)

    def layer(self, *, tensor: int, size: int, recompute: RecomputeScope, working: int) -> Seconds:
        """Return the seconds of one layer."""
        few, many = self._layers
        less, more = (self._timed(StagePosition.MIDDLE, each, tensor, size, recompute, working) for each in (few, many))
        return (more - less) * (1 / (many - few))

    def _timed(
        self, place: StagePosition, num_layers: int, tensor: int, size: int, recompute: RecomputeScope, working: int
    ) -> Seconds:
        asked = f"t={tensor}, recompute {recompute.value}"
        found: dict[int, dict[int, Seconds]] = {}
        for each in self.profile.stages:
            if (each.place, each.num_layers, each.tensor, each.recompute) == (place, num_layers, tensor, recompute):
                times = Seconds(each.forward.median, each.backward.median, each.halves)
                found.setdefault(each.micro_batch_size, {})[each.working] = times
        if not found:
            raise ValueError(f"the profile has no {asked}; add it (--tensor-sizes, --recompute)")
        at_work = {each: self._at_work(counts, working, asked) for each, counts in found.items()}
        return _between(
            at_work, size, lambda: f"microbatches of {size} ({asked}) are not between sizes that were profiled, "
            f"{_listed(at_work)}; profile them (--micro-batch-sizes)"
        )  # fmt: skip

    def _at_work(self, found: Mapping[int, Seconds], working: int, asked: str) -> Seconds:
        if not self.profile.shares_processor:
            return found[max(found)]
        return _between(
            found, working, lambda: f"{working} processes at work ({asked}) are not between the numbers that were "
            f"profiled, {_listed(found)}; profile with --processes {working}"
        )  # fmt: skip

    @property
    def _layers(self) -> tuple[int, int]:
        counts = sorted({each.num_layers for each in self.profile.stages if each.place is StagePosition.MIDDLE})
        if len(counts) < 2:
            raise ValueError("the profile has middle stages of one length, so no layer; profile two (--layers)")
        return counts[0], counts[-1]

    # --- times of a batch

    def update(
        self,
        place: StagePosition,
        num_layers: int,
        *,
        tensor: int,
        weights: WeightPolicy | str,
        working: int,
        seconds: Callable[[UpdateTime], float] = UpdateTime.seconds,
    ) -> float:
        """Return the seconds in which gradients of a stage are zeroed, measured, clipped and applied.

        `seconds`: computes the result from the profiled times of an update; default: the whole update.
        """
        few, many = self._layers
        weights = self._profiled_like(weight_policy(weights))
        whole = self._timed_update(place, few, tensor, weights, working, seconds)
        less, more = (
            self._timed_update(StagePosition.MIDDLE, each, tensor, weights, working, seconds) for each in (few, many)
        )
        return whole + (num_layers - few) * (more - less) / (many - few)

    def _profiled_like(self, weights: WeightPolicy) -> str:
        """Return the policy's name if the profile has it, else a profiled policy whose steps write in the same way.

        Steps write either in place or into a buffer that is not in use.
        """
        known = sorted({each.weights for each in self.profile.updates})
        alike = (name for name in known if name in POLICIES and POLICIES[name].drains == weights.drains)
        return weights.name if weights.name in known else next(alike, weights.name)

    def _timed_update(
        self,
        place: StagePosition,
        num_layers: int,
        tensor: int,
        weights: str,
        working: int,
        seconds: Callable[[UpdateTime], float],
    ) -> float:
        asked = f"updates with {weights} weights, t={tensor}"
        found = {
            each.working: seconds(each)
            for each in self.profile.updates
            if (each.place, each.num_layers, each.tensor, each.weights) == (place, num_layers, tensor, weights)
        }
        if not found:
            raise ValueError(f"the profile has no {asked}; add them (--weights, --tensor-sizes)")
        if not self.profile.shares_processor:
            return found[max(found)]
        return _between(found, working, lambda: f"{asked} of {working} processes are not between the numbers that were "
                        f"profiled, {_listed(found)}; profile with --processes {working}")  # fmt: skip

    # --- between ranks

    def transfer(self, num_bytes: float) -> float:
        """Return the seconds of a transfer from one rank to the next on the same machine."""
        found = {each.num_bytes: each.seconds.median for each in self.profile.transfers}
        if not found:
            raise ValueError("the profile has no transfers; profile with --processes 2 or more")
        return _of_bytes(found, num_bytes)

    def all_reduce(self, ranks: int, num_bytes: float) -> float:
        """Return the seconds of an all-reduce over `ranks` processes of one machine."""
        found = {each.num_bytes: each.seconds.median for each in self.profile.all_reduces if each.ranks == ranks}
        if not found:
            raise ValueError(f"the profile has no all-reduce over {ranks} ranks; profile with --processes {ranks}")
        return _of_bytes(found, num_bytes)

    # --- between a device and its host

    def copy(self, direction: str, num_bytes: float, *, working: int) -> float:
        """Return the seconds of a copy "to device" or "from device", while `working` processes copy."""
        found: dict[int, dict[int, float]] = {}
        for each in self.profile.copies:
            if each.direction == direction:
                found.setdefault(each.working, {})[each.num_bytes] = each.seconds.median
        return self._on_host({count: _of_bytes(sizes, num_bytes) for count, sizes in found.items()}, working)

    def host_update(self, kernel: str, *, working: int) -> float:
        """Return the seconds per parameter of the host's optimizer, while `working` processes step."""
        found = {each.working: each.seconds.median / each.num_parameters
                 for each in self.profile.host_updates if each.kernel == kernel}  # fmt: skip
        return self._on_host(found, working)

    def _on_host(self, found: Mapping[int, float], working: int) -> float:
        if not found:
            raise ValueError(
                "the profile has no copies between host and device, and no updates there; write it anew with "
                "tools/profile_model.py"
            )
        if not self.profile.shares_processor:
            return found[max(found)]
        return _between(found, working, lambda: f"{working} processes at work on the host are not between the numbers "
                        f"that were profiled, {_listed(found)}; profile with --processes {working}")  # fmt: skip


def _between(found: Mapping[int, "Seconds | float"], wanted: int, refusal: Callable[[], str]) -> "Seconds | float":
    """Return the value at `wanted`, interpolated linearly. Raises ValueError outside the known range."""
    if wanted in found:
        return found[wanted]
    known = sorted(found)
    above = bisect_left(known, wanted)
    if above in (0, len(known)):
        raise ValueError(refusal())
    low, high = known[above - 1], known[above]
    share = (wanted - low) / (high - low)
    return found[low] * (1 - share) + found[high] * share


def _of_bytes(found: Mapping[int, float], num_bytes: float) -> float:
    """Return the seconds for a number of bytes, interpolated linearly.

    Below the smallest known number the result is its seconds. Above the largest known number it grows at the rate
    between the last two.
    """
    known = sorted(found)
    if num_bytes <= known[0]:
        return found[known[0]]
    above = min(bisect_left(known, num_bytes), len(known) - 1)
    low, high = known[max(above - 1, 0)], known[above]
    rate = (found[high] - found[low]) / (high - low) if high > low else found[high] / high
    return found[low] + max(rate, 0.0) * (num_bytes - low)


def _listed(found: Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(found)))
