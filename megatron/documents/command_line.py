"""Parsers and exit statuses of all commands, and the flags of commands that draw metrics files.

Exit status: 0; 1 if a program, a file or a combination of options is wrong; 2 if the command line is wrong or a file
cannot be opened; 130 after Ctrl-C. A pipe whose reader has ended, such as `head`, is no error.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from megatron.documents.files import write_whole
from megatron.documents.flag_files import FlagFileParser


def run(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command, and print an error of the user in one line. Returns the exit status."""
    try:
        status = command(options)
        sys.stdout.flush()  # raises here if the pipe is closed, and not when the interpreter ends
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's Console raises SystemExit at a closed pipe
            return 0
        raise
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = "" if error.filename in (None, "") else f"{error.filename}: "
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


@contextmanager
def unwinding(hint: str) -> Iterator[None]:
    """Raise SystemExit on SIGINT, SIGTERM and SIGHUP within a block, so that each `finally` ends its child processes.

    Args:
        hint: text for the user, printed after the signal's name.
    """

    def end(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # another signal must not interrupt the unwinding
        print(f"ended by {signal.Signals(number).name}; {hint}", file=sys.stderr)
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # kept: nohup's
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser whose help is a command's docstring: first paragraph above, the rest below the flags. Takes `@FILE`."""
    summary, _, examples = description.partition("\n\n")
    return FlagFileParser(
        description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def write(path: str, text: str) -> None:
    """Write text to a file, or to standard output if its name is `-`."""
    if path == "-":
        sys.stdout.write(text)
    else:
        write_whole(Path(path), text)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, float, float], None] | None]:
    """Yield what shows (activity, amount done, total) as bars on standard error; None if that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict = {}

        def report(what: str, done: float, total: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def add_flags(group: argparse._ActionsContainer, *rows: tuple) -> None:
    """Add a flag for each row: names, type (None: a switch), metavar, help, and other argparse options as a dict."""
    for names, kind, metavar, text, *more in rows:
        given = {"action": "store_true"} if kind is None else {"type": kind, "metavar": metavar}
        group.add_argument(*names.split(), help=text, **given | (more[0] if more else {}))


# --- checks of output paths, made before the work


def require_file(path: Path, flag: str = "--output") -> None:
    """Check that a file can be written at `path`. Raises ValueError if not."""
    if path.is_dir() or not _may_be_made(path):
        raise ValueError(f"{flag} {path} cannot be written; name a file in a folder of yours")


def require_folder(path: Path) -> None:
    """Check that files can be created in the folder of --output, which may be missing. Raises ValueError if not."""
    folder = Path(os.path.realpath(path))
    if folder.is_symlink() or not _may_be_made(folder / "file"):  # a link to itself
        raise ValueError(f"--output {path} cannot be written; name a folder of yours")


def _may_be_made(path: Path) -> bool:
    folder = next(each for each in path.absolute().parents if each.exists())
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


Run = TypeVar("Run")


def metrics_parser_of(description: str, *, output: str, help_of_output: str) -> argparse.ArgumentParser:
    """A parser with flags for metrics files, their labels, and the picture. `output`: default path of the picture."""
    parser = parser_of(description)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics files")
    parser.add_argument("--labels", nargs="+", help="a name for each file (default: its file name)")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"{help_of_output} (default: %(default)s)")
    parser.add_argument("--title", default="", help="above the picture")
    return parser


def read_and_draw(
    parser: argparse.ArgumentParser, options: argparse.Namespace, read: Callable[[Path, str], Run],
    draw: Callable[..., None],
) -> list[Run]:  # fmt: skip
    """Read each metrics file with its label, and draw all runs; an error ends the process with a sentence."""
    labels = options.labels or [path.stem for path in options.metrics]
    if len(labels) != len(options.metrics):
        parser.error(f"--labels gives {len(labels)} names for {len(options.metrics)} files; give one for each")
    try:
        runs = [read(path, label) for path, label in zip(options.metrics, labels, strict=True)]
        draw(runs, options.output, title=options.title)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return runs
