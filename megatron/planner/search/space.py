"""The space of a search: the values of each choice, and the schedules by name.

The schedules are the presets, and balanced presets: `NAME+balance` is the preset NAME that also moves saved
activations. Presets with weights on the host have nothing to move. A search knows a schedule only by its `Preset`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from megatron.pipeline.placement.mapping import NAMES
from megatron.pipeline.placement.optimize import divisors
from megatron.pipeline.program.edges import rank_of_stage
from megatron.pipeline.schedules import PRESETS, Preset, Schedule
from megatron.planner.job.configuration import meaning
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.microbatch_flow import MANY

PLAIN = Preset("1f1b", "flush")
"""The schedule that is tried in place of all others on one stage: there no schedule saves or idles less."""

_BALANCED = "+balance"
_FEW_RANKS = 4
_MOST_RANKS = 16  # a preset that moves nothing up to here never moves anything


def offered() -> dict[str, Preset]:
    """All schedules of a search by name: the presets, then balanced presets, then presets with weights on the host.

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
    moving = {name: preset for name, preset in balanced.items() if preset not in others and fewest_ranks(preset)}
    return known | moving | {name: preset for name, preset in PRESETS.items() if preset.residency is not None}


def preset_of(name: str) -> tuple[str, bool]:
    """The name of the preset, and whether `name`, a name of `offered`, adds `+balance` to it."""
    return (name, False) if name in PRESETS else (name.removesuffix(_BALANCED), name.endswith(_BALANCED))


def offer(name: str) -> Preset:
    """The preset that a name of `offered` stands for."""
    preset, balanced = preset_of(name)
    return replace(PRESETS[preset], balance=True) if balanced else PRESETS[preset]


def delayed(names: Iterable[str]) -> tuple[str, ...]:
    """The names of schedules whose weight policy lets batches miss updates; all others compute the same as flush."""
    return tuple(name for name in names if not offer(name).policy.drains)


def name_of(preset: Preset) -> str:
    """The name of a preset; if it has none, its order and weights."""
    return next((name for name, each in offered().items() if each == preset), f"{preset.order} with {preset.weights}")


def _on_ranks(preset: Preset, ranks: int, **choices: Any) -> Schedule | None:
    """The schedule of a preset on `ranks` ranks, with the fewest stages on each; None: it is not valid."""
    virtual = preset.virtual_stages or 2
    try:
        placed = rank_of_stage(preset.placement, ranks, virtual)
        return Schedule(
            order=preset.order, weights=preset.policy, num_stages=ranks * virtual, rank_of_stage=placed, **choices
        )
    except ValueError:
        return None


def splits(preset: Preset) -> bool:
    """Whether schedules of this preset compute backwards in halves, I and W."""
    return _splits(meaning(preset))


@lru_cache(maxsize=256)
def _splits(meant: tuple[Any, ...]) -> bool:
    schedule = _on_ranks(meant[0], _FEW_RANKS)
    return schedule is not None and schedule.splits_backward


def fewest_ranks(preset: Preset) -> int | None:
    """The least number of ranks on which the preset moves activations (BPipe, 3.3 and appendix A); None: it never
    does."""
    return None if preset.residency is not None else _fewest_ranks(meaning(preset))


@lru_cache(maxsize=256)
def _fewest_ranks(meant: tuple[Any, ...]) -> int | None:
    on_ranks = ((ranks, _on_ranks(meant[0], ranks, balance=True)) for ranks in range(2, _MOST_RANKS + 1))
    return next((ranks for ranks, schedule in on_ranks if schedule is not None and _moves(schedule)), None)


@lru_cache(maxsize=1024)
def _moves(schedule: Schedule) -> bool:
    return bool(schedule.evicting_ranks(MANY))


SCOPES = tuple(RecomputeScope)
"""The recompute scopes in the order of BPipe, section 4.2: each recomputes more than the previous scope."""

RANK_MAPPINGS = NAMES
"""The rank mappings. Finding the `optimized` mapping takes a search of its own, so it is tried only for the best."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values that a search tries. None: all values.

    Attributes:
        num_gpus, gpus_per_node: size of the cluster; a search uses all GPUs.
        global_batch_size: sequences in a batch.
        safe_batch_size: B of PipeDream-2BW, section 4.3, in sequences: a schedule may accumulate more microbatches, up
            to a batch of this size. None: the batch is `global_batch_size` exactly.
        schedules: names in `offered()`; by default those with weights on the device.
        unasked: names of schedules beside the ranking, since they delay weights and the user did not name them.
        tensor, pipeline, virtual, micro_batch_sizes: the values of t, p, v and the microbatch size.
        scopes: recompute scopes, least recomputation first.
        distributed_optimizer: whether optimizer state is split over replicas; without replicas it is whole.
        rank_mappings: names in `RANK_MAPPINGS`.
        early_stopping: if a recompute scope fits, balance and scopes that recompute more are left out.
        needs_fused_softmax: configurations without Megatron's fused softmax are left out.
        avoids_pressure: configurations whose allocator is short of memory are left out.
        predictions: the settings of 2bw's weight prediction, by field of `Configuration`; empty: no prediction.
            `provisional_reduce` has no effect without replicas.
        context, expert: context parallel sizes, and expert parallel sizes for a model with experts.
        expert_tensor: expert tensor parallel size; None: t.

    Raises:
        ValueError: a schedule or mapping is unknown, no t and p divide the GPUs, or the safe batch is below the batch.
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
    predictions: Mapping[str, Any] = field(default_factory=dict)
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
        """Whether rank mappings differ. They are equal on one node, and if tensor ranks fill each node."""
        return self.gpus_per_node < self.num_gpus and tensor < self.gpus_per_node

    @property
    def largest_batch_size(self) -> int:
        return self.safe_batch_size or self.global_batch_size

    def degrees(self) -> Iterator[tuple[int, int]]:
        """Pairs of t and p whose product divides the number of GPUs, ascending."""
        for t in divisors(self.num_gpus):
            if self.tensor is None or t in self.tensor:
                for p in divisors(self.num_gpus // t):
                    if self.pipeline is None or p in self.pipeline:
                        yield t, p

    def microbatches(self, data: int) -> list[int]:
        """The microbatch sizes to try on `data` replicas, ascending.

        The sizes are the divisors of a replica's batch; if the batch may grow, powers of two and `micro_batch_sizes`
        are included. Sizes that are not in `micro_batch_sizes` are left out, unless it is None.
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
        """The values of v to try for a schedule whose ranks have `layers_of_rank` layers each."""
        if not offer(schedule).interleaves:
            return [1]
        if offer(schedule).residency is not None:
            return [layers_of_rank] if self.virtual is None or layers_of_rank in self.virtual else []
        only = offer(schedule).virtual_stages
        virtual = [v for v in divisors(layers_of_rank) if v > 1 and only in (None, v)]
        return virtual if self.virtual is None else [v for v in virtual if v in self.virtual]


def schedules_on_device() -> tuple[str, ...]:
    """The names in `offered()` of schedules that a search tries by default and that keep weights on the device."""
    return tuple(name for name, preset in offered().items() if preset.by_default and preset.residency is None)
