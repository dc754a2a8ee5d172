"""What is searched: the choices that are considered, and the schedules among them.

The schedules are the registered presets, and what they are when they move activations. A name stands for a `Preset`,
and all that a search has to know of a schedule follows from that. `NAME+balance` is the preset of that name that moves
saved activations besides; those with weights on the host have nothing to move.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megatron.pipeline.placement.mapping import NAMES
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules import ORDERS, PRESETS, Preset, Schedule
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.placements import PLACEMENTS, rank_of_stage
from megatron.planner.memory.activations import RecomputeScope

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


SCOPES = tuple(RecomputeScope)
"""The scopes in the order of BPipe, section 4.2: each recomputes more than the one before."""

RANK_MAPPINGS = NAMES
"""`optimized` takes a search of its own, so it is tried for the best of the others."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Choices. None: all that there are.

    Attributes:
        num_gpus, gpus_per_node: of the cluster; all are used.
        global_batch_size: sequences in a batch.
        safe_batch_size: PipeDream-2BW's B, section 4.3: a schedule may accumulate more microbatches, up to a batch of
            so many sequences. None: the batch is `global_batch_size` exactly.
        schedules: names in `offered()`; by default those with weights on the device.
        unasked: those that stand beside the ranking, since they delay weights and nobody asked for them by name.
        tensor, pipeline, virtual, micro_batch_sizes: restrict t, p, v and microbatches to these.
        scopes: recompute scopes, from the one that recomputes least.
        distributed_optimizer: whether its state is split over replicas; without replicas it is not.
        rank_mappings: names in `RANK_MAPPINGS`.
        early_stopping: where a scope fits, those that recompute more are left out, and so is balance.
        needs_fused_softmax: configurations without Megatron's fused softmax are left out.
        avoids_pressure: configurations whose allocator is short of memory are left out.
        provisional, provisional_microbatches, provisional_reduce: how 2bw predicts its weights, as in `Configuration`.
            Where there are no replicas, none reduce.
        context, expert: context and expert parallel sizes that are considered, the latter where the model has experts.
        expert_tensor: expert tensor parallel size; None: t.
    """

    num_gpus: int
    gpus_per_node: int
    global_batch_size: int
    safe_batch_size: int | None = None
    schedules: tuple[str, ...] = field(default_factory=lambda: schedules_on_device())
    unasked: tuple[str, ...] = ()
    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    virtual: tuple[int, ...] | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    scopes: tuple[RecomputeScope, ...] = SCOPES
    distributed_optimizer: tuple[bool, ...] = (True, False)
    rank_mappings: tuple[str, ...] = RANK_MAPPINGS
    early_stopping: bool = True
    needs_fused_softmax: bool = False
    avoids_pressure: bool = False
    provisional: str = "off"
    provisional_microbatches: int | None = None
    provisional_reduce: bool = False
    context: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    expert_tensor: int | None = None

    def __post_init__(self) -> None:
        for known, names, what in (
            (offered(), self.schedules, "schedule"),
            (RANK_MAPPINGS, self.rank_mappings, "rank mapping"),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"there is no {what} {name!r}; choose from {', '.join(known)}")
        if next(self.degrees(), None) is None:
            wanted = [f"{name} {' or '.join(map(str, sizes))}" for name, sizes in (
                ("tensor", self.tensor), ("pipeline", self.pipeline)) if sizes is not None]  # fmt: skip
            raise ValueError(
                f"{self.num_gpus} GPUs do not divide by {' times '.join(wanted)}; give parallel sizes that divide them"
            )
        if self.safe_batch_size is not None and self.safe_batch_size < self.global_batch_size:
            raise ValueError(
                f"the maximum safe batch of {self.safe_batch_size} sequences is below the batch of "
                f"{self.global_batch_size}; raise one or lower the other"
            )

    def mapping_matters(self, tensor: int) -> bool:
        """Whether another order of ranks brings others together: not on one node, nor where tensor ranks fill each."""
        return self.gpus_per_node < self.num_gpus and tensor < self.gpus_per_node

    @property
    def largest_batch_size(self) -> int:
        return self.safe_batch_size or self.global_batch_size

    def degrees(self) -> Iterator[tuple[int, int]]:
        """t and p whose product divides the GPUs, ascending."""
        for t in divisors(self.num_gpus):
            if self.tensor is None or t in self.tensor:
                for p in divisors(self.num_gpus // t):
                    if self.pipeline is None or p in self.pipeline:
                        yield t, p

    def microbatches(self, data: int) -> list[int]:
        """Sizes of microbatches that make up a batch on so many replicas, ascending.

        Where the batch is given, those that divide it; where it may grow, powers of two and those of
        `micro_batch_sizes` besides.
        """
        found = set()
        if self.global_batch_size % data == 0:
            found |= set(divisors(self.global_batch_size // data))
        if self.safe_batch_size is not None:
            most = self.largest_batch_size // data
            found |= {2**power for power in range(most.bit_length())}
            found |= {size for size in self.micro_batch_sizes or () if size <= most}
        return sorted(found if self.micro_batch_sizes is None else found & set(self.micro_batch_sizes))

    def stages_of_ranks(self, schedule: str, layers_of_rank: int) -> list[int]:
        """Values of v."""
        if not offer(schedule).interleaves:
            return [1]
        if offer(schedule).residency is not None:
            return [layers_of_rank] if self.virtual is None or layers_of_rank in self.virtual else []
        only = offer(schedule).virtual_stages
        virtual = [v for v in divisors(layers_of_rank) if v > 1 and only in (None, v)]
        return virtual if self.virtual is None else [v for v in virtual if v in self.virtual]


def schedules_on_device() -> tuple[str, ...]:
    """Names in `offered()`, without those that keep weights on the host."""
    return tuple(name for name, preset in offered().items() if preset.residency is None)


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
