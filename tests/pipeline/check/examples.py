"""Programs for the checker's tests: written out as text, built, and mutated."""

import dataclasses
from collections.abc import Collection, Iterator

from hypothesis import strategies as st

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH, weight_policy
from megatron.pipeline.schedules import Schedule
from tests.pipeline.strategies import PRESETS, runs


def written(*rows: str, batches: tuple[int, ...] = (1,), weights: str = "flush", **fields: object) -> Program:
    """A program from the text form of its rows; one stage a rank unless `rank_of_stage` says otherwise."""
    fields.setdefault("rank_of_stage", tuple(range(len(rows))))
    parsed = tuple(tuple(map(Instruction.parse, row.split())) for row in rows)
    return Program(rows=parsed, batches=batches, weights=weight_policy(weights), **fields)


def with_row(program: Program, rank: int, row: list[Instruction]) -> Program:
    """The program with another row on one rank."""
    rows = list(program.rows)
    rows[rank] = tuple(row)
    return dataclasses.replace(program, rows=tuple(rows))


def moved(program: Program, rank: int, position: int, place: int) -> tuple[Program, str]:
    """The program with an instruction at another place of its row, and what was done."""
    row = program.rows[rank]
    rest, each = [*row[:position], *row[position + 1 :]], row[position]
    return with_row(program, rank, [*rest[:place], each, *rest[place:]]), f"rank {rank}, {each}: {position} -> {place}"


def moved_later(
    program: Program, *, reach: int, kinds: Collection[Kind] = tuple(Kind)
) -> Iterator[tuple[Program, str]]:
    """Each instruction of these kinds up to `reach` places later."""
    for rank, row in enumerate(program.rows):
        for position in (position for position, each in enumerate(row) if each.kind in kinds):
            for place in range(position + 1, min(position + reach + 1, len(row))):
                yield moved(program, rank, position, place)


def saved_bounds(schedule: Schedule, batches: tuple[int, ...]) -> list[int]:
    """The saved microbatches that each stage may hold, by the formulas of the papers."""
    p, largest = schedule.num_stages, max(batches)
    if schedule.order == "gpipe":
        return [largest] * p
    if schedule.order in ("zb-h1", "zb-h2"):
        most = p if schedule.order == "zb-h1" else 2 * p - 1
        return [min(most, largest) if schedule.weights is FLUSH else most] * p
    if schedule.order in ("v-half", "v-min"):
        ranks = schedule.num_ranks
        most = 2 * ((ranks + 2) // 2 if schedule.order == "v-half" else (ranks + 4) // 3)
        return [min(most, largest)] * p
    if schedule.order == "zbv":
        ranks = schedule.num_ranks
        own = [*range(2 * ranks, ranks, -1), *range(ranks, 0, -1)] if schedule.num_virtual_stages == 2 else [ranks] * p
        return [min(each, largest) for each in own]
    if schedule.num_virtual_stages > 1:
        late = schedule.order == "interleaved-zb"
        return interleaved_bounds(schedule.num_ranks, schedule.num_virtual_stages, largest, late=late)
    if schedule.order == "interleaved-zb":
        return [min(p, largest)] * p
    bounds = [2 * (p - stage) - 1 if schedule.extra_warmup else p - stage for stage in range(p)]
    return [min(bound, largest) for bound in bounds] if schedule.weights is FLUSH else bounds


def interleaved_bounds(p: int, v: int, m: int, *, late: bool = False) -> list[int]:
    """Megatron's turns in groups of p, counted: the k-th forward and backward of a rank, and its warm-up. `late`: a
    backward ends with a W, as many turns behind the newest forward as the first rank's backward is."""
    peaks = [0] * (p * v)
    for rank in range(p):
        saved, ahead = [0] * v, min(2 * (p - (0 if late else rank) - 1) + (v - 1) * p, m * v)
        for k in range(m * v):
            saved[k % (p * v) // p] += 1
            for chunk in range(v):
                peaks[chunk * p + rank] = max(peaks[chunk * p + rank], saved[chunk])
            if k >= ahead:
                saved[v - 1 - (k - ahead) % (p * v) // p] -= 1
    return peaks


CHOICES = {
    "presets": PRESETS[:-1],
    "balances": False,
    "reads": (None, 1),
}
"""Schedules whose programs `saved_bounds` and the oracle know."""


def cases(*, max_batches: int = 4, **choices: object) -> st.SearchStrategy[tuple[Schedule, Program]]:
    """A schedule and a program that it builds: ramped-up batches, at any place of a run."""
    return runs(max_batches=max_batches, **CHOICES, **choices).map(lambda run: (run.schedule, run.build()))


@st.composite
def spots(draw: st.DrawFn, program: Program) -> tuple[int, int]:
    """A rank and a position in its row."""
    rank = draw(st.integers(0, len(program.rows) - 1))
    return rank, draw(st.integers(0, len(program.rows[rank]) - 1))


@st.composite
def broken(draw: st.DrawFn, program: Program) -> tuple[Program, str]:
    """The program with one instruction dropped, duplicated or re-versioned, and what was done. Never a good program."""
    rank, position = draw(spots(program))
    row = list(program.rows[rank])
    instruction = row[position]
    kinds = ["drop", "duplicate"] + (["re-version"] if instruction.version is not None else [])
    mutation = draw(st.sampled_from(kinds))
    if mutation == "drop":
        del row[position]
    elif mutation == "duplicate":
        row.insert(draw(st.integers(0, len(row))), instruction)
    else:
        others = [
            instruction.version + difference for difference in (-2, -1, 1, 2) if instruction.version + difference >= 0
        ]
        row[position] = dataclasses.replace(instruction, version=draw(st.sampled_from(others)))
    return with_row(program, rank, row), f"{mutation} {instruction} of rank {rank} at {position}"


@st.composite
def swapped(draw: st.DrawFn, program: Program) -> tuple[Program, str]:
    """The program with two instructions of a row exchanged, near ones more often. It may be good or not."""
    rank, first = draw(spots(program))
    row = list(program.rows[rank])
    second = min(len(row) - 1, first + draw(st.integers(1, 6)))
    row[first], row[second] = row[second], row[first]
    return with_row(program, rank, row), f"swap {row[second]} and {row[first]} of rank {rank} at {first} and {second}"
