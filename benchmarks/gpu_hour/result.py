"""What a part of the hour writes: sentences for a reader, and the figures behind them.

The file is written anew, as a whole, after each measurement. A part that hangs or is ended so loses only what it was
measuring.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.documents.files import write_whole


def parser_of(description: str) -> argparse.ArgumentParser:
    """A part's parser, with the flags that the runner gives to every part."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="file for the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU; the figures say nothing")
    return parser


class Result:
    """The results of a part so far. `others`: further entries of the file."""

    def __init__(self, args: argparse.Namespace, **others: object) -> None:
        self._path = args.json
        self.content = {"rehearsal": args.rehearse, "lines": [], "figures": {}, **others}

    def add(self, line: str, **figures: float | Sequence[float]) -> None:
        """Print and keep a sentence with its figures, and write the file."""
        print(line, flush=True)
        self.content["lines"].append(line)
        self.content["figures"].update(figures)
        self.write()

    def write(self) -> None:
        write_whole(self._path, json.dumps(self.content, indent=1) + "\n")


def key_of(name: str) -> str:
    """A name for readers as a part of a figure's name."""
    return name.replace(",", "").replace(".", "_").replace(" ", "_")


def seconds_of(run: Callable[[], object], *, repeats: int, count: int = 1) -> list[float]:
    """Measure the seconds of a call, `repeats` times, each the mean of `count` calls between two idle devices.

    Two times of wall clock at an idle device, and not events: they also hold what the host adds.
    """
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    run()  # kernels are loaded, memory is allocated
    found = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        found.append((time.perf_counter() - start) / count)
    return found
