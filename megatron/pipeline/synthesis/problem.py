"""The problem that a program solves: the times of computations, the memory that they hold, and each rank's limit.

All microbatches cost the same. So the j-th forward of a stage may as well be that of microbatch j, and so for each kind
of computation: whatever order of microbatches a program has, renumbering them stage by stage gives a program that takes
no longer and holds no more. A row is therefore a word over *queues*. A queue is a kind of computation at a stage, and
the n-th time that its number stands in the row means microbatch n. Every stage thus adds up its gradients in the order
of the microbatches, as `flush` does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.pipeline.program import csv_text
from megatron.pipeline.program.edges import validate_placement
from megatron.pipeline.program.extent import Extent, Kept
from megatron.pipeline.program.instruction import COMPUTATIONS, MOVES, SWAPS, Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH, WeightPolicy
from megatron.pipeline.simulate.costs import Costs, PerStage, spread

NONE = -1
ROUNDING = 1e-9
"""The fraction of a limit by which sums of sizes may exceed the limit, because of rounding."""
_OWN_WORDS = COMPUTATIONS | MOVES | SWAPS  # the words that the passes do not add

Words = list[list[int]]
"""For each rank, the queues of its computations in their order."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Costs and limits of one drained batch through a chain of stages.

    Attributes:
        rank_of_stage: the rank of each stage.
        num_microbatches: the number of microbatches of the batch.
        costs: seconds of computations and transfers. A transfer takes its bytes over the bandwidth, and its latency.
        saved: for each stage, the memory that a microbatch holds from its forward to the end of its I or B, in any
            unit.
        deferred: for each stage, the memory that a microbatch holds from then to the end of its W; None: as `saved`.
        stage_input: for each recomputed stage, the memory that a microbatch holds from its forward to its recompute.
        limits: for each rank, the most memory that its stages may hold together; or one number for all ranks.
        splits: backwards are in halves, I and W.
        recomputed: the stages whose activations are recomputed.
        kept: the microbatches of these stages that are not recomputed. Their R takes no time in words, and programs
            leave it out.

    Raises:
        ValueError: numbers do not fit the stages, or one microbatch alone exceeds the limit of a rank.
    """

    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    costs: Costs
    saved: PerStage = 1.0
    deferred: PerStage | None = None
    stage_input: PerStage = 0.0
    limits: PerStage = math.inf
    splits: bool = True
    recomputed: frozenset[int] = frozenset()
    kept: tuple[Kept, ...] = ()
    queues: tuple[tuple[Kind, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        validate_placement(self.rank_of_stage, self.num_stages)
        if self.num_microbatches < 1:
            raise ValueError(f"a batch cannot have {self.num_microbatches} microbatches; give 1 and more")
        foreign = [each for each in self.recomputed if not 0 <= each < self.num_stages]
        if foreign:
            raise ValueError(
                f"stages {foreign} cannot be recomputed, since there are stages 0 to {self.num_stages - 1}"
            )
        for stage, position in self.kept:
            if stage not in self.recomputed or position >= self.num_microbatches:
                raise ValueError(
                    f"kept has {stage}.{position}, which is no microbatch of a recomputed stage; leave it out"
                )
        kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if self.splits else (Kind.BACKWARD,)
        object.__setattr__(self, "queues", tuple(
            (kind, stage)
            for stage in range(self.num_stages)
            for kind in (Kind.FORWARD, *((Kind.RECOMPUTE,) if stage in self.recomputed else ()), *kinds)
        ))  # fmt: skip
        self._validate_sizes()

    def _validate_sizes(self) -> None:
        limits = self.limits if isinstance(self.limits, Sequence) else [self.limits] * self.num_ranks
        if len(limits) != self.num_ranks or not all(each > 0 for each in limits):
            raise ValueError(
                f"limits are {self.limits}; give a positive number, or one for each of {self.num_ranks} ranks"
            )
        if math.isinf(sum(self.saved_sizes) * self.num_microbatches):
            raise ValueError("what all microbatches save is more than a number can hold; count it in a larger unit")
        for name, sizes in (("deferred", self.deferred_sizes), ("stage_input", self.input_sizes)):
            for stage, (part, whole) in enumerate(zip(sizes, self.saved_sizes, strict=True)):
                if part > whole * (1 + ROUNDING):
                    raise ValueError(
                        f"{name} of stage {stage} is {part:g}, more than the {whole:g} that it saves in all"
                    )
        for rank, least in enumerate(self.least_limits):
            if least > self.limit_of(rank) * (1 + ROUNDING):
                raise ValueError(
                    f"rank {rank} may hold {self.limit_of(rank):g}, and one microbatch at its stages takes {least:g}; "
                    "raise the limit, or recompute"
                )

    @property
    def facts(self) -> dict[str, object]:
        """The facts on which a lower bound depends, as values for JSON: costs, limits, placement and words."""
        seconds = zip(self.queues, self.seconds, strict=True)
        transfers = zip(self.queues, self.sources, strict=True)
        limits = map(self.limit_of, range(self.num_ranks))
        return {
            "rank_of_stage": self.rank_of_stage,
            "num_microbatches": self.num_microbatches,
            "words": sorted({kind.value for kind, _ in self.queues}),
            "recomputed": sorted(self.recomputed),
            "recomputes": "any microbatches of these stages" if self.kept else "all microbatches of these stages",
            "seconds": {f"{stage}{kind.value}": each for (kind, stage), each in seconds},
            "seconds_of_transfer_to": {
                f"{stage}{kind.value}": delay for (kind, stage), (source, delay) in transfers if source != NONE
            },
            "saved": self.saved_sizes,
            "deferred": self.deferred_sizes,
            "limits": [None if math.isinf(limit) else limit for limit in limits],
        }

    # --- ranks, stages, queues

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @cached_property
    def number_of(self) -> dict[tuple[Kind, int], int]:
        """The number of each queue."""
        return {queue: number for number, queue in enumerate(self.queues)}

    @cached_property
    def queues_of_rank(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(number for number, (_, stage) in enumerate(self.queues) if self.rank_of_stage[stage] == rank)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def rank_of_queue(self) -> tuple[int, ...]:
        return tuple(self.rank_of_stage[stage] for _, stage in self.queues)

    @property
    def begins_backward(self) -> Kind:
        """The kind of computation that makes the gradient of a stage's input."""
        return Kind.BACKWARD_INPUT if self.splits else Kind.BACKWARD

    @cached_property
    def path(self) -> tuple[int, ...]:
        """The queues that a microbatch passes one after another: all forwards, then all I or B."""
        down = [self.number_of[Kind.FORWARD, stage] for stage in range(self.num_stages)]
        up = [self.number_of[self.begins_backward, stage] for stage in reversed(range(self.num_stages))]
        return (*down, *up)

    # --- time

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of a computation of each queue; the mean of R where some microbatches are kept."""
        return tuple(map(_mean, self.seconds_at))

    @cached_property
    def seconds_at(self) -> tuple[tuple[float, ...], ...]:
        """The seconds of each microbatch's computation of each queue."""
        of_kind = self.costs.seconds(self.num_stages)
        return tuple(
            tuple(
                0.0 if kind is Kind.RECOMPUTE and self.keeps(stage, microbatch) else of_kind[kind][stage]
                for microbatch in range(self.num_microbatches)
            )
            for kind, stage in self.queues
        )

    @cached_property
    def recomputed_microbatches(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the microbatches that it recomputes; stages without any are left out."""
        found = {
            stage: tuple(each for each in range(self.num_microbatches) if not self.keeps(stage, each))
            for stage in sorted(self.recomputed)
        }
        return {stage: each for stage, each in found.items() if each}

    @cached_property
    def num_recomputed(self) -> dict[int, int]:
        """Stage -> the number of its microbatches that are recomputed; stages without any are left out."""
        return {stage: len(each) for stage, each in self.recomputed_microbatches.items()}

    @cached_property
    def _keeps_some(self) -> frozenset[Kept]:
        return frozenset(self.kept)

    def keeps(self, stage: int, microbatch: int) -> bool:
        """Whether a microbatch is not recomputed."""
        return stage not in self.recomputed or (stage, microbatch) in self._keeps_some

    @cached_property
    def sources(self) -> tuple[tuple[int, float], ...]:
        """For each queue, the queue of another stage that it waits for, and the seconds of the transfer from there.

        NONE and 0 where it waits for no other stage.
        """
        sources = [(NONE, 0.0)] * len(self.queues)
        forward, backward, latency = self.costs.edges(self.num_stages - 1)
        for first, occupied, after in (
            (Kind.FORWARD, forward, False), (self.begins_backward, backward, True)
        ):  # fmt: skip
            for edge in range(self.num_stages - 1):
                crosses = self.rank_of_stage[edge] != self.rank_of_stage[edge + 1]
                ends = (edge + 1, edge) if after else (edge, edge + 1)
                seconds = (occupied[edge] + latency[edge]) * crosses
                sources[self.number_of[first, ends[1]]] = self.number_of[first, ends[0]], seconds
        return tuple(sources)

    @property
    def has_transfers(self) -> bool:
        """Whether transfers take time."""
        return any(delay for _, delay in self.sources)

    @property
    def receives_ahead(self) -> range:
        """The numbers of computations by which a receive may stand before the one that needs the tensor."""
        return range(1, 5 if self.has_transfers else 2)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each queue, the queue of the same stage that a microbatch has to pass directly before it; or NONE."""
        before, last = [NONE] * len(self.queues), {}
        for number, (_, stage) in enumerate(self.queues):
            before[number] = last.get(stage, NONE)
            last[stage] = number
        return tuple(before)

    def work(self, rank: int) -> float:
        """The seconds that a rank computes in the batch."""
        return self.num_microbatches * sum(self.seconds[each] for each in self.queues_of_rank[rank])

    @cached_property
    def unit(self) -> float:
        """The seconds that the busiest rank computes for one microbatch."""
        return max(map(self.work, range(self.num_ranks))) / self.num_microbatches

    def work_without_recompute(self, rank: int) -> float:
        own = [each for each in self.queues_of_rank[rank] if self.queues[each][0] is not Kind.RECOMPUTE]
        return self.num_microbatches * sum(self.seconds[each] for each in own)

    # --- memory

    @cached_property
    def saved_sizes(self) -> list[float]:
        return spread("saved", self.saved, self.num_stages)

    @cached_property
    def deferred_sizes(self) -> list[float]:
        return self.saved_sizes if self.deferred is None else spread("deferred", self.deferred, self.num_stages)

    @cached_property
    def input_sizes(self) -> list[float]:
        return spread("stage_input", self.stage_input, self.num_stages)

    def limit_of(self, rank: int) -> float:
        return float(self.limits[rank] if isinstance(self.limits, Sequence) else self.limits)

    def room_of(self, rank: int) -> float:
        """The most that a rank can hold within its limit, in whole microbatches where it holds one size only."""
        limit, size = self.limit_of(rank), self.only_size(rank)
        if math.isinf(limit) or not size:
            return limit
        return math.floor(limit / size * (1 + ROUNDING)) * size

    def only_size(self, rank: int) -> float | None:
        """The only size in which a rank holds microbatches at its stages; None: it holds several."""
        own = [stage for stage, at in enumerate(self.rank_of_stage) if at == rank]
        sizes = {sizes[stage] for stage in own for sizes in (self.saved_sizes, self.deferred_sizes)}
        return None if len(sizes) > 1 or self.recomputed.intersection(own) else min(sizes)

    @cached_property
    def takes(self) -> tuple[float, ...]:
        """By queue, the memory that a computation occupies from its start on, as the mean over microbatches."""
        return tuple(map(_mean, self.takes_at))

    @cached_property
    def takes_at(self) -> tuple[tuple[float, ...], ...]:
        """By queue, the memory that each microbatch's computation occupies from its start on, in units of `saved`."""
        takes = []
        for kind, stage in self.queues:
            whole, part = self.saved_sizes[stage], self.input_sizes[stage]
            kept, recomputed = {
                Kind.FORWARD: (whole, part), Kind.RECOMPUTE: (0.0, whole - part)
            }.get(kind, (0.0, 0.0))  # fmt: skip
            of_all = ((recomputed, kept)[self.keeps(stage, each)] for each in range(self.num_microbatches))
            takes.append(tuple(of_all))
        return tuple(takes)

    @cached_property
    def gives(self) -> tuple[float, ...]:
        """By queue, the memory that a computation frees at its end, in units of `saved`."""
        gives = []
        for kind, stage in self.queues:
            whole, part = self.saved_sizes[stage], self.deferred_sizes[stage]
            gives.append(
                {Kind.BACKWARD: whole, Kind.BACKWARD_INPUT: whole - part, Kind.BACKWARD_WEIGHT: part}.get(kind, 0.0)
            )
        return tuple(gives)

    @cached_property
    def least_limits(self) -> tuple[float, ...]:
        """For each rank, the least limit under which a batch can pass: that of one microbatch after another."""
        count = self.num_microbatches if self.kept else 1
        return tuple(self.most_held(rank, self.one_microbatch(rank) * count) for rank in range(self.num_ranks))

    def one_microbatch(self, rank: int) -> list[int]:
        """Return the computations of one microbatch on a rank, in the order of its path."""
        own = self.queues_of_rank[rank]
        forwards = [each for each in own if self.queues[each][0] is Kind.FORWARD]
        rest = [[each for each in own if self.queues[each][1] == stage and each not in forwards]
                for stage in sorted({self.queues[each][1] for each in own}, reverse=True)]  # fmt: skip
        return forwards + [each for queue in rest for each in queue]

    def most_held(self, rank: int, word: Sequence[int]) -> float:
        """The most that the rank holds at any time, in the unit of `saved`. A word may have several batches."""
        held = most = 0.0
        counts = [0] * len(self.queues)
        for queue in word:
            held += self.takes_at[queue][counts[queue] % self.num_microbatches]
            counts[queue] += 1
            most = max(most, held)
            held -= self.gives[queue]
        return most

    def held(self, words: Words) -> tuple[float, ...]:
        """The most that each rank holds at any time, in the unit of `saved`."""
        return tuple(self.most_held(rank, word) for rank, word in enumerate(words))

    def accepts(self, words: Words) -> bool:
        """Whether the word of each rank is in order."""
        return all(map(self.is_in_order, words, range(self.num_ranks)))

    def is_in_order(self, word: Sequence[int], rank: int) -> bool:
        """Whether a word keeps its rank's limit, and has the computations of each microbatch at a stage in their order.

        A word may have several batches.
        """
        counts, held, limit = [0] * len(self.queues), 0.0, self.limit_of(rank) * (1 + ROUNDING)
        m = self.num_microbatches
        takes, gives, before = self.takes_at, self.gives, self.before
        for queue in word:
            ahead, number = before[queue], counts[queue]
            if ahead >= 0 and number >= counts[ahead]:
                return False
            counts[queue] += 1
            held += takes[queue][number % m]
            if held > limit:
                return False
            held -= gives[queue]
        return True

    # --- programs

    def program(self, words: Words, weights: WeightPolicy = FLUSH, num_batches: int = 1) -> Program:
        """Return the program of computations alone."""
        rows = []
        for word in words:
            counts, row = [0] * len(self.queues), []
            for queue in word:
                kind, stage = self.queues[queue]
                if kind is not Kind.RECOMPUTE or not self.keeps(stage, counts[queue]):
                    row.append(Instruction(kind, stage, counts[queue]))
                counts[queue] += 1
            rows.append(tuple(row))
        recomputing = self.num_recomputed
        extent = Extent(
            weights=weights,
            batches=(self.num_microbatches,) * num_batches,
            rank_of_stage=self.rank_of_stage,
            recompute=bool(recomputing),
            not_recomputed=tuple(set(range(self.num_stages)) - {*recomputing}) if recomputing else (),
            kept=tuple(each for each in self.kept if each.stage in recomputing),
        )
        return Program.of(extent, tuple(rows))


def _mean(numbers: Sequence[float]) -> float:
    return numbers[0] if len({*numbers}) == 1 else sum(numbers) / len(numbers)


def csv_of(program: Program, receives_ahead: int) -> str:
    """Return the text of a program's computations and moves, for `--pipeline-program`.

    The passes add the rest for the run that reads it, such as reductions over replicas and of tied embeddings.
    """
    rows = tuple(tuple(replace(each, version=None) for each in row if each.kind in _OWN_WORDS) for row in program.rows)
    notes = {"receives_ahead": receives_ahead} if receives_ahead > 1 else {}
    return csv_text.to_csv(program, rows, leave_out=csv_text.FACTS_OF_RUN, notes=notes)
