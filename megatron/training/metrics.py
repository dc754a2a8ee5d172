"""`--metrics-file`: what a run did, as JSON lines with full precision.

One object per iteration and one per evaluation, written by one rank and flushed at once, so that a killed run leaves
whole lines. A resumed run appends; where it repeats iterations, the last line of an iteration counts.
"""

import json
import math
import os


class MetricsFile:
    """Appends objects to a file. Raises ValueError where the file cannot be opened."""

    def __init__(self, path: str) -> None:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            torn = _ends_mid_line(path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--metrics-file {path} cannot be written: {error.strerror}") from error
        if torn:
            self._file.write("\n")

    def write(self, **values: float | int | str | list[int] | None) -> None:
        """Append one object. What is not finite becomes null, as JSON has no word for it."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _ends_mid_line(path: str) -> bool:
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def read_metrics(path: str) -> list[dict]:
    """All whole objects of a metrics file, in the order of the file; a torn last line is left out."""
    records = []
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records
