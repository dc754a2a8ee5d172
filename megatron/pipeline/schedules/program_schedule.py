"""A schedule made of a program that a user wrote: its rows run for any number of batches.

`completion` adds what the rows leave out, and `continuation` finds how they go on, or a file says it (`# fill: 1`,
`# period: 2`). All of it is proved when the schedule is made, from the start of a run and from a drain in its midst:
each small number of batches by itself, and each way to drain behind any number of periods by induction.

A file holds a program's text form or a compute-only file of torch's (`program.csv_text`). It may also say for which job
it is meant (`# tensor: 2`, `# data: 4`). What it leaves to the run (recompute, replicas, tied embeddings) the run
decides; where the file decides otherwise, it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.program.csv_text import names_stated, read_notes
from megatron.pipeline.program.instruction import HALVES, UPDATES, Kind
from megatron.pipeline.program.program import PeriodicProgram, Program, shifted_row
from megatron.pipeline.schedules.compatibility import require_known_norm
from megatron.pipeline.schedules.completion import completed, renumbered, require_equal_batches, require_training
from megatron.pipeline.schedules.continuation import Continuation, Repetition, cuts_of, find_repetition
from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.merged import MergedGPipe
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule, ProgramInSegments

_DIGITS = 12  # of a hash that is shown


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramSchedule(PipelineSchedule):
    """A program over one or more equal batches, from a drained state to a drained state, as a schedule.

    Equal programs are equal schedules.

    Attributes:
        program: complete, counted from batch and microbatch 0.
        repetition: how its rows go on.
        name: what it is called in messages and logs, such as its file.

    Raises:
        ValueError: as `of`.
    """

    program: Program = field(repr=False)
    repetition: Repetition
    name: str = "program"
    residency: None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls, program: Program, *, name: str = "program", fill: int | None = None, period: int | None = None
    ) -> ProgramSchedule:
        """The schedule that a program is.

        Args:
            program: rows that are complete, or leave out what the passes add (see `completion`).
            name: what to call it.
            fill, period: batches before its rows repeat themselves, and after how many they do; None: found.

        Raises:
            ProgramError: with rank, position, instruction and reason: rows that are wrong, or do not go on.
            ValueError: a program of which no schedule can be made at all.
        """
        whole = completed(program, fill=fill, period=period)
        require_equal_batches(whole)
        settled = renumbered(whole, whole.weights.first_settled_batch)
        repetition = find_repetition(settled, cuts_of(settled), fill=fill, period=period)
        made = cls(program=renumbered(whole, 0), repetition=repetition, name=name)
        _ = made.proofs  # raises what does not hold
        return made

    # --- what it is

    @cached_property
    def sha256(self) -> str:
        """The hash of what runs: the complete program's text, from batch 0 on, and how it goes on. 64 digits."""
        fill, period = self.repetition.num_fill, self.repetition.num_period
        text = f"# fill: {fill}\n# period: {period}\n{self.program.to_csv()}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def short_hash(self) -> str:
        """The first digits of `sha256`, for logs."""
        return self.sha256[:_DIGITS]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgramSchedule) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return int(self.short_hash, 16)

    def __reduce__(self) -> tuple:
        """For pickle: without what is worked out anew."""
        return _made_of, (self.program, self.repetition, self.name)

    @property
    def drains_between_periods(self) -> bool:
        """Whether the rows repeat as a whole only, so that the pipeline drains where its weights need not."""
        return self.repetition.is_of_whole(self.program)

    @property
    def num_microbatches(self) -> int:
        """Of each batch."""
        return self.program.batches[0]

    weights = property(attrgetter("program.weights"))
    name_of_weights = property(attrgetter("program.weights.name"))
    num_stages = property(attrgetter("program.num_stages"))
    num_ranks = property(attrgetter("program.num_ranks"))
    rank_of_stage = property(attrgetter("program.rank_of_stage"))
    edges = property(attrgetter("program.edges"))
    graph = property(attrgetter("program.graph"))
    num_frozen = property(attrgetter("program.graph.num_frozen"))
    pairs = property(attrgetter("program.pairs"))
    recompute = property(attrgetter("program.recompute"))
    tied_embeddings = property(attrgetter("program.tied_embeddings"))
    data_parallel = property(attrgetter("program.data_parallel"))
    provisional_microbatches = property(attrgetter("program.provisional_microbatches"))
    reduce_partial = property(attrgetter("program.reduce_partial"))

    @property
    def num_virtual_stages(self) -> int:
        return max(map(self.rank_of_stage.count, self.rank_of_stage))

    @property
    def balance(self) -> bool:
        return any(self.program.num_evictions)

    @property
    def splits_backward(self) -> bool:
        return any(each.kind in HALVES for row in self.program.rows for each in row)

    def recomputes(self, stage: int) -> bool:
        return self.program.recomputes(stage)

    # --- what it takes and demands

    def validate(self, num_microbatches: int) -> None:
        if num_microbatches != self.num_microbatches:
            raise ValueError(
                f"the program {self.name} has batches of {self.num_microbatches} microbatches, not {num_microbatches}; "
                "give batches of its size, or a program for yours"
            )

    @property
    def max_in_flight(self) -> int | None:
        return max(self._peaks[0])

    def max_saved_microbatches(self, batches: Sequence[int]) -> tuple[int, ...]:
        return self._peaks[0]

    def max_saved_on_rank(self, batches: Sequence[int]) -> tuple[int, ...]:
        return self._peaks[1]

    def evicting_ranks(self, batches: Sequence[int]) -> tuple[int, ...]:
        evictions = self.program.num_evictions
        return tuple(sorted({self.rank_of_stage[stage] for stage, count in enumerate(evictions) if count}))

    def remaining_backwards(self, num_microbatches: int) -> tuple[int, ...]:
        return self.program.unread

    @property
    def settling_batches(self) -> int:
        return self._most_unlike

    def window(self, batches: Sequence[int]) -> tuple[int, ...]:
        excess = max(0, len(batches) - self._most_unlike)
        period = self.repetition.num_period
        return tuple(batches[-(-excess // period) * period :])

    @cached_property
    def report_lag(self) -> int:
        num_batches, lag = self.repetition.num_fill + self.repetition.num_period, 0
        built = self._continuation.build(num_batches)
        stepped, posted = [0] * self.num_ranks, [0] * self.num_ranks
        for batch in range(num_batches):
            for rank, row in enumerate(built.segments(batch, batch + 1)):
                for each in row:
                    if each.kind is Kind.STEP:
                        stepped[rank] = each.version
                    elif each.kind is Kind.REDUCE_NORM:
                        posted[rank] = each.version
            lag = max(lag, batch + 1 - min(*stepped, *posted))
        return lag

    # --- programs

    def build_periodic(self, num_microbatches: int) -> PeriodicProgram:
        """The run from batch 0 on of any number of periods, behind a fill."""
        self.validate(num_microbatches)
        return self._periodic(self._most_unlike, first_batch=0)

    # --- parts

    def _build(self, batches: Sequence[int], first_batch: int, first_microbatch: int) -> ProgramInSegments:
        return self._continuation.build(len(batches), first_batch=first_batch, first_microbatch=first_microbatch)

    @cached_property
    def _continuation(self) -> Continuation:
        return Continuation(self.program, self.repetition)

    @property
    def _evaluation_order(self) -> Order:
        order = GPipe if self.num_stages == self.num_ranks else MergedGPipe
        return order(self.num_stages, rank_of_stage=self.rank_of_stage, edges=self.edges)

    @property
    def _most_unlike(self) -> int:
        """The most batches behind a drain that end like no fewer: those of fill and period; as many as the first
        versions live, which the first batches of a run share; and one more, since what a segment begins with is left
        from the part before.
        """
        shared = self.first_settled_batch and self.first_settled_batch + self.report_lag
        return self.repetition.num_fill + self.repetition.num_period + shared + 1

    def _periodic(self, num_fill: int, *, first_batch: int) -> PeriodicProgram:
        period, size = self.repetition.num_period, self.num_microbatches
        built = self._continuation.build(num_fill + period, first_batch=first_batch)
        return PeriodicProgram(
            extent=replace(built.program, rows=(), batches=(size,) * num_fill),
            fill=built.segments(0, num_fill),
            period=built.segments(num_fill, num_fill + period),
            drain=tuple(shifted_row(row, microbatches=-period * size, versions=-period) for row in built.drain),
            num_microbatches=size,
            num_batches=period,
        )

    @cached_property
    def proofs(self) -> tuple[CheckReport, ...]:
        """What was proved of everything that can be run: with the first use.

        Raises:
            ProgramError: a number of batches after which the run cannot drain, or go on.
        """
        last = self._most_unlike
        found = []
        for first_batch in {0, self.first_settled_batch}:
            few = range(1, last - self.repetition.num_period + 1)
            found += [check(self._continuation.build(num, first_batch=first_batch).program) for num in few]
            many = range(few.stop, last + 1)
            found += [check_periodic(self._periodic(num, first_batch=first_batch)) for num in many]
        return tuple(found)

    @cached_property
    def _peaks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The most saved microbatches, of each stage and of each rank, of everything that can be run."""
        of_stages = zip(*(each.peak_saved_microbatches for each in self.proofs), strict=True)
        of_ranks = zip(*(each.peak_saved_on_rank for each in self.proofs), strict=True)
        return tuple(map(max, of_stages)), tuple(map(max, of_ranks))


def _made_of(program: Program, repetition: Repetition, name: str) -> ProgramSchedule:
    return ProgramSchedule(program=program, repetition=repetition, name=name)


_SAYS = {
    "recompute": (
        "has no recomputes, and the run asks for them",
        "recomputes activations before its backwards, and the run does not ask for it",
    ),
    "tied_embeddings": (
        "does not reduce the gradients of tied embeddings, and the run ties them",
        "reduces the gradients of tied embeddings, and the run has none on two ranks",
    ),
    "data_parallel": (
        "does not reduce gradients over replicas, and the run has some",
        "reduces gradients over replicas, and the run has one",
    ),
}
_DEGREES = {"tensor": "tensor parallel", "data": "data parallel"}


class OtherRun(ValueError):
    """A file is meant for another run: `fact` is what differs, `is_asked` what the run wants of it. A caller that knows
    the flag can name the remedy.
    """

    def __init__(self, fact: str, is_asked: bool | int, reason: str) -> None:
        super().__init__(reason)
        self.fact, self.is_asked = fact, is_asked


def read_schedule(
    path: str | Path,
    *,
    recompute: bool | None = None,
    tied_embeddings: bool | None = None,
    data_parallel: bool | None = None,
    norm_decides: bool = False,
    tensor: int | None = None,
    data: int | None = None,
) -> ProgramSchedule:
    """The schedule that a file's program is: complete, and proved for any number of batches.

    Args:
        path: of a CSV file with a row of instructions for each rank.
        recompute: whether backwards are preceded by a recompute; it is added to rows without updates. None: as the file
            says.
        tied_embeddings: whether the first and the last stage share an embedding; None: as the file says.
        data_parallel: whether the pipeline has replicas; None: as the file says.
        norm_decides: an update depends on all stages together, as where gradients are clipped by their norm.
        tensor, data: tensor and data parallel degree of the job; None: whatever the file is meant for.

    Returns:
        The schedule; `sha256` is its hash, `repetition` how its rows go on.

    Raises:
        ProgramError: a ValueError with rank, position, instruction and reason: rows that are wrong, or that do not go
            on for any number of batches.
        OtherRun: a ValueError: the file says otherwise than the arguments.
        ValueError: a file that cannot be read. All of them name the file.
    """
    asked = {"recompute": recompute, "tied_embeddings": tied_embeddings, "data_parallel": data_parallel}
    text = _text(path)
    try:
        notes = read_notes(text)
        _require_degrees(notes, {"tensor": tensor, "data": data})
        program = Program.from_csv(text)
        require_training(program)
        program = _agreed(program, names_stated(text), asked)
        require_known_norm(program.weights, f"weights {program.weights.name}", norm_decides=norm_decides)
        return ProgramSchedule.of(program, name=str(path), fill=notes.get("fill"), period=notes.get("period"))
    except ValueError as error:
        error.args = (f"{path}: {error}",)
        raise


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a CSV file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error.reason}); give a CSV file") from error


def _require_degrees(notes: Mapping[str, int], degrees: Mapping[str, int | None]) -> None:
    for name, degree in degrees.items():
        meant = notes.get(name, degree)
        if degree is not None and meant != degree:
            raise OtherRun(
                name, degree,
                f"it is meant for {_DEGREES[name]} degree {meant} (# {name}: {meant}), and the job has {degree}; "
                "change one of them, or leave the line out",
            )  # fmt: skip


def _agreed(program: Program, stated: Collection[str], asked: Mapping[str, bool | None]) -> Program:
    """The program, with what it leaves to the run. Raises OtherRun where it says otherwise."""
    has_updates = any(each.kind in UPDATES for row in program.rows for each in row)
    for name, wanted in asked.items():
        says = getattr(program, name)
        if wanted is None or says == wanted:
            continue
        is_moot = name == "tied_embeddings" and program.rank_of_stage[0] == program.rank_of_stage[-1]
        is_left = name not in stated and not has_updates and not says
        if not (is_moot or is_left):
            raise OtherRun(name, wanted, f"the program {_SAYS[name][says]}; write it for this run")
        program = replace(program, **{name: wanted})
    return program
