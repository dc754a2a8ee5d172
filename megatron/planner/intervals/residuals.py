"""Measured over predicted times of published runs, as files.

They come with the package for each calibration that has been validated: `residuals/NAME.json`, and one more for each
other file of runs, `residuals/NAME.FILE.json`. They are written by

    python tools/grid_search.py validate --entries measurements.json --write-residuals FILE

A run that the constants were fitted to stands there with a prediction of constants that were fitted without it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatron.documents.faults import sentence
from megatron.documents.reading import read_document
from megatron.documents.writing import write_whole
from megatron.planner.intervals.kind import Kind

_FOLDER = Path(__file__).parent / "residuals"


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One run. `ratio`: measured over predicted seconds of an iteration. `source`: the table or paper it is from."""

    id: str
    source: str
    ratio: float
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """See the module.

    Attributes:
        calibration: whose constants predicted them.
        constants: these constants, so that others are told apart.
        entries: the name of the file of measurements.
        command: that wrote this.
        date: when, YYYY-MM-DD.
    """

    calibration: str
    constants: Mapping[str, float]
    entries: str
    command: str
    date: str
    runs: tuple[Residual, ...]

    def save(self, path: str | Path) -> None:
        """A run a line, its kind without what is as usual."""
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "runs"}
        lines = ",\n  ".join(json.dumps(_plain(each)) for each in self.runs)
        text = json.dumps({**head, "constants": dict(self.constants)}, indent=1).removesuffix("\n}")
        write_whole(path, f'{text},\n "runs": [\n  {lines}\n ]\n}}\n')


@cache
def source_of(name: str) -> str:
    """The paper, or the table of one software, that a run was read from: tables of one paper are one source."""
    return re.split(r"[,(\d]| Table| sec| README", name, maxsplit=1)[0].strip()


def _plain(run: Residual) -> dict:
    kind = {name: value for name, value in asdict(run.kind).items() if value}
    return {"id": run.id, "source": run.source, "ratio": run.ratio, "kind": kind}


@cache
def load_residuals(calibration: str) -> Residuals | None:
    """Those of a calibration by its name; None: it was never validated. Raises ValueError for a file that is none."""
    path = _FOLDER / f"{calibration}.json"
    return read_residuals(path) if path.is_file() else None


@cache
def load_others(calibration: str) -> tuple[Residuals, ...]:
    """Those of a calibration that other files of runs gave. Raises ValueError as `load_residuals`."""
    return tuple(read_residuals(path) for path in sorted(_FOLDER.glob(f"{calibration}.*.json")))


def read_residuals(path: str | Path) -> Residuals:
    """Raises ValueError naming the file and what is wrong."""
    try:
        return TypeAdapter(Residuals).validate_python(read_document(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {sentence(error.errors(include_url=False)[0])}") from error
