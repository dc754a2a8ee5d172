"""Draw private memory over depth of the runs of examples/l2l.sh, and say what l2l cost in time.

    python examples/l2l/picture.py DIRECTORY --limit BYTES --output memory.png

Reads each LABEL-DEPTH.json of private_memory.py with a status of 0, and LABEL-DEPTH.jsonl, its metrics. Losses at the
greatest depth that differ by a bit are an error: then the two schedules did not train the same.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from megatron.documents.picture import one_panel
from megatron.trainer.report.metrics import read_metrics

MIB = 2**20


def read_runs(directory: Path) -> dict[str, dict[int, float]]:
    """`{label: {depth: private bytes}}` of the runs that ended well."""
    runs: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted(directory.glob("*.json")):
        record = json.loads(path.read_text())
        if record["status"] == 0:
            runs[record["label"]][record["depth"]] = record["private_bytes"]
    return runs


def draw(runs: dict[str, dict[int, float]], limit: float, path: Path) -> None:
    with one_panel(path, 7.0, 4.0) as axes:
        for label, peaks in sorted(runs.items()):
            depths = sorted(peaks)
            axes.plot(depths, [peaks[depth] / MIB for depth in depths], marker="o", label=label)
        axes.axhline(limit / MIB, color="black", linestyle="--", linewidth=0.9, label="limit (ulimit -d)")
        axes.set_xlabel("layers")
        axes.set_ylabel("private memory at its fullest (MiB)")
        axes.set_ylim(bottom=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit", type=int, required=True, help="bytes")
    parser.add_argument("--output", type=Path, required=True, help="picture")
    args = parser.parse_args()
    runs = read_runs(args.directory)
    draw(runs, args.limit, args.output)
    for label, peaks in sorted(runs.items()):
        print(f"{label}: " + ", ".join(f"{peaks[depth] / MIB:.0f} MiB at {depth} layers" for depth in sorted(peaks)))
    depth = max(set(runs["l2l"]) & set(runs["flush"]))
    metrics = {label: list(read_metrics(str(args.directory / f"{label}-{depth}.jsonl"))) for label in ("l2l", "flush")}
    losses = {label: [record["lm_loss"] for record in records] for label, records in metrics.items()}
    if losses["l2l"] != losses["flush"]:
        parser.exit(1, f"{parser.prog}: losses differ at {depth} layers: {losses}\n")
    # Without the first iteration, which makes moments and compiles.
    seconds = {
        label: median(each["iteration_time_ms"] / 1000 for each in records[1:]) for label, records in metrics.items()
    }
    print(
        f"The same losses, to the last bit. In time, {depth} layers: {seconds['l2l']:.1f} s an iteration with l2l, "
        f"{seconds['flush']:.1f} s with flush, recompute and no limit: {seconds['l2l'] / seconds['flush']:.2f} times."
    )


if __name__ == "__main__":
    main()
