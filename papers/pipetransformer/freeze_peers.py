"""The seconds of a batch with frozen layers: this project's pipeline beside peers whose layers are frozen by hand.

    python -m papers.pipetransformer.freeze_peers                       # about 15 minutes, two processes; a table
    python -m papers.pipetransformer.freeze_peers --alpha 0.33 --json found.json

A ViT in two stages is trained on digits with different numbers of frozen layers, in turns, each turn a job of its own:

torch 1F1B            torch.distributed.pipelining; frozen layers have no gradient and are in no optimizer
megatron.core 1F1B    megatron.core's schedule, DDP and optimizer, with layers frozen in the same way
frozen                --freeze-training, with the stages with which the run began
elastic               also with --elastic-pipeline, which may change the pipeline on the two ranks
all                   also with --activation-cache, in the second epoch at this depth

A time is the median of the batches after the first few, on the slower rank, and over the rounds. "whole" adds up the
times of a run whose layers freeze by the bound of the paper's rule. All jobs have the same weights and data, so their
first losses are compared, and must agree.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from megatron.trainer.report.metrics import read_metrics
from papers.pipetransformer.freeze_study import LAYERS, VIT, launch, python

PEERS = ("torch 1F1B", "megatron.core 1F1B")
OWN = {
    "frozen": (),
    "elastic": ("--elastic-pipeline",),
    "all": ("--elastic-pipeline", "--activation-cache", "{cache}"),
}
DECIDED = 10  # number of batches before layers freeze: an epoch, after which the times of a batch are known
SECOND_EPOCH = 2 * DECIDED + 2


def depths(alpha: float, intervals: int) -> list[int]:
    """The number of frozen layers in each interval, by the bound alone."""
    return [int(LAYERS * (1 - (1 - alpha) ** number) + 1e-9) for number in range(intervals)]


def turn(contender: str, depth: int, folder: Path) -> tuple[float, float]:
    """Run one turn of a contender with `depth` frozen layers. Returns the seconds of a batch, and the first loss."""
    data = [str(folder / f"{part}.npz") for part in ("train", "validation")]
    flags = [
        *VIT.split(), "--num-layers", str(LAYERS), "--pipeline-model-parallel-size", "2", "--data-path", *data,
        "--train-iters", str(SECOND_EPOCH + 12), "--eval-iters", "0",
    ]  # fmt: skip
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    if contender in PEERS:
        rank = ["-m", "benchmarks.common.rank", "papers.pipetransformer.freeze_peer_stages:train"]
        launch([*rank, contender, str(depth), str(metrics), *flags], folder / "log.txt")
        found = json.loads(metrics.read_text())
        return statistics.median(found["seconds"][4:]), found["first_loss"]
    own = [word.format(cache=folder / "cache") for word in OWN[contender]]
    if contender != "frozen" or depth:
        own = ["--freeze-training", "--freeze-interval", str(DECIDED), "--freeze-schedule", str(depth), *own]
    shutil.rmtree(folder / "cache", ignore_errors=True)
    argv = ["pretrain_vision_classify.py", *flags, *own, "--metrics-file", str(metrics)]
    launch(argv, folder / "log.txt")
    records = [each for each in read_metrics(str(metrics)) if "iteration_time_ms" in each]
    seconds = [each["iteration_time_ms"] / 1000 for each in records[SECOND_EPOCH:]]
    return statistics.median(seconds), records[0]["loss"]


def measure(options: argparse.Namespace) -> dict:
    """Run all turns. Returns the results; `seconds`: contender -> depth -> seconds of a batch by round."""
    needed = sorted(set(depths(options.alpha, options.intervals)))
    found = {name: {depth: [] for depth in needed} for name in (*PEERS, *OWN)}
    losses = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python("examples/digits.py", "--classes", "5-9", "--folder", str(folder))
        for number in range(options.rounds):
            for depth in needed:
                for contender, by_depth in found.items():
                    seconds, loss = turn(contender, depth, folder)
                    by_depth[depth].append(seconds)
                    losses.append(loss)
                    told = f"round {number + 1}, {depth} frozen, {contender}: {1000 * seconds:.1f} ms"
                    print(told, file=sys.stderr, flush=True)
    assert max(losses) - min(losses) < 1e-5 * losses[0], losses
    return {"alpha": options.alpha, "intervals": options.intervals, "first_loss": losses[0], "seconds": found}


def show(result: dict, console: Console) -> None:
    seconds = {
        name: {int(depth): statistics.median(each) for depth, each in by_depth.items()}
        for name, by_depth in result["seconds"].items()
    }
    course = depths(result["alpha"], result["intervals"])
    whole = {name: sum(by_depth[depth] for depth in course) for name, by_depth in seconds.items()}
    console.print(f"ms a batch by frozen layers; whole: {course}, relative to megatron.core 1F1B that freezes nothing")
    table = Table("", *map(str, sorted(set(course))), "whole")
    dense = seconds["megatron.core 1F1B"][0] * len(course)
    for name, by_depth in seconds.items():
        cells = [f"{1000 * by_depth[depth]:.1f}" for depth in sorted(by_depth)]
        table.add_row(name, *cells, f"{dense / whole[name]:.2f} times sooner")
    console.print(table)
    best = min(whole[name] for name in PEERS)
    told = ", ".join(f"{name} {best / whole[name]:.2f}" for name in OWN)
    console.print(f"over the sooner of the two peers: {told}; first loss of all {result['first_loss']:.6f}")


def main() -> int:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--intervals", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = measure(options)
    write(options.json, result)
    show(result, terminal(120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
