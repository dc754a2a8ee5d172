"""The schedules that a search may choose from: the registered presets, and what they are when they move activations.

A name stands for a `Preset`, and all that a search has to know of a schedule follows from that. `NAME+balance` is the
preset of that name that moves saved activations besides; those with weights on the host have nothing to move.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules import ORDERS, PRESETS, Preset, Schedule
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.placements import PLACEMENTS, rank_of_stage

PLAIN = Preset("1f1b", "flush")
"""What others are compared with: no schedule saves less on one stage, and none drains with fewer bubbles there."""

_BALANCED = "+balance"
_FEW_RANKS = 4
_MOST_RANKS = 16  # on which something has to be moved, if ever
_MANY = (1 << 20,)  # microbatches, which fill any pipeline


def offered() -> dict[str, Preset]:
    """All of them by name, as the tables are now: the presets, those that can be balanced besides, and last those with
    weights on the host.

    Raises:
        ValueError: a preset names an order, a policy or a placement that is in no table.
    """
    for name, preset in PRESETS.items():
        try:
            preset.validate()
        except ValueError as error:
            raise ValueError(f"schedule {name}: {error}") from error
    known = {name: preset for name, preset in PRESETS.items() if preset.residency is None}
    balanced = {f"{name}{_BALANCED}": replace(preset, balance=True) for name, preset in known.items()}
    others = set(known.values())
    moving = {name: preset for name, preset in balanced.items() if preset not in others and can_move(preset)}
    return known | moving | {name: preset for name, preset in PRESETS.items() if preset.residency is not None}


def preset_of(name: str) -> tuple[str, bool]:
    """The name in `PRESETS` that is in a name of `offered`, and whether it is balanced besides what the preset says."""
    return (name, False) if name in PRESETS else (name.removesuffix(_BALANCED), name.endswith(_BALANCED))


def offer(name: str) -> Preset:
    """What a name of `offered` stands for."""
    preset, balanced = preset_of(name)
    return replace(PRESETS[preset], balance=True) if balanced else PRESETS[preset]


def delayed(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these names whose weight policy lets batches miss updates; all others compute what flush computes."""
    return tuple(name for name in names if not offer(name).policy.drains)


def name_of(preset: Preset) -> str:
    """A name of such a preset; of one that has none, its order and weights."""
    return next((name for name, each in offered().items() if each == preset), f"{preset.order} with {preset.weights}")


def _meaning(preset: Preset) -> tuple[str, type[Order], WeightPolicy, str, Callable]:
    """What a preset is made of, and what the names of its order and its placement stand for now."""
    return preset.order, ORDERS[preset.order], preset.policy, preset.placement, PLACEMENTS[preset.placement]


def splits(preset: Preset) -> bool:
    """Whether such a schedule computes backwards in halves, I and W."""
    return _splits(*_meaning(preset))


@lru_cache(maxsize=256)
def _splits(order: str, meaning: type[Order], weights: WeightPolicy, placement: str, _: Callable) -> bool:
    virtual = (meaning.virtual_stages or 2) if meaning.interleaves else 1
    placed = rank_of_stage(placement, _FEW_RANKS, virtual)
    try:
        schedule = Schedule(order=order, weights=weights, num_stages=_FEW_RANKS * virtual, rank_of_stage=placed)
    except ValueError:
        return False
    return schedule.splits_backward


def can_move(preset: Preset) -> bool:
    """Whether there are numbers of ranks on which such a schedule moves activations, and it is not refused."""
    return fewest_ranks(preset) is not None


def fewest_ranks(preset: Preset) -> int | None:
    """From which number of ranks on those of a pair save too differently (BPipe, 3.3 and appendix A); None: never."""
    if preset.residency is not None:
        return None
    return _fewest_ranks(*_meaning(preset))


@lru_cache(maxsize=256)
def _fewest_ranks(order: str, meaning: type[Order], weights: WeightPolicy, placement: str, _: Callable) -> int | None:
    virtual = (meaning.virtual_stages or 2) if meaning.interleaves else 1
    for ranks in range(2, _MOST_RANKS + 1):
        try:
            placed = rank_of_stage(placement, ranks, virtual)
            schedule = Schedule(
                order=order, weights=weights, num_stages=ranks * virtual, rank_of_stage=placed, balance=True
            )
        except ValueError:
            continue
        if _moves(schedule):
            return ranks
    return None


@lru_cache(maxsize=1024)
def _moves(schedule: Schedule) -> bool:
    return bool(schedule.evicting_ranks(_MANY))
