"""Files with a program, read as schedules.

A file is a program's text form or a compute-only file of torch's (`program.csv_text`). It may say how its rows go on
(`# fill: 1`, `# period: 2`) and for which job it is meant (`# tensor: 2`, `# data: 4`). What it
leaves to the run that reads it (recompute, replicas, tied embeddings) the run says; where it says otherwise, it is
refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from megatron.pipeline.program.csv_text import names_stated, read_notes
from megatron.pipeline.program.instruction import UPDATES
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.compatibility import require_known_norm
from megatron.pipeline.schedules.completion import require_training
from megatron.pipeline.schedules.program_schedule import ProgramSchedule

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
    """A file is meant for another run: `fact` is what differs, `is_asked` what the run wants of it.

    Whoever has a name for the choice can add the remedy.
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
