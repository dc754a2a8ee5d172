"""Plan a training run: search degrees, microbatch, schedule and recompute for a model on a cluster, and more.

    python tools/grid_search.py COMMAND --help

The commands are listed below. Only `measure` needs torch.

Exit status: 0; 1 if a file or a combination of options is wrong; 2 if the command line is wrong or a
file cannot be opened; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.documents import command_line

if TYPE_CHECKING:
    from megatron.planner.published.entries import Entry

COMMANDS = {
    "search": "find the fastest configuration of a model on a cluster",
    "sweep": "the best for each number of GPUs and each sequence length: time against cost",
    "estimate": "predict given configurations",
    "validate": "hold the planner against published results",
    "calibrate": "fit the time model to measured runs",
    "measure": "run configurations, and put measured beside predicted",
}
"""Name of a command -> its summary. `grid_search/NAME.py` has add_arguments(parser) and run(options).

If that module sets TAKES_FLAGS, unknown words are flags of the training programs and are put into `options.flags`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    wanted = next((word for word in argv if word in COMMANDS), None)
    parser = command_line.parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name != wanted:  # importing an unused command would take time
            commands.add_parser(name, help=summary)
            continue
        command = importlib.import_module(f"megatron.commands.grid_search.{name}")
        subparser = commands.add_parser(
            name, help=summary, description=command.__doc__, allow_abbrev=False,
            formatter_class=command_line.argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, takes_flags=getattr(command, "TAKES_FLAGS", False))
    options, options.flags = _parsed(parser, argv)
    return command_line.run(options.run, options)


def _parsed(parser, argv: list[str]) -> tuple:
    options, rest = parser.parse_known_args(argv)
    if rest and not options.takes_flags:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options, [word for word in rest if word != "--"]


def note_unread(entries: Sequence[Entry]) -> None:
    """Print to standard error which measurements of published entries are not read."""
    for entry in entries:
        for text in entry.unread:
            print(f"note: {entry.id}: {text}, and left out", file=sys.stderr)
