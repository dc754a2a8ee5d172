"""Profiles: measured seconds of stages, optimizer steps, transfers and all-reduces of one model on one machine.

A profile is a JSON file that `tools/profile_model.py` writes and the planner reads. It holds only measured times. Times
of a layer, of the embedding and of the head are derived where they are used. Times are in seconds, sizes in bytes.

Processes on a CPU share memory and caches, so a stage is slower while other processes compute. Therefore times of
computations and copies come with the number of processes that were `working` at once in the measurement.
"""

import json
import statistics
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from megatron.documents.faults import NonNegative, sentence, shown
from megatron.documents.files import read_json, write_whole
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.recompute import RecomputeScope

VERSION = 1
"""The version of the file format. A reader refuses other versions."""


class StagePosition(str, Enum):
    """The position of a stage in a pipeline: the only stage (with embedding and head), first, middle or last."""

    ONLY = "only"
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_Record):
    """Seconds of one operation over `count` batches, calls or iterations. 80% of them lie between `low` and `high`."""

    median: NonNegative
    low: NonNegative
    high: NonNegative
    count: PositiveInt

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Return the spread of samples. Raises ValueError without samples."""
        if not samples:
            raise ValueError("nothing was timed; give one iteration or more")
        deciles = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples
        return cls(median=statistics.median(samples), low=deciles[0], high=deciles[-1], count=len(samples))


class StageTime(_Record):
    """Mean times of a batch's microbatches in a stage of `num_layers` layers. `backward` includes recomputation.

    Attributes:
        backward_input, backward_weight: times of I and W, the halves of a split backward. I includes recomputation.
            None in old profiles.
        deferred_bytes: bytes that a microbatch holds at the stage between its I and its W. None in old profiles.
    """

    place: StagePosition
    num_layers: PositiveInt
    tensor: PositiveInt
    micro_batch_size: PositiveInt
    recompute: RecomputeScope
    working: PositiveInt
    forward: Spread
    backward: Spread
    backward_input: Spread | None = None
    backward_weight: Spread | None = None
    deferred_bytes: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _has_both_halves(self) -> "StageTime":
        halves = (self.backward_input, self.backward_weight, self.deferred_bytes)
        if any(each is None for each in halves) and any(each is not None for each in halves):
            raise ValueError("backward_input, backward_weight and deferred_bytes come together; give all or none")
        return self

    @property
    def halves(self) -> tuple[float, float] | None:
        """Seconds of I and W; None if they were not measured."""
        if self.backward_input is None or self.backward_weight is None:
            return None
        return self.backward_input.median, self.backward_weight.median


class UpdateTime(_Record):
    """Times of a stage's work once a batch: zeroing gradients, their norm, clipping and the optimizer's step.

    Attributes:
        num_parameters: the stage's parameters on one tensor rank.
        weights: the name of the weight policy. With several versions a step writes into another buffer.
    """

    place: StagePosition
    num_layers: PositiveInt
    num_parameters: PositiveInt
    tensor: PositiveInt
    weights: str
    working: PositiveInt
    zero: Spread
    norm: Spread
    step: Spread

    def seconds(self, replicas: int = 1) -> float:
        """Return the seconds of the whole update, with norm and step divided among `replicas`."""
        return self.zero.median + (self.norm.median + self.step.median) / replicas


class TransferTime(_Record):
    """The one-way time of a transfer, from posting the send to the arrival at the next rank."""

    num_bytes: PositiveInt
    seconds: Spread


class AllReduceTime(_Record):
    """The time of one all-reduce over `ranks` processes of one machine."""

    ranks: PositiveInt
    num_bytes: PositiveInt
    seconds: Spread


class CopyTime(_Record):
    """The time of one copy between the host's memory and a device, while `working` processes copy."""

    direction: Literal["to device", "from device"]
    num_bytes: PositiveInt
    working: PositiveInt
    seconds: Spread


class HostUpdateTime(_Record):
    """The time of the host's optimizer on `num_parameters` parameters, while `working` processes step as many."""

    kernel: Literal["loop", "fused"]
    num_parameters: PositiveInt
    working: PositiveInt
    seconds: Spread


class Machine(_Record):
    """The machine of the measurements. `threads`: threads of each process for operators on a CPU."""

    device: str
    num_devices: PositiveInt
    threads: PositiveInt
    system: str
    torch: str
    megatron_core: str


class Profile(_Record):
    """A profile file.

    Attributes:
        created: the time of the measurement.
        architecture: "gpt" or "bert", which names the training program.
        flags: flags of the training program. The profile holds for runs with the same flags.
        model: the shape of the model. A profile holds for any number of layers.
        dtype: dtype of the weights with which the model computes.
        processes: the largest number of processes in the measurement.
        shares_processor: whether processes slow each other down.
        sequence_parallel: whether tensor ranks, if several, use sequence parallelism.
        copies, host_updates: times for weights on the host; empty in old profiles.
    """

    version: Literal[1] = VERSION
    created: datetime
    architecture: Literal["gpt", "bert"]
    flags: tuple[str, ...]
    model: Architecture
    dtype: Literal["float32", "float16", "bfloat16"]
    transformer_impl: str
    sequence_parallel: bool
    processes: PositiveInt
    shares_processor: bool
    machine: Machine
    stages: tuple[StageTime, ...]
    updates: tuple[UpdateTime, ...]
    transfers: tuple[TransferTime, ...]
    all_reduces: tuple[AllReduceTime, ...]
    copies: tuple[CopyTime, ...] = ()
    host_updates: tuple[HostUpdateTime, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the file completely or not at all. Raises OSError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.model_dump_json(indent=1) + "\n")


def load_profile(path: str | Path) -> Profile:
    """Load a profile from its file. Raises OSError, or ValueError that names the file and the field."""
    try:
        content = read_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; write a profile with tools/profile_model.py") from error
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} is no profile of version {VERSION} ({shown(version)}); write it with tools/profile_model.py"
        )
    try:
        return Profile.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = sentence(first).rpartition("; ")[0]
        raise ValueError(f"{path}: {said}; write it anew with tools/profile_model.py") from error
