"""The text form of programs: comma-separated instructions, one line for each rank.

    # weights: 2bw
    # batches: 4 4 4
    0F0@0,0SEND_F0,0F1@0,0SEND_F1,...
    1RECV_F0,1RECV_F1,1F0@0,1SEND_F0,...

The lines of instructions are a superset of the CSV form of torch.distributed.pipelining, which has no header. So the
compute-only files of torch load unchanged. Their blank cells, which are bubbles, are dropped. So is their REDUCE_GRAD,
which has no version: it marks the end of a stage's backwards, and the backwards themselves show where they end.

The facts about a program that its rows do not contain stand in leading lines `# key: value`. If a fact is not stated,
the caller gives it, or it is derived from the rows. Some keys describe not the program but the run that it is meant for
(`read_notes`). All other lines with a leading # are comments. Reading is strict: any text that is not understood is an
error that names the row and the column.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron.documents import counted
from megatron.pipeline.program.copies import Copy, graph_of_copies, validate_copies
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.extent import Extent, Kept
from megatron.pipeline.program.instruction import (
    BACKWARDS,
    ENDS_BACKWARD,
    RESIDENCY_WORDS,
    Instruction,
    Kind,
    Row,
    Rows,
)
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import FLUSH, POLICIES, WeightPolicy

_FACT = re.compile(r"#\s*([a-z_]+)\s*:(.*)")

# Torch's words without a counterpart here -> their meaning, and the remedy.
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


def _several(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    return lambda text: tuple(map(parse, text.split()))


_READ: dict[str, Callable[[str], Any]] = {
    "weights": _policy,
    "batches": _several(_integer),
    "rank_of_stage": _several(_integer),
    "first_batch": _integer,
    "first_microbatch": _integer,
    "edges": _several(Edge.parse),
    "recompute": _flag,
    "not_recomputed": _several(_integer),
    "kept": _several(Kept.parse),
    "tied_embeddings": _flag,
    "tied_stage": _integer,
    "data_parallel": _flag,
    "global_norm": _flag,
    "residency": Residency.parse,
    "unread": _several(_integer),
    "provisional_microbatches": _integer,
    "reduce_partial": _flag,
    "forward_only": _flag,
    "copies": _several(Copy.parse),
    "optimistic": _flag,
}

# The keys that describe the run: how rows are completed and repeat, and the parallel degrees of the job.
_OF_COMPLETION: dict[str, Callable[[str], int]] = {"fill": _integer, "period": _count, "receives_ahead": _count}
_NOTES = _OF_COMPLETION | {"tensor": _count, "data": _count}


# The keys that are written only if their value is given and not empty. 0 counts as given.
_OF_FEW = (
    "edges", "not_recomputed", "kept", "tied_stage", "residency", "unread", "provisional_microbatches",
    "reduce_partial", "copies", "optimistic",
)  # fmt: skip


def _write_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


# --- writing


FACTS_OF_RUN = ("tied_embeddings", "data_parallel")
"""The facts that a program without updates may leave to the run that reads the program."""


def to_csv(
    extent: Extent, rows: Rows, *, leave_out: Collection[str] = (), notes: Mapping[str, int] | None = None
) -> str:
    """Write a program as the text that `Program.from_csv` reads.

    `leave_out` names the facts that are not written. `notes` are written for `read_notes`.
    """

    def says_something(value: Any) -> bool:  # 0 does, although it equals False
        return value is not None and value is not False and value != ()

    names = [name for name in _READ if name not in _OF_FEW or says_something(getattr(extent, name))]
    names = [name for name in names if name not in leave_out]
    facts = [f"# {name}: {_write_value(getattr(extent, name))}" for name in names]
    facts += [f"# {name}: {value}" for name, value in (notes or {}).items()]
    return "\n".join([*facts, *(",".join(map(str, row)) for row in rows)]) + "\n"


def to_torch_csv(extent: Extent, rows: Rows, *, communication: bool = False) -> str:
    """Write a program as text for torch.distributed.pipelining, in its format `compute_only` or `compute_comms`.

    The text leaves out everything that torch has no word for: weight versions, recomputes, moves, words of lanes to and
    from the host, and all updates except REDUCE_GRAD. So torch reads a program of several batches as one batch of all
    their microbatches. The text numbers microbatches from 0.

    Args:
        extent, rows: the program to write.
        communication: write transfers and REDUCE_GRAD, too (`compute_comms`). Torch adds its own if they are missing.

    Raises:
        ValueError: stages are copies, or transfers are requested and the stages of the program are no chain.
    """
    if extent.copies:
        raise ValueError(
            "torch's text has no word for copies of a stage, which take a part of the microbatches each; write "
            "this project's text"
        )
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
    """Return the fields of the `Program` in a text.

    A fact that neither `text` nor `given` states is derived from the rows. All microbatches form one batch, with the
    number 0, which starts at the lowest microbatch. Each stage is on the rank in whose row it stands. A flag is set if
    the rows contain its instructions. The weights are `flush`, provided that no instruction names a version.

    Args:
        text: our form, or torch's compute-only form.
        given: fields of `Program` for facts that the text does not state; None counts as not given.

    Raises:
        ValueError: a cell is not understood (the error names row and column), or a fact is missing, unknown or
            contradicted.
        TypeError: `given` has a name that is no fact.
    """
    read, lines = _read_facts(text)
    stated = {name: value for name, value in read.items() if name not in _NOTES}
    for name, value in given.items():
        if name not in _READ:
            raise TypeError(f"there is no fact {name!r}; the facts are {', '.join(_READ)}")
        if value is not None and stated.setdefault(name, value) != value:
            raise ValueError(f"{name} is given as {_write_value(value)}; the text says {_write_value(stated[name])}")
    rows = tuple(tuple(_read_row(rank, number, line)) for rank, (number, line) in enumerate(lines))
    rows += ((),) * _num_left_out(rows, stated)
    if not any(rows):
        raise ValueError("the text holds no instructions; give one line of comma-separated instructions for each rank")
    facts = {**_derive_facts(rows, stated), **stated}
    _require_consistency(rows, facts)
    return {"rows": rows, **facts}


def _num_left_out(rows: Rows, stated: Mapping[str, Any]) -> int:
    """Return the number of last ranks without a line: their copies take no microbatch of a small evaluation."""
    num_ranks = max(stated.get("rank_of_stage") or (0,)) + 1
    return max(0, num_ranks - len(rows)) if num_ranks <= len(stated.get("copies", ())) else 0


def read_notes(text: str) -> dict[str, int]:
    """Return the notes of a text on the run that its program is meant for; a note that the text lacks is left out.

    `fill` is the number of batches before the rows start to repeat, and `period` the number of batches in a repetition.
    `tensor` and `data` are the tensor and data parallel degrees of the job. `receives_ahead` is the number of
    computations by which an added receive stands before the computation that needs the tensor.

    Raises:
        ValueError: a leading line is not understood.
    """
    return {name: value for name, value in _read_facts(text)[0].items() if name in _NOTES}


def notes_of_completion(notes: Mapping[str, int]) -> dict[str, int]:
    """Return the notes that say how rows are completed and how they repeat."""
    return {name: value for name, value in notes.items() if name in _OF_COMPLETION}


def names_stated(text: str) -> frozenset[str]:
    """Return the names of the facts that a text states itself, without those that its rows imply.

    Raises:
        ValueError: as for `read_notes`.
    """
    return frozenset(_read_facts(text)[0]) - _NOTES.keys()


def _read_facts(text: str) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Return the facts and notes of the leading lines, and the other lines with their line numbers, from 1."""
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
    reduced: dict[int, int] = {}  # stage with a REDUCE_GRAD of torch -> its column
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
    """Derive the facts of a program from its rows. The caller prefers the `stated` facts to these.

    Raises:
        ValueError: the weight policy has to be stated, no instruction has a microbatch, or stages and ranks do not fit.
    """
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
        "data_parallel": Kind.REDUCE_GRAD in kinds or _share_gradients(stated, kinds),
        "global_norm": Kind.REDUCE_NORM in kinds or Kind.STEP not in kinds,
        "reduce_partial": Kind.REDUCE_PARTIAL in kinds,
        "forward_only": not kinds & BACKWARDS,
        "optimistic": Kind.VALIDATE in kinds,
    }


def _share_gradients(stated: Mapping[str, Any], kinds: Collection[Kind]) -> bool:
    """Whether rows without updates train several copies of a stage of the model."""
    stages = [copy.stage for copy in stated.get("copies", ())]
    return len({*stages}) < len(stages) and bool(kinds & BACKWARDS) and Kind.STEP not in kinds


def _derive_ranks(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return `rank_of_stage`: each stage lives on the rank in whose row it stands.

    Raises:
        ValueError: a stage stands in two rows or in none.
    """
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


def _require_kept(rows: Rows, facts: dict[str, Any]) -> None:
    recomputing = set(range(len(facts["rank_of_stage"]))) - set(facts.get("not_recomputed", ()))
    for each in facts.get("kept", ()):
        if not facts["recompute"] or each.stage not in recomputing or each.position >= min(facts["batches"]):
            raise ValueError(
                f"kept: {each} is no microbatch of a stage that recomputes; name stages with recomputes, and positions "
                f"of 0 to {min(facts['batches']) - 1} in a batch"
            )
    if facts.get("kept") and RESIDENCY_WORDS & {each.kind for row in rows for each in row}:
        raise ValueError(
            "kept: where weights live on the host, a stage recomputes all microbatches or none; leave kept out, or "
            "keep weights on the device"
        )


def _require_consistency(rows: Rows, facts: dict[str, Any]) -> None:
    """Require that the facts fit the numbers of rows and instructions, and normalize `edges`.

    The checker proves the rest, that the instructions do what the facts say.

    Raises:
        ValueError: a fact contradicts the rows, or the edges make no pipeline.
    """
    if set(facts["rank_of_stage"]) != set(range(len(rows))):
        named = _write_value(facts["rank_of_stage"])
        raise ValueError(
            f"the text has rows for {counted(len(rows), 'rank')}, but its stages live on ranks {named}; "
            "give each rank a row and a stage"
        )
    if not facts["batches"] or min(facts["batches"]) < 1:
        named = _write_value(facts["batches"]) or "none"
        raise ValueError(f"batches are {named}; give the number of microbatches of each, 1 and more")
    num_stages, tied = len(facts["rank_of_stage"]), facts.get("tied_stage")
    _require_kept(rows, facts)
    copies = facts.get("copies", ())
    num_of_model = max(copy.stage for copy in copies) + 1 if copies else num_stages
    if tied is not None and (not 0 < tied < num_of_model or facts.get("residency")):
        raise ValueError(
            f"tied_stage is {tied}; give the stage, 1 to {num_of_model - 1}, that shares the first one's embedding, "
            "and keep weights on the device"
        )
    edges = facts.get("edges", ())
    if copies:
        edges = graph_of_copies(copies, num_stages, edges).edges
        validate_copies(copies, edges, facts["rank_of_stage"])
    graph = StageGraph.of(num_stages, edges)
    facts["edges"] = () if graph.is_chain else graph.edges
    num_microbatches, num_instructions = sum(facts["batches"]), sum(map(len, rows))
    if num_microbatches > num_instructions:
        raise ValueError(
            f"batches hold {num_microbatches} microbatches, but the rows only {num_instructions} instructions; each "
            "microbatch needs its forward"
        )
