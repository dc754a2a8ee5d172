"""The metrics of a run: `--metrics-file`, outputs that may fail without ending the run, and a model's operations.

`--metrics-file` has JSON lines with full precision, one object a line. There is a line for each iteration and each
evaluation. A pipeline that may change has one at the start (`initial_...`) and one for each change. A run that
continues without lost ranks, or with ranks that returned, has one for each such event (`membership_change`). One rank
writes each line with one system call, so that a killed run leaves complete lines. A line that cannot be written, for
example on a full disk, is kept and written before the next one. A resumed run appends; if it repeats iterations, the
last line of an iteration is valid.

Training must not end because a line of the log cannot be written. So a by-product that cannot be written is reported
once, with the reason, and once more when it can be written again. This module imports no torch.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.documents.faults import NonNegative, Positive, sentence
from megatron.trainer.arguments.architecture import architecture
from megatron.trainer.arguments.flags.config import TrainConfig

logger = logging.getLogger(__name__)

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class ByProduct:
    """An output whose failure does not end the run.

    Args:
        name: name of the output in warnings.
        consequence: the end of the warning's sentence, about the consequence of a failure.
        failures: the errors that are caught; a library that uses a service raises errors other than OSError.
    """

    def __init__(self, name: str, *, consequence: str, failures: tuple[type[Exception], ...] = (OSError,)) -> None:
        self.name, self.consequence, self._failures = name, consequence, failures
        self.fails = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block that writes the output. A failure is logged as a warning unless the previous one failed, too."""
        try:
            yield
        except self._failures as error:
            if not self.fails:
                logger.warning("%s cannot be written: %s; training goes on, %s", self.name, _reason(error),
                               self.consequence)  # fmt: skip
            self.fails = True
        else:
            if self.fails:
                logger.warning("%s is written again", self.name)
            self.fails = False


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def flops_per_sample(args: TrainConfig) -> float:
    """The floating-point operations of the forward and backward of one sequence, without recomputation.

    They are the planner's count, except that a BERT's dense layer before its output layer is left out (a twelfth of a
    transformer layer).
    """
    return replace(architecture(args), masked_head=False).operations(1)


def flops_of_output_layer(args: TrainConfig) -> float:
    """The floating-point operations of the output layer, as counted in `flops_per_sample`."""
    return 6.0 * args.seq_length * args.hidden_size * args.padded_vocab_size


LOSS = "lm loss"
"""The name of every language model's loss; a BERT with sentence-order prediction also has "sop loss"."""
CLASS_LOSS = "loss"
"""The name of a classifier's loss; it also reports "accuracy"."""
SAVED_ACTIVATIONS = "saved_activation_bytes"
DEFERRED = "deferred_bytes"
"""The name of the bytes kept between I and W of split backwards, which saved activations do not include."""
ALLOCATED = "peak_allocated_bytes"


class MetricsFile:
    """A metrics file to which objects are appended. Raises ValueError if the file cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()  # lines not yet in the file
        self._by_product = ByProduct(f"--metrics-file {path}", consequence="and its lines are kept until it can be")
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            torn = _ends_mid_line(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--metrics-file {path} cannot be written: {error.strerror}") from error
        if torn:
            self._waiting.append(b"\n")

    def write(self, **values: float | int | str | list[int] | None) -> None:
        """Append an object. A number that is not finite becomes null, since JSON cannot express it."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._waiting.append(json.dumps(plain).encode() + b"\n")
        with self._by_product.attempt():
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            line, size = self._waiting[0], os.fstat(self._file.fileno()).st_size
            try:
                written = self._file.write(line)
                while written < len(line):  # a nearly full disk takes a part; the next call raises the error
                    written += self._file.write(line[written:])
            except OSError:
                with suppress(OSError):  # remove the incomplete line, if the file can be truncated
                    self._file.truncate(size)
                raise
            self._waiting.popleft()

    def close(self) -> None:
        """Write the lines that could not be written before, or log that they are lost, and close the file."""
        with self._by_product.attempt():
            self._write_waiting()
        if self._waiting:
            logger.warning("--metrics-file %s lacks its last %d lines", self._path, len(self._waiting))
        with suppress(OSError):  # all written lines are with the system already
            self._file.close()


def _ends_mid_line(path: str) -> bool:
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def validation_losses(records: Iterable[dict]) -> dict[int, float]:
    """Iteration -> validation loss, in the order of the records; infinite where it was not finite, which is null."""
    found = {each["iteration"]: each["validation_loss"] for each in records if "validation_loss" in each}
    return {iteration: math.inf if loss is None or math.isnan(loss) else loss for iteration, loss in found.items()}


class _Values(BaseModel):
    """The values that commands read, by their names in a record; a record has some of them, and others."""

    model_config = ConfigDict(strict=True)

    iteration: _Count = 0
    lm_loss: float | None = None
    loss: float | None = None
    validation_loss: float | None = None
    saved_activation_bytes: Annotated[tuple[_Count, ...], Field(min_length=1, strict=False)] = (0,)
    iteration_time_ms: Positive = 1.0
    consumed_samples: _Count = 0
    frozen_layers: _Count = 0
    pipeline_ranks: _Count = 0
    replicas: _Count = 0
    change_seconds: NonNegative = 0.0
    seconds_predicted: Positive | None = None
    initial_samples: _Count = 0
    initial_frozen_layers: _Count = 0
    initial_pipeline_ranks: _Count = 0
    initial_replicas: _Count = 0


def read_metrics(path: str | os.PathLike, *, needs: Mapping[str, Collection[str]] = MappingProxyType({})) -> list[dict]:
    """Read all complete objects of a metrics file in order; an incomplete line is left out.

    Args:
        needs: name -> the names that a record with this name must have, too.

    Raises:
        ValueError: if the file cannot be read, a line is something else than an object, or a value is none that a
            training program writes under its name.
    """
    records = []
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                except (ValueError, RecursionError):  # a number of too many digits, or brackets nested too deeply
                    record = None
                if fault := _fault_in(record, needs):
                    raise ValueError(f"{path}, line {number}, {fault}; give what --metrics-file wrote")
                records.append(record)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error.reason}); give what --metrics-file wrote") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return records


def _fault_in(record: object, needs: Mapping[str, Collection[str]]) -> str | None:
    if not isinstance(record, dict):
        return "is no JSON object"
    for name in needs.keys() & record.keys():
        for other in needs[name]:
            if other not in record:
                return f"has {name} and no {other}"
    try:
        _Values.model_validate(record)
    except ValidationError as error:
        return f"is wrong: {sentence(error.errors(include_url=False)[0]).rpartition('; ')[0]}"
    return None
