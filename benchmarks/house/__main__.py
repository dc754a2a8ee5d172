"""The sizes of the code, and the comparison of two revisions' outputs: whether it became smaller and works as before.

    python -m benchmarks.house count                     # sizes beside their bars; --rows lists the counted things
    python -m benchmarks.house freeze --output before    # on one revision
    python -m benchmarks.house freeze --output after     # on the other revision, in the same environment
    python -m benchmarks.house compare before after      # status 1 if anything differs

`freeze` writes one JSON file for each group: the programs of all schedules with their proofs, the checker's errors for
wrong programs, simulated ends, outputs of the commands, searches, predictions of published runs, dry runs and help
texts. Times of the run, dates and paths are left out, so two freezes of one revision are equal. Programs come from the
library, everything else from commands. Execution times are measured by `program_scale.py`, `search_scale.py` and the
other benchmarks; `tests/run.sh` prints the time of the tests.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.common.tables import show_table, terminal
from benchmarks.house.compare import differences
from benchmarks.house.count import count
from benchmarks.house.freeze import GROUPS, PUBLISHED, ROOT, freeze


def _count(options: argparse.Namespace) -> int:
    counts = count(ROOT)
    if options.json:
        figures = {each.name: {"value": each.value, "bar": each.bar, "rows": each.rows} for each in counts}
        print(json.dumps(figures, indent=1))
        return 0
    columns = {
        "": lambda row: row["name"],
        "now": lambda row: f"{row['value']:,}",
        "bar": lambda row: "" if row["bar"] is None else f"{row['bar']:,}",
    }
    show_table("the house", columns, [vars(each) for each in counts])
    if options.rows:
        for each in counts:
            if each.rows:
                print(f"\n{each.name}", *each.rows, sep="\n  ")
    return 0


def _freeze(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    for name, path in freeze(options.output, options.groups or GROUPS, options.entries):
        seconds, begin = time.perf_counter() - begin, time.perf_counter()
        print(f"{name}: {path.stat().st_size / 1e6:.2f} MB, {seconds:.0f} s", flush=True)
    return 0


def _compare(options: argparse.Namespace) -> int:
    found = differences(options.before, options.after, tolerance=options.tolerance)
    for line in found:
        terminal().print(line, markup=False, highlight=False, soft_wrap=True)
    print("the same" if not found else f"{len(found)} groups differ")
    return 1 if found else 0


def main() -> int:
    summary, _, more = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.house", description=summary, epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("count", help="sizes beside their bars")
    one.add_argument("--json", action="store_true", help="print one JSON object, rows included")
    one.add_argument("--rows", action="store_true", help="list what was counted")
    one.set_defaults(run=_count)
    one = commands.add_parser("freeze", help="write what must not change")
    one.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a JSON file for each group")
    one.add_argument("--groups", nargs="+", choices=GROUPS, help="default: all")
    one.add_argument(
        "--entries", nargs="+", type=Path, default=PUBLISHED, metavar="FILE",
        help="published runs to predict (default: those of benchmarks/published)",
    )  # fmt: skip
    one.set_defaults(run=_freeze)
    one = commands.add_parser("compare", help="say what differs between two freezes")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    one.add_argument(
        "--tolerance", type=float, default=0.0, help="of numbers with a point, relative (default: %(default)s)"
    )
    one.set_defaults(run=_compare)
    options = parser.parse_args()
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
