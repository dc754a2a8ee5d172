"""A search in a process of its own, while this process does something else."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

from megatron.processes import end_with_parent

Found = TypeVar("Found")

_ASKED, _FOUND, _LOG = "asked", "found", "log"


class SearchProcess(Generic[Found]):
    """A search in a child process, which ends when this process ends.

    The child has only the orders and policies that this project registers, not those that a user has added.

    Args:
        search: returns the result: a function of a module, or a `partial` of one whose arguments can be pickled.

    Raises:
        OSError: the process cannot be started, or the disk is full.
    """

    def __init__(self, search: Callable[[], Found]) -> None:
        self._temporary = TemporaryDirectory(prefix="synthesis-")
        self._folder = Path(self._temporary.name)
        paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
        try:
            (self._folder / _ASKED).write_bytes(pickle.dumps(search))
            with open(self._folder / _LOG, "wb") as log:
                # The child itself asks to end with this process: if this one has threads, a fork may run no Python.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(self._folder), str(os.getpid())], stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": paths},
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            self._temporary.cleanup()
            raise

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> Found:
        """Wait until the search ends, and return its result.

        Raises:
            ValueError: the process ended without a result, for example because it was killed.
        """
        status = self._process.wait()
        with suppress(OSError):
            return pickle.loads((self._folder / _FOUND).read_bytes())
        last = (self._folder / _LOG).read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"the process of the search ended with status {status}{last and f' ({last})'}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._temporary.cleanup()


def _main(folder: Path, parent: int) -> None:
    end_with_parent()
    if os.getppid() != parent:  # the parent has ended already
        return
    found = pickle.dumps(pickle.loads((folder / _ASKED).read_bytes())())
    (folder / f"{_FOUND}.part").write_bytes(found)
    (folder / f"{_FOUND}.part").rename(folder / _FOUND)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
