"""Calibrations: constants with where they come from, as files.

A calibration is a JSON file. Some come with the package (`NAMES`); `tools/grid_search.py calibrate` writes others:

    {"name": "a100", "about": "...", "date": "2026-11-21", "entries": [ids that were fitted],
     "unexplained": {id: relative error}, "mean_error": 0.007, "constants": {"product_efficiency": 0.82, ...}}
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.documents.faults import refuse_unknown_keys, sentence
from megatron.documents.reading import read_document
from megatron.planner.time.constants import Constants

_CONSTANTS = tuple(field.name for field in fields(Constants))
_FOLDER = Path(__file__).parent / "calibrations"
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))
DEFAULT_NAME = "a100"


class Calibration(BaseModel):
    """See the module.

    Attributes:
        entries: ids of the measurements that were fitted, those that were not explained included.
        unexplained: of these, the ones that the fit left aside, with predicted over measured time, less 1.
        mean_error: of the others, the mean size of the same.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1)]
    about: str
    date: str
    entries: Annotated[tuple[str, ...], Field(strict=False)]
    unexplained: Mapping[str, float]
    mean_error: float
    constants: Mapping[str, float]

    @property
    def fitted(self) -> Constants:
        return Constants(**self.constants)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def constants_as_dict(constants: Constants) -> dict[str, float]:
    """The constants as a file holds them."""
    return asdict(constants)


@cache
def load_calibration(name: str = DEFAULT_NAME) -> Calibration:
    """A calibration by its name in `NAMES`, or from a file. Raises ValueError naming the file."""
    path = _FOLDER / f"{name}.json" if name in NAMES else Path(name)
    if name not in NAMES and not path.is_file():
        raise ValueError(f"there is no calibration {name!r}; give a file, or one of {', '.join(NAMES)}")
    try:
        found = Calibration.model_validate(read_document(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{path}: {sentence(first, Calibration.model_fields)}") from error
    try:
        refuse_unknown_keys(found.constants, _CONSTANTS)
        Constants(**found.constants)
    except TypeError as error:
        raise ValueError(f"{path}: constants: {str(error).partition(' ')[2]}; give them") from error
    except ValueError as error:
        raise ValueError(f"{path}: constants: {error}") from error
    return found


def default_constants() -> Constants:
    """The constants of the calibration that comes with the package, fitted to runs on A100."""
    return load_calibration().fitted
