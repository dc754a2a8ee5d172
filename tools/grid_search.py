"""Plan a training run: search degrees, microbatch, schedule and recompute for a model on a cluster, and more.

    python tools/grid_search.py COMMAND --help

COMMAND is one of those below; each is a file in grid_search_commands/. Only `measure` needs torch.

Exit status: 0, or 1 where a file or a combination is wrong, 2 where the command line is.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where the next one is
import command_line

COMMANDS = {
    "estimate": "predict given configurations",
    "validate": "hold the planner against published results",
    "calibrate": "fit the time model to measured runs",
}
"""Name and summary; `grid_search_commands/NAME.py` has add_arguments(parser) and run(options)."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = importlib.import_module(f"grid_search_commands.{name}")
        subparser = commands.add_parser(
            name, help=summary, description=command.__doc__, allow_abbrev=False,
            formatter_class=command_line.argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    return command_line.run(options.run, options)


if __name__ == "__main__":
    raise SystemExit(main())
