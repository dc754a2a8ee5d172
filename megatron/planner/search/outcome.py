"""What a search finds: every choice that it considered, kept with an estimate or rejected with a reason."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from megatron.planner.intervals import Interval, NotValidated
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import Software
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.search.bill import Bill, Budget
from megatron.planner.search.compared import WithoutPipeline
from megatron.planner.search.objective import SUPERLATIVES
from megatron.planner.search.offers import preset_of


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration, or several that were rejected together: None stands for any value.

    `context` is None also where no ranks share sequences in a whole search, and so are `expert` and `expert_tensor`
    where the model has no experts.
    """

    tensor: int
    pipeline: int | None = None
    data: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    schedule: str | None = None
    virtual: int | None = None
    recompute: RecomputeScope | None = None
    distributed_optimizer: bool | None = None
    rank_mapping: str | None = None
    provisional: str | None = None
    provisional_microbatches: int | None = None
    provisional_reduce: bool | None = None
    single_gradient_buffer: bool | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None

    def configuration(self, *, sequence_parallel: bool) -> Configuration:
        """The configuration; nothing is None but the mapping, which is then the standard one, and what predictions are
        made from, of which there are then none."""
        preset, balance = preset_of(self.schedule)
        return Configuration(
            tensor=self.tensor, pipeline=self.pipeline, data=self.data, virtual=self.virtual,
            micro_batch_size=self.micro_batch_size, global_batch_size=self.global_batch_size,
            recompute=self.recompute, schedule=preset, balance=balance, sequence_parallel=sequence_parallel,
            distributed_optimizer=self.distributed_optimizer, rank_mapping=self.rank_mapping or "standard",
            provisional=self.provisional or "off", provisional_microbatches=self.provisional_microbatches,
            provisional_reduce=bool(self.provisional_reduce),
            single_gradient_buffer=bool(self.single_gradient_buffer),
            context=self.context or 1, expert=self.expert or 1, expert_tensor=self.expert_tensor,
        )  # fmt: skip

    @property
    def key(self) -> tuple:
        """Orders choices where nothing else does."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple((value is not None, value if value is not None else 0) for value in values)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """`reason`: one clause. `missing_gib`: where it is memory, of the fullest GPU."""

    choice: Choice
    reason: str
    missing_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A configuration that can run.

    Attributes:
        estimate: its time and memory.
        software: what trains it; None: nobody says.
        is_simulated: the time is that of its very program, which is proved; else of the closed form, or where the
            schedule has none of programs that may be shorter.
        notes: what slows it down, and what it changes besides what is compared, a clause each.
        accuracy: the interval of its time, or why there is none; None: nobody asked.
        bill: what a training takes with it; None: nobody asked.
    """

    choice: Choice
    estimate: Estimate
    software: Software | None = None
    is_simulated: bool = False
    notes: tuple[str, ...] = ()
    accuracy: Interval | NotValidated | None = None
    bill: Bill | None = None

    @property
    def layers(self) -> str:
        """Whose layers it trains, and with which attention, in a table's words."""
        return "" if self.software is None else self.software.layers

    @property
    def sequences_per_second(self) -> float:
        return self.choice.global_batch_size / self.estimate.seconds

    @cached_property
    def memory_gib(self) -> float:
        """The memory of the fullest GPU."""
        return max(rank.total for rank in self.estimate.memory) / 2**30


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search found.

    Attributes:
        kept: the ranking, from the best on by `objective`; and behind it what stands beside it, likewise.
        rejected: in the order of the search.
        without_pipeline: what others reach without one; None: it was not compared.
        unasked: names of schedules that stand beside the ranking (`Space.unasked`).
    """

    kept: tuple[Kept, ...]
    rejected: tuple[Rejected, ...]
    objective: str = "time"
    without_pipeline: WithoutPipeline | None = None
    unasked: frozenset[str] = frozenset()

    @cached_property
    def ranking(self) -> tuple[Kept, ...]:
        """From the best on."""
        return tuple(each for each in self.kept if each.choice.schedule not in self.unasked)

    @cached_property
    def beside(self) -> tuple[Kept, ...]:
        """What nobody asked for, from the best on."""
        return tuple(each for each in self.kept if each.choice.schedule in self.unasked)

    @property
    def rows(self) -> list[tuple[int | None, Kept]]:
        """All, each with its rank from 1; None: it stands beside the ranking."""
        return [*enumerate(self.ranking, start=1), *((None, each) for each in self.beside)]

    def gain(self, each: Kept) -> float | None:
        """By which part one beside the ranking is faster than the best of it; None: it is ranked, or nothing is."""
        if self.best is None or each.choice.schedule not in self.unasked:
            return None
        return each.sequences_per_second / self.best.sequences_per_second - 1

    @property
    def superlative(self) -> str:
        """What the best is: the fastest, unless something else was asked for."""
        return SUPERLATIVES[self.objective]

    @property
    def best_without_pressure(self) -> tuple[int, Kept] | None:
        """The best whose allocator is not short of memory, with its rank from 1."""
        ranked = enumerate(self.ranking, start=1)
        return next(((rank, each) for rank, each in ranked if not each.estimate.under_pressure), None)

    @property
    def best(self) -> Kept | None:
        return self.ranking[0] if self.ranking else None

    def with_prices(self, accuracy: Callable[[Kept], Interval | NotValidated], budget: Budget) -> "Outcome":
        """The same, where each kept configuration has the interval of its time and its bill."""
        kept = tuple(
            replace(
                each,
                accuracy=accuracy(each),
                bill=budget.bill(seconds=each.estimate.seconds, sequences=each.choice.global_batch_size),
            )
            for each in self.kept
        )
        return replace(self, kept=kept)

    def best_of_schedules(self) -> tuple[tuple[int | None, Kept], ...]:
        """The best of each schedule with its rank, as `rows`."""
        found: dict[str, tuple[int | None, Kept]] = {}
        for rank, each in self.rows:
            found.setdefault(each.choice.schedule, (rank, each))
        return tuple(found.values())

    def pareto_front(self) -> tuple[Kept, ...]:
        """Those of the ranking of which none is both faster and smaller, from the fastest on; for equals, the first
        stays."""
        front: list[Kept] = []
        for each in sorted(self.ranking, key=lambda kept: (-kept.sequences_per_second, kept.memory_gib)):
            if not front or each.memory_gib < front[-1].memory_gib:
                front.append(each)
        return tuple(front)
