"""Programs as text: comma-separated instructions, one line for each rank.

    # weights: 2bw
    # batches: 4 4 4
    0F0@0,0SEND_F0,0F1@0,0SEND_F1,...
    1RECV_F0,1RECV_F1,1F0@0,1SEND_F0,...

The lines of instructions are a superset of torch.distributed.pipelining's CSV form, which has no header: its files load
unchanged. Blank cells, its bubbles, are dropped, and so is its REDUCE_GRAD, which has no version: it says where a
stage's gradients are complete, and that is known. What a program is beyond its rows stands in leading lines
`# key: value`. Where one is missing it follows from the rows, or the caller gives it. Some say nothing of the program
itself but of the run that it is meant for (`read_notes`). Other lines with a leading # are comments. Reading is strict:
whatever is not understood is an error that names the row and the column.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.documents import counted
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BACKWARDS, ENDS_BACKWARD, Instruction, Kind, Row, Rows
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import FLUSH, POLICIES, WeightPolicy

_FACT = re.compile(r"#\s*([a-z_]+)\s*:(.*)")

# Torch's own words that have no counterpart here, with what they mean.
_TORCH_ONLY = {
    "OVERLAP_F_B": "overlaps a forward with a backward; write the two as cells of their own",
    "UNSHARD": "gathers FSDP's parameters; load the compute-only file",
    "RESHARD": "frees FSDP's parameters; load the compute-only file",
}

_TORCH_REDUCTION = re.compile(r"([0-9]+)REDUCE_GRAD")

_TORCH_COMPUTATIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_TORCH_KINDS = (*_TORCH_COMPUTATIONS, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD)


# --- facts


def _integer(text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise ValueError(f"{text!r} is not a number of 0 and more")
    return int(text)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_integer(word) for word in text.split())


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]*", text):
        raise ValueError(f"{text!r} is not a number of 1 and more")
    return int(text)


def _policy(text: str) -> WeightPolicy:
    if text not in POLICIES:
        raise ValueError(f"{text!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[text]


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _edges(text: str) -> tuple[Edge, ...]:
    return tuple(map(Edge.parse, text.split()))


_READ: dict[str, Callable[[str], Any]] = {
    "weights": _policy,
    "batches": _integers,
    "rank_of_stage": _integers,
    "first_batch": _integer,
    "first_microbatch": _integer,
    "edges": _edges,
    "recompute": _flag,
    "not_recomputed": _integers,
    "tied_embeddings": _flag,
    "data_parallel": _flag,
    "global_norm": _flag,
    "residency": Residency.parse,
    "unread": _integers,
    "provisional_microbatches": _integer,
    "reduce_partial": _flag,
    "forward_only": _flag,
}

# What is said of the run: how the rows go on, and the degrees of the job.
_NOTES: dict[str, Callable[[str], int]] = {"fill": _integer, "period": _count, "tensor": _count, "data": _count}


# Written where there are any.
_OF_FEW = ("edges", "not_recomputed", "residency", "unread", "provisional_microbatches", "reduce_partial")


def _write_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


# --- writing


def to_csv(extent: Extent, rows: Rows) -> str:
    """The text from which `Program.from_csv` reads the program of these rows."""
    names = [name for name in _READ if name not in _OF_FEW or getattr(extent, name)]
    facts = [f"# {name}: {_write_value(getattr(extent, name))}" for name in names]
    return "\n".join([*facts, *(",".join(map(str, row)) for row in rows)]) + "\n"


def to_torch_csv(extent: Extent, rows: Rows, *, communication: bool = False) -> str:
    """The text that torch.distributed.pipelining reads, in its format `compute_only`, or `compute_comms`.

    What torch has no word for is left out: weight versions, recompute, the updates but for REDUCE_GRAD. So torch takes
    a program of several batches for one batch of all their microbatches. They are numbered from 0.

    Args:
        extent, rows: the program to write.
        communication: write transfers and REDUCE_GRAD, too. Torch places its own where they are missing.

    Raises:
        ValueError: transfers of a program whose stages are no chain.
    """
    if communication and not extent.graph.is_chain:
        raise ValueError(
            "torch's text has no word for the stage at a transfer's other end; write the computations alone"
        )
    kinds = _TORCH_KINDS if communication else _TORCH_COMPUTATIONS

    def cell(instruction: Instruction) -> str:
        microbatch = "" if instruction.microbatch is None else instruction.microbatch - extent.first_microbatch
        return f"{instruction.stage}{instruction.kind.value}{microbatch}"

    return "".join(",".join(cell(each) for each in row if each.kind in kinds) + "\n" for row in rows)


# --- reading


def read_csv(text: str, **given: Any) -> dict[str, Any]:
    """The fields of the `Program` that a text holds.

    Args:
        text: our form, or torch's compute-only one.
        given: fields of `Program`, for what the text does not say; None counts as not given. Where both are silent: one
            batch of all microbatches, from batch 0 and the lowest microbatch on; each stage on the rank in whose row it
            stands; the flags by the instructions that there are; weights `flush`, if no instruction names a version.

    Raises:
        ValueError: what is wrong, with row and column; a fact that is missing, unknown or contradicted.
    """
    read, lines = _read_facts(text)
    stated = {name: value for name, value in read.items() if name not in _NOTES}
    for name, value in given.items():
        if name not in _READ:
            raise TypeError(f"there is no fact {name!r}; the facts are {', '.join(_READ)}")
        if value is not None and stated.setdefault(name, value) != value:
            raise ValueError(f"{name} is given as {_write_value(value)}; the text says {_write_value(stated[name])}")
    rows = tuple(tuple(_read_row(rank, number, line)) for rank, (number, line) in enumerate(lines))
    if not any(rows):
        raise ValueError("the text holds no instructions; give one line of comma-separated instructions for each rank")
    facts = {**_derive_facts(rows, stated), **stated}
    _require_consistency(rows, facts)
    return {"rows": rows, **facts}


def read_notes(text: str) -> dict[str, int]:
    """What a text says of the run that its program is meant for, by name, as far as it does.

    fill: batches before the rows repeat themselves. period: batches after which they do. tensor, data: tensor and data
    parallel degree of the job.

    Raises:
        ValueError: a leading line that is not understood.
    """
    return {name: value for name, value in _read_facts(text)[0].items() if name in _NOTES}


def names_stated(text: str) -> frozenset[str]:
    """The facts of a program that a text states, rather than leaving them to its rows. Raises ValueError as
    `read_notes`."""
    return frozenset(_read_facts(text)[0]) - _NOTES.keys()


def _read_facts(text: str) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """The facts of the leading lines, and the lines of instructions with their numbers from 1."""
    facts: dict[str, Any] = {}
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    while lines and not lines[-1][1]:
        lines.pop()
    num_leading = next((index for index, (_, line) in enumerate(lines) if not line.startswith("#")), len(lines))
    for number, line in lines[:num_leading]:
        match = _FACT.fullmatch(line)
        if match is None:
            continue
        name, value = match.group(1), match.group(2).strip()
        read = (_READ | _NOTES).get(name)
        if read is None:
            keys = ", ".join([*_READ, *_NOTES])
            raise ValueError(f"line {number}: there is no key {name!r}; the keys are {keys}")
        if name in facts:
            raise ValueError(f"line {number}: {name} is stated twice")
        try:
            facts[name] = read(value)
        except ValueError as error:
            raise ValueError(f"line {number}: {name}: {error}") from error
    return facts, lines[num_leading:]


def _read_row(rank: int, number: int, line: str) -> Iterator[Instruction]:
    where = f"row {rank} (line {number})"
    try:
        cells = next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"{where}: {error}") from error
    reduced: dict[int, int] = {}  # stages whose gradients torch says are complete: in which column
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        if reduction := _TORCH_REDUCTION.fullmatch(cell.strip()):
            reduced[int(reduction[1])] = column
            continue
        try:
            instruction = Instruction.parse(cell.strip())
            if instruction.stage in reduced and instruction.kind in ENDS_BACKWARD:
                raise ValueError(f"{instruction} adds to gradients that column {reduced[instruction.stage]} reduces")
            yield instruction
        except ValueError as error:
            known = next((f"; torch's {word} {meaning}" for word, meaning in _TORCH_ONLY.items() if word in cell), "")
            raise ValueError(f"{where}, column {column}: {error}{known}") from error


def _derive_facts(rows: Rows, stated: dict[str, Any]) -> dict[str, Any]:
    """What the rows say about the facts that nobody states."""
    kinds = {instruction.kind for row in rows for instruction in row}
    if "weights" not in stated and any(instruction.version is not None for row in rows for instruction in row):
        raise ValueError(
            "the instructions name weight versions, so the policy has to be known; "
            f"add a line # weights: NAME, of {', '.join(POLICIES)}, or give it"
        )
    microbatches = {each.microbatch for row in rows for each in row if each.microbatch is not None}
    if not microbatches:
        raise ValueError("no instruction concerns a microbatch, so there is nothing to compute")
    first = stated.get("first_microbatch", min(microbatches))
    if first > min(microbatches):
        raise ValueError(
            f"first_microbatch is {first}, but the rows have microbatch {min(microbatches)}; state the least"
        )
    return {
        "weights": FLUSH,
        "batches": (max(microbatches) + 1 - first,),
        "rank_of_stage": stated.get("rank_of_stage") or _derive_ranks(rows),
        "first_batch": 0,
        "first_microbatch": first,
        "recompute": Kind.RECOMPUTE in kinds,
        "tied_embeddings": Kind.REDUCE_EMBED in kinds,
        "data_parallel": Kind.REDUCE_GRAD in kinds,
        "global_norm": Kind.REDUCE_NORM in kinds or Kind.STEP not in kinds,
        "reduce_partial": Kind.REDUCE_PARTIAL in kinds,
        "forward_only": not kinds & BACKWARDS,
    }


def _derive_ranks(rows: Sequence[Row]) -> tuple[int, ...]:
    """Each stage lives on the rank in whose row it stands."""
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for column, instruction in enumerate(row, start=1):
            owner = ranks.setdefault(instruction.stage, rank)
            if owner != rank:
                raise ValueError(
                    f"row {rank}, instruction {column}, {instruction}: its stage stands in row {owner}, too; "
                    "a stage lives on one rank"
                )
    missing = next((number for number, stage in enumerate(sorted(ranks)) if stage != number), None)
    if missing is not None:
        raise ValueError(
            f"stage {missing} stands in no row, though stage {max(ranks)} does; number stages from 0 without gaps"
        )
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _require_consistency(rows: Rows, facts: dict[str, Any]) -> None:
    """Facts that contradict the number of rows; that the rows do what the facts say is the checker's to prove."""
    if set(facts["rank_of_stage"]) != set(range(len(rows))):
        named = _write_value(facts["rank_of_stage"])
        raise ValueError(
            f"the text has rows for {counted(len(rows), 'rank')}, but its stages live on ranks {named}; "
            "give each rank a row and a stage"
        )
    if not facts["batches"] or min(facts["batches"]) < 1:
        named = _write_value(facts["batches"]) or "none"
        raise ValueError(f"batches are {named}; give the number of microbatches of each, 1 and more")
    graph = StageGraph.of(len(facts["rank_of_stage"]), facts.get("edges", ()))
    facts["edges"] = () if graph.is_chain else graph.edges
    num_microbatches, num_instructions = sum(facts["batches"]), sum(map(len, rows))
    if num_microbatches > num_instructions:
        raise ValueError(
            f"batches hold {num_microbatches} microbatches, but the rows only {num_instructions} instructions; each "
            "microbatch needs its forward"
        )
