"""A schedule made from a program that a user wrote, whose rows are continued for any number of batches.

`completion` adds the instructions that the rows leave out. `continuation` finds how the rows repeat, unless the file
states it (`# fill: 1`, `# period: 2`). All programs that a run may need are proved when the schedule is made, both for
the start of a run and after a drain during the run. Each small number of batches is proved by itself. Each way to drain
after any number of periods is proved by induction.

A file holds the text form of a program, or the compute-only form of torch (`program.csv_text`). The file may also state
the job that it is meant for (`# tensor: 2`, `# data: 4`). If the file leaves recompute, replicas or tied embeddings
open, the run decides about them. A file that contradicts the run is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.program.csv_text import names_stated, notes_of_completion, read_notes
from megatron.pipeline.program.instruction import HALVES, UPDATES, Instruction, Kind
from megatron.pipeline.program.program import PeriodicProgram, Program, shifted_row
from megatron.pipeline.schedules.compatibility import require_known_norm
from megatron.pipeline.schedules.completion import completed, renumbered, require_equal_batches, require_training
from megatron.pipeline.schedules.continuation import Continuation, Repetition, cuts_of, find_repetition
from megatron.pipeline.schedules.merged import MergedGPipe
from megatron.pipeline.schedules.one_f_one_b import GPipe
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule, ProgramInSegments


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramSchedule(PipelineSchedule):
    """A schedule that continues a program of one or more equal batches, from a drained state to a drained state.

    Make one with `of`. Two schedules are equal if they run equal programs with equal repetitions.

    Attributes:
        program: the complete program, numbered from batch 0 and microbatch 0.
        repetition: how its rows are continued.
        name: its name in messages and logs, such as the name of a file.
    """

    program: Program = field(repr=False)
    repetition: Repetition
    name: str = "program"
    residency: None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        program: Program,
        *,
        name: str = "program",
        fill: int | None = None,
        period: int | None = None,
        receives_ahead: int = 1,
    ) -> ProgramSchedule:
        """Make the schedule of a program.

        Args:
            program: a program with complete rows, or with rows that the passes can complete (see `completion`).
            name: the name for messages and logs.
            fill, period: the number of batches before the rows start to repeat, and in a repetition; None: to be found.
            receives_ahead: an added receive stands this many computations before the one that needs the tensor.

        Raises:
            ProgramError: the rows are wrong, or cannot be continued; the error names rank, position, instruction and
                reason.
            ValueError: no schedule can be made of such a program.
        """
        whole = completed(program, fill=fill, period=period, receives_ahead=receives_ahead)
        require_equal_batches(whole)
        settled = renumbered(whole, whole.weights.first_settled_batch)
        repetition = find_repetition(settled, cuts_of(settled), fill=fill, period=period)
        made = cls(program=renumbered(whole, 0), repetition=repetition, name=name)
        _ = made.proofs  # raises ProgramError if a proof fails
        return made

    # --- the program

    @property
    def text(self) -> str:
        """The text of the complete program and its repetition."""
        fill, period = self.repetition.num_fill, self.repetition.num_period
        return f"# fill: {fill}\n# period: {period}\n{self.program.to_csv()}"

    @cached_property
    def sha256(self) -> str:
        """The hash of `text`, in 64 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def short_hash(self) -> str:
        """The first digits of `sha256`, for logs."""
        return self.sha256[:12]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgramSchedule) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return int(self.short_hash, 16)

    def __reduce__(self) -> tuple:
        """Leave the cached properties out of a pickle; they are computed again."""
        return _made_of, (self.program, self.repetition, self.name)

    @property
    def drains_between_periods(self) -> bool:
        """Whether the rows repeat only as a whole, so that the pipeline drains although its weights need no drain."""
        return self.repetition.is_of_whole(self.program)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of each batch."""
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
    tied_stage = property(attrgetter("program.tied_stage"))
    tied_stages = property(attrgetter("program.tied_stages"))
    ties_are_apart = property(attrgetter("program.ties_are_apart"))
    copies = property(attrgetter("program.copies"))
    data_parallel = property(attrgetter("program.data_parallel"))
    provisional_microbatches = property(attrgetter("program.provisional_microbatches"))
    reduce_partial = property(attrgetter("program.reduce_partial"))
    optimistic = False

    @property
    def num_virtual_stages(self) -> int:
        return max(map(self.rank_of_stage.count, self.rank_of_stage))

    @property
    def balance(self) -> bool:
        return any(self.program.num_evictions)

    @property
    def swaps(self) -> bool:
        return any(self.program.num_offloads)

    @property
    def splits_backward(self) -> bool:
        return any(each.kind in HALVES for row in self.program.rows for each in row)

    def recomputes(self, stage: int) -> bool:
        return self.program.recomputes(stage)

    def keeps(self, stage: int) -> frozenset[int]:
        return self.program.keeps(stage)

    def num_held(self, word: Instruction) -> int:
        """Return the same as `Extent.num_held`, for a word of any batch."""
        return self.program.num_held(replace(word, version=1))

    # --- batches and memory

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
        """Build a run from batch 0 on of a fill and any number of periods."""
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
        """The largest number of batches since a drain for which the drain that follows may have a form of its own.

        This is the sum of the batches of the fill and the period, of the batches during which the first versions are
        alive, which the first batches of a run share, and of one more batch, because a segment begins with the rest of
        the part before.
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
        """The reports of the proofs of all programs that a run may need; computed on first use.

        Raises:
            ProgramError: for some number of batches, the run can neither drain nor go on correctly.
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
        """The largest number of saved microbatches of each stage, and of each rank, in any run."""
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
    """A file is meant for another run.

    The attributes let a caller name the flag that solves the conflict.

    Attributes:
        fact: the name of the fact that differs.
        is_asked: the value that the run asks for.
    """

    def __init__(self, fact: str, is_asked: bool | int, reason: str) -> None:
        super().__init__(reason)
        self.fact, self.is_asked = fact, is_asked


def read_schedule(
    path: str | Path,
    *,
    text: str | None = None,
    recompute: bool | None = None,
    tied_embeddings: bool | None = None,
    data_parallel: bool | None = None,
    norm_decides: bool = False,
    tensor: int | None = None,
    data: int | None = None,
) -> ProgramSchedule:
    """Read the program in a file and make its schedule, complete and proved for any number of batches.

    Args:
        path: a CSV file with a row of instructions for each rank.
        text: the text of the file, if the caller has read it; `path` is then only the name in messages.
        recompute: whether a recompute precedes each backward; it is added to rows without updates. None: as in the
            file.
        tied_embeddings: whether the first and another stage share an embedding; None: as in the file.
        data_parallel: whether the pipeline has replicas; None: as in the file.
        norm_decides: an update depends on all stages together, for example because gradients are clipped by their norm.
        tensor, data: the tensor and data parallel degrees of the job; None: as in the file.

    Returns:
        The schedule; `sha256` is its hash, and `repetition` says how its rows are continued.

    Raises:
        ProgramError: the rows are wrong, or cannot be continued for any number of batches. The error, a ValueError, has
            rank, position, instruction and reason.
        OtherRun: the file contradicts the arguments. The error is a ValueError.
        ValueError: the file cannot be read, or no schedule can be made of it. All of these errors name the file.
    """
    asked = {"recompute": recompute, "tied_embeddings": tied_embeddings, "data_parallel": data_parallel}
    text = _text(path) if text is None else text
    try:
        notes = read_notes(text)
        _require_degrees(notes, {"tensor": tensor, "data": data})
        program = Program.from_csv(text)
        require_training(program)
        if program.copies:
            raise ValueError(
                "its stages are copies (# copies: ...), and a file is for one of the replicas, which run it alike; "
                "leave copies out"
            )
        program = _agreed(program, names_stated(text), asked)
        require_known_norm(program.weights, f"weights {program.weights.name}", norm_decides=norm_decides)
        return ProgramSchedule.of(program, name=str(path), **notes_of_completion(notes))
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
    """Set the facts that a program leaves to the run. Raises OtherRun if the program contradicts the run."""
    has_updates = any(each.kind in UPDATES for row in program.rows for each in row)
    for name, wanted in asked.items():
        says = getattr(program, name)
        if wanted is None or says == wanted:
            continue
        is_moot = name == "tied_embeddings" and not program.ties_are_apart
        is_left = name not in stated and not has_updates and not says
        if not (is_moot or is_left):
            raise OtherRun(name, wanted, f"the program {_SAYS[name][says]}; write it for this run")
        program = replace(program, **{name: wanted})
    return program
