"""Print what an hour measured as a table for a page of docs, and what failed or was not run.

    python -m benchmarks.gpu_hour.report outputs/gpu_hour

It holds measured figures only: the folder of a rehearsal is refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_hour.machine import sentence
from benchmarks.gpu_hour.parts import PARTS, Part
from benchmarks.gpu_hour.records import DONE, Records


def table(records: Records, parts: Sequence[Part]) -> list[str]:
    """A row for each part that has measured something."""
    rows = ["| question | measured |", "|---|---|"]
    for part in parts:
        record = records.by_name.get(part.name, {})
        lines = (record.get("result") or {}).get("lines", [])
        if not lines:
            continue
        words = "<br>".join(line.replace("|", "\\|") for line in lines)
        whole = "" if record["status"] == DONE else f" ({record['status']}: not all of it)"
        rows.append(f"| {part.question}{whole} | {words} |")
    return rows


def report(folder: Path, parts: Sequence[Part] = PARTS) -> list[str]:
    """The lines of the page. Raises ValueError for a folder without measurements."""
    records = Records(folder)
    if not records.by_name:
        raise ValueError(f"{folder} holds no results of an hour; give the folder of --out")
    if any(record["rehearsal"] or (record["result"] or {}).get("rehearsal") for record in records.by_name.values()):
        raise ValueError(
            f"{folder} holds a rehearsal, whose figures say nothing of a GPU; run benchmarks/gpu_hour.sh without "
            "--rehearse on a machine with one"
        )
    lines = [f"{sentence(records.machine)}.", "", *table(records, parts), ""]
    for kind in ("machine", "sources"):
        if len(found := {record[kind] for record in records.by_name.values()}) > 1:
            lines += [f"The rows are of several {kind}: {', '.join(sorted(found))}.", ""]
    for part in parts:
        record = records.by_name.get(part.name, {"status": "not run", "reason": ""})
        if record["status"] != DONE:
            lines.append(f"- `{part.name}`: {record['status']}{', ' + record['reason'] if record['reason'] else ''}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of --out")
    args = parser.parse_args(arguments)
    try:
        print("\n".join(report(args.folder)))
    except ValueError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
