"""Plan a training run: search degrees, microbatch, schedule and recompute for a model on a cluster, and more.

    python tools/grid_search.py COMMAND --help

COMMAND is one of those below; each is a file in grid_search_commands/. Only `measure` needs torch.

Exit status: 0, or 1 where a file or a combination is wrong, 2 where the command line is or a file
cannot be opened, 130 after Ctrl-C.
"""

import importlib
import sys
from collections.abc import Sequence

from megatron.commands.common import command_line

COMMANDS = {
    "search": "find the fastest configuration of a model on a cluster",
    "sweep": "the best for each number of GPUs and each sequence length: time against cost",
    "estimate": "predict given configurations",
    "validate": "hold the planner against published results",
    "calibrate": "fit the time model to measured runs",
    "measure": "run configurations, and put measured beside predicted",
}
"""Name and summary; `grid_search_commands/NAME.py` has add_arguments(parser) and run(options).

Where the file says TAKES_FLAGS, words that are none of its own are flags of the training programs: `options.flags`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    wanted = next((word for word in argv if word in COMMANDS), None)
    parser = command_line.parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name != wanted:  # what it imports is not waited for
            commands.add_parser(name, help=summary)
            continue
        command = importlib.import_module(f"megatron.commands.grid_search_commands.{name}")
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
