"""The constants of the time model, such as the fraction of a data sheet's rates that programs reach, and their files.

A calibration is a JSON file with the constants. Some come with the package (`NAMES`). `tools/grid_search.py calibrate`
writes others:

    {"name": "a100", "about": "...", "date": "2026-11-21", "entries": [ids that were fitted],
     "unexplained": {id: relative error}, "mean_error": 0.007, "constants": {"product_efficiency": 0.82, ...}}
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.documents.faults import refuse_unknown_keys, sentence
from megatron.documents.files import read_document, write_whole


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of one kind of processor. Some are fitted (`FITTED`), the others have the defaults below.

    Attributes:
        product_efficiency: fraction of the rate of the GPU's fastest matrix product that large products reach.
        product_overhead: additional seconds of each matrix product: filling and draining the processor, partial waves
            of tiles, gaps between kernels. It makes small products slow.
        memory_efficiency: fraction of the memory's bandwidth that kernels other than matrix products reach.
        tensor_efficiency: fraction of the bandwidth within a node that collectives of tensor ranks reach.
        link_efficiency: fraction of the bandwidth within a node that bulk transfers reach: transfers between stages and
            between pairs, and gradients. BPipe's Tables 3 and 4 have 181 to 266 of 300 GB/s.
        network_efficiency: fraction of the bandwidth between nodes that all traffic reaches.
        contention: fraction of a collective's time that simultaneous products lose, since the collective occupies a
            part of the processor.
        launch: seconds in which the host launches one kernel, Python included. Host and device work in parallel, so the
            slower of them determines the time. This matters only for small layers.
        pressed_efficiency: fraction of its speed that a rank keeps if its allocator returns blocks and allocates them
            again in every backward (planner/job/estimate.py).

    Raises:
        ValueError: a value is negative, or an efficiency is not in (0, 1].
    """

    product_efficiency: float
    product_overhead: float
    memory_efficiency: float
    tensor_efficiency: float
    link_efficiency: float = 0.75
    network_efficiency: float = 0.8
    contention: float = 0.25
    launch: float = 30e-6
    pressed_efficiency: float = 0.8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (field.name.endswith("efficiency") and not 0 < value <= 1):
                raise ValueError(f"{field.name} is {value}; give a part of 1, or seconds of 0 and more")


FITTED = ("product_efficiency", "product_overhead", "memory_efficiency", "tensor_efficiency", "pressed_efficiency")
"""The names of the constants that `calibrate` fits."""

START = Constants(product_efficiency=0.92, product_overhead=10e-6, memory_efficiency=0.65, tensor_efficiency=0.6)
"""The initial values of a fit, common for GPUs."""


_CONSTANTS = tuple(field.name for field in fields(Constants))
_FOLDER = Path(__file__).parent / "calibrations"
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))
DEFAULT_NAME = "a100"


class Calibration(BaseModel):
    """A calibration file.

    Attributes:
        entries: ids of the measurements of the fit, including unexplained measurements.
        unexplained: id -> relative error of each measurement that the fit left out: predicted over measured time, minus
            1.
        mean_error: mean absolute value of the relative errors of the other measurements.
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
        write_whole(Path(path), self.model_dump_json(indent=1) + "\n")


def constants_as_dict(constants: Constants) -> dict[str, float]:
    """Return the constants in the form of a calibration file."""
    return asdict(constants)


@cache
def load_calibration(name: str = DEFAULT_NAME) -> Calibration:
    """Load a calibration by its name in `NAMES`, or from a file. Raises ValueError that names the file."""
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
    """Return the constants of the package's default calibration (`DEFAULT_NAME`), fitted to runs on A100."""
    return load_calibration().fitted
