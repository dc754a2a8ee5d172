"""The cost and the gain of freezing on real data: a ViT and a BERT, fine-tuned dense, frozen, and with everything.

    python -m papers.pipetransformer.freeze_study vit --output runs              # digits of scikit-learn
    python -m papers.pipetransformer.freeze_study bert --reviews ARCHIVE --output runs   # examples/reviews.py names it
    python -m papers.pipetransformer.freeze_study --show runs/vit.json runs/bert.json

Two processes with one thread each train. The model is pretrained once: the ViT on the digits 0 to 4, the BERT on
unlabelled texts. Then it is fine-tuned for the same epochs in three ways:

dense    p=2, flush
frozen   the same stages, with --freeze-training
all      also with --elastic-pipeline and --activation-cache

First each way of freezing (epochs before it begins, and alpha) is tried with everything, on seeds that are not used
again, without test data. Of the ways that are at least `--sooner` times as fast as dense, by the sums over the seeds,
the one that freezes latest is chosen. Its loss of accuracy is not considered, since the validation data of a few seeds
cannot resolve one point. Then each seed trains all three arms, in an order that changes, and reads its test data once,
at the end. A seed also decides the split of the images, or of the labelled texts.

seconds   seconds of training: batches and changes. Evaluations and the launch are additional, and equal for all arms
sooner    seconds of dense over those of the arm, within a seed
accuracy  on the test data at the end; "lower" in points, as the mean over the seeds with its 95% interval (Student's t)
reaches   seconds until the validation accuracy first reaches the final one of dense, over dense's seconds to reach it
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from benchmarks.common.processes import ROOT, environment, torchrun
from benchmarks.common.tables import terminal
from megatron.trainer.report.metrics import read_metrics

LAYERS = 8

COMMON = (
    "--hidden-size 128 --num-attention-heads 4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --clip-grad 1.0 "
    "--micro-batch-size 16 --num-workers 0 --log-interval 1000 --pipeline-schedule flush "
    "--untie-embeddings-and-output-weights"
)
VIT = (
    f"{COMMON} --ffn-hidden-size 256 --img-h 8 --img-w 8 --num-channels 1 --patch-dim 2 --num-classes 5 "
    "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 64 --lr 1e-3 --weight-decay 0.05"
)
BERT = (
    f"{COMMON} --seq-length 32 --max-position-embeddings 32 --bert-no-binary-head "
    "--tokenizer-type BertWordPieceLowerCase --global-batch-size 64 --weight-decay 0.01"
)


class Study(ABC):
    """The study of one model: its data, its pretraining and its fine-tuning."""

    ways: tuple[tuple[int, float], ...]
    """The ways of freezing to try, the latest first: (epochs before the first interval, alpha)."""
    tried_seeds: tuple[int, ...] = (101, 102)
    arms: tuple[str, ...] = ("dense", "frozen", "all")
    tried_arm = "all"
    """The arm in which the ways are tried."""

    def __init__(self, options: argparse.Namespace, *, epochs: int, epochs_of_interval: float) -> None:
        self.options = options
        self.folder = options.output.resolve() / options.model
        self.epochs = options.epochs or epochs
        self.epochs_of_interval = epochs_of_interval
        self.pretrained = self.folder / "pretrained"

    @abstractmethod
    def prepare(self) -> None:
        """Make the data and the pretrained checkpoint, unless they exist."""

    @abstractmethod
    def command(self, seed: int, *, test: bool) -> list[str]:
        """The command line of the fine-tuning program. `test`: whether to evaluate on the test data."""

    @abstractmethod
    def batches(self, seed: int) -> int:
        """The number of batches of an epoch, rounded up."""

    def arm(self, name: str, seed: int, way: tuple[int, float], *, test: bool) -> dict:
        """Run an arm. Returns its seconds, accuracies and changes. `way`: the way of freezing."""
        flags = [*self.command(seed, test=test), "--seed", str(seed), "--epochs", str(self.epochs)]
        epoch, (start, alpha) = self.batches(seed), way
        cache = self.folder / "cache"
        if name != "dense":
            flags += ["--freeze-training", "--freeze-alpha", str(alpha), "--freeze-start", str(start * epoch)]
            flags += ["--freeze-interval", str(round(self.epochs_of_interval * epoch))]
        if name == "all":
            flags += ["--elastic-pipeline", "--activation-cache", str(cache)]
        metrics = self.folder / "metrics" / f"{name}-{seed}-{start}-{alpha}.jsonl"
        metrics.parent.mkdir(exist_ok=True)
        metrics.unlink(missing_ok=True)
        start = time.perf_counter()
        launch([*flags, "--metrics-file", str(metrics)], metrics.with_suffix(".log"))
        shutil.rmtree(cache, ignore_errors=True)
        return {"process_seconds": time.perf_counter() - start, **read_run(metrics)}


class VisionStudy(Study):
    ways = (10, 0.5), (6, 0.33), (6, 0.5)

    def prepare(self) -> None:
        if (self.pretrained / "latest_checkpointed_iteration.txt").exists():
            return
        first = self.folder / "first"
        python("examples/digits.py", "--classes", "0-4", "--folder", str(first))
        data = [str(first / f"{part}.npz") for part in ("train", "validation")]
        launch(
            ["pretrain_vision_classify.py", *VIT.split(), "--num-layers", str(LAYERS), "--epochs", "30",
             "--pipeline-model-parallel-size", "2", "--data-path", *data, "--save", str(self.pretrained)],
            self.folder / "pretraining.log",
        )  # fmt: skip

    def data(self, seed: int) -> Path:
        folder = self.folder / f"data-{seed}"
        if not folder.exists():
            python("examples/digits.py", "--classes", "5-9", "--folder", str(folder), "--seed", str(seed))
        return folder

    def command(self, seed: int, *, test: bool) -> list[str]:
        parts = ("train", "validation", "test") if test else ("train", "validation")
        files = [str(self.data(seed) / f"{part}.npz") for part in parts]
        return [
            "pretrain_vision_classify.py", *VIT.split(), "--num-layers", str(LAYERS),
            "--pipeline-model-parallel-size", "2", "--pretrained-checkpoint", str(self.pretrained),
            "--data-path", *files,
        ]  # fmt: skip

    def batches(self, seed: int) -> int:
        import numpy

        return math.ceil(len(numpy.load(self.data(seed) / "train.npz")["labels"]) / 64)


class TextStudy(Study):
    ways = (5, 0.5), (4, 0.5), (3, 0.5)
    num_samples = 1500

    @property
    def vocabulary(self) -> list[str]:
        return ["--vocab-file", str(self.folder / "data-0" / "vocab.txt")]

    def data(self, seed: int) -> Path:
        folder = self.folder / f"data-{seed}"
        if not folder.exists():
            archive = str(self.options.reviews.resolve())
            python("examples/reviews.py", archive, "--folder", str(folder), "--seed", str(seed))
            reviews = (folder / "train.jsonl").read_text().splitlines(keepends=True)
            (folder / "tuning.jsonl").write_text("".join(reviews[: self.num_samples]))
        return folder

    def prepare(self) -> None:
        if self.options.reviews is None:
            raise ValueError("--reviews is needed: the archive that examples/reviews.py names")
        if (self.pretrained / "latest_checkpointed_iteration.txt").exists():
            return
        data = self.data(0)
        corpus = str(data / "corpus.jsonl")
        python("examples/quickstart/train_wordpiece.py", corpus, str(data / "vocab.txt"), "--vocab-size", "2048")
        python(
            "tools/preprocess_data.py", "--input", corpus, "--output-prefix", str(data / "corpus"), "--split-sentences",
            "--tokenizer-type", "BertWordPieceLowerCase", *self.vocabulary,
        )  # fmt: skip
        launch(
            ["pretrain_bert.py", *BERT.split(), *self.vocabulary, "--num-layers", str(LAYERS), "--train-iters", "2000",
             "--lr", "1e-3", "--pipeline-model-parallel-size", "2", "--data-path", str(data / "corpus_text_sentence"),
             "--split", "98,2,0", "--eval-iters", "0", "--save", str(self.pretrained)],
            self.folder / "pretraining.log",
        )  # fmt: skip

    def command(self, seed: int, *, test: bool) -> list[str]:
        data = self.data(seed)
        tested = ["--test-data", str(data / "test.jsonl")] if test else []
        return [
            "finetune_bert.py", *BERT.split(), *self.vocabulary, "--num-layers", str(LAYERS), "--lr", "5e-4",
            "--pipeline-model-parallel-size", "2", "--pretrained-checkpoint", str(self.pretrained),
            "--train-data", str(data / "tuning.jsonl"), "--valid-data", str(data / "validation.jsonl"), *tested,
        ]  # fmt: skip

    def batches(self, seed: int) -> int:
        return math.ceil(self.num_samples / 64)


STUDIES = {
    "vit": lambda options: VisionStudy(options, epochs=24, epochs_of_interval=2),
    "bert": lambda options: TextStudy(options, epochs=12, epochs_of_interval=1),
}


def python(*argv: str) -> None:
    subprocess.run([sys.executable, *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def launch(argv: list[str], log: Path) -> None:
    """Run a training program on two processes. Its output goes to `log`, which is shown if the program fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    with open(log, "w") as stream:
        ended = torchrun(2, *argv, cwd=ROOT, env=variables, stdout=stream, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"{' '.join(argv)}\n{log.read_text()[-4000:]}\nthe run failed; {log}")


def read_run(metrics: Path) -> dict:
    """Read a metrics file.

    Returns `seconds`, of batches and changes; `validation`, a list of (seconds so far, accuracy); `test`, the accuracy
    or None; and `changes`, a list of (iteration, frozen layers, ranks, replicas, seconds).
    """
    seconds, validation, test, changes = 0.0, [], None, []
    for record in read_metrics(str(metrics)):
        if "iteration_time_ms" in record:
            seconds += record["iteration_time_ms"] / 1000
        elif "frozen_layers" in record:
            seconds += record["change_seconds"]
            names = ("iteration", "frozen_layers", "pipeline_ranks", "replicas", "change_seconds")
            changes.append([record[name] for name in names])
        elif "validation_accuracy" in record:
            validation.append([seconds, record["validation_accuracy"]])
        elif "test_accuracy" in record:
            test = record["test_accuracy"]
    return {"seconds": seconds, "validation": validation, "test": test, "changes": changes}


def choose(study: Study) -> tuple[tuple[int, float], dict]:
    """Choose the way of freezing. Returns it, and way -> (seconds, validation accuracy) of each trial run."""
    tried: dict[str, list] = {}
    for way in (None, *study.ways):
        arm = study.tried_arm if way else "dense"
        runs = [study.arm(arm, seed, way or (0, 0.0), test=False) for seed in study.tried_seeds]
        found = [(run["seconds"], run["validation"][-1][1]) for run in runs]
        tried[named(way)] = found
        means = fmean(each[0] for each in found), fmean(each[1] for each in found)
        print(f"{named(way)}: {means[0]:.1f} s, {means[1]:.4f} of validation data", file=sys.stderr, flush=True)
    dense = sum(seconds for seconds, _ in tried[named(None)])
    sooner = {way: dense / sum(seconds for seconds, _ in tried[named(way)]) for way in study.ways}
    latest = (way for way in study.ways if sooner[way] >= study.options.sooner)
    return next(latest, max(study.ways, key=sooner.__getitem__)), tried


def named(way: tuple[int, float] | None) -> str:
    return "dense" if way is None else f"from epoch {way[0]} on, alpha {way[1]:g}"


def measure(study: Study, options: argparse.Namespace) -> dict:
    study.folder.mkdir(parents=True, exist_ok=True)
    study.prepare()
    way, tried = choose(study) if options.way is None else ((int(options.way[0]), options.way[1]), {})
    order = random.Random(0)
    runs: dict[str, list[dict]] = {name: [] for name in study.arms}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in order.sample(study.arms, len(study.arms)):
            runs[name].append(study.arm(name, seed, way, test=True))
            last = runs[name][-1]
            print(f"seed {seed}, {name}: {last['seconds']:.1f} s, {last['test']:.4f}", file=sys.stderr, flush=True)
    return {"model": options.model, "epochs": study.epochs, "way": way, "tried": tried, "runs": runs}


def interval(values: Sequence[float]) -> str:
    """The mean and half of its 95% interval, as text."""
    if len(values) < 2:
        return f"{values[0]:+.2f}"
    quantile = student.ppf(0.975, len(values) - 1)
    return f"{fmean(values):+.2f} ± {quantile * stdev(values) / math.sqrt(len(values)):.2f}"


def ranged(values: Sequence[float]) -> str:
    """The median with the least and the greatest value, as text."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def reached(run: dict, accuracy: float) -> float | None:
    """The seconds until the validation accuracy first reaches `accuracy`; None if it never does."""
    return next((seconds for seconds, found in run["validation"] if found >= accuracy), None)


def show(result: dict, console: Console) -> None:
    dense = result["runs"]["dense"]
    if result["tried"]:
        for name, found in result["tried"].items():
            seconds, accuracy = (fmean(each[place] for each in found) for place in (0, 1))
            console.print(
                f"tried on {len(found)} other seeds: {name}: {seconds:.1f} s, {accuracy:.4f} of validation data"
            )
    console.print(f"{result['model']}: {result['epochs']} epochs, frozen {named(result['way'])}, {len(dense)} seeds")
    columns = ("", "seconds", "sooner", "test accuracy", "lower, points", "reaches dense's", "frozen at the end")
    is_simulated = "simulated" in dense[0]
    table = Table(*columns, *["than its start", "simulated sooner"] * is_simulated)
    for name, runs in result["runs"].items():
        pairs = list(zip(dense, runs, strict=True))
        sooner = [one["seconds"] / other["seconds"] for one, other in pairs]
        lower = [100 * (one["test"] - other["test"]) for one, other in pairs]
        times = [
            (reached(one, one["validation"][-1][1]), reached(other, one["validation"][-1][1])) for one, other in pairs
        ]
        ratios = [other / one for one, other in times if other is not None]
        further = []
        if is_simulated:
            further = [ranged([each["as_at_first"] / each["seconds"] for each in runs])]
            further += [ranged([one["simulated"] / other["simulated"] for one, other in pairs])]
        table.add_row(
            name, f"{median(each['seconds'] for each in runs):.1f}", ranged(sooner),
            f"{fmean(each['test'] for each in runs):.4f}", interval(lower) if name != "dense" else "",
            f"{median(ratios):.2f} ({len(ratios)} of {len(runs)})" if ratios else "never",
            ", ".join(str(each["changes"][-1][1] if each["changes"] else 0) for each in runs),
            *further,
        )  # fmt: skip
    console.print(table)
    for name, runs in result["runs"].items():
        for seed, run in enumerate(runs):
            if run["changes"]:
                steps = ", ".join(f"{count} from batch {step} on" for step, count, *_ in run["changes"])
                console.print(f"{name}, run {seed + 1}: frozen layers: {steps}", highlight=False)


def main(
    doc: str | None = __doc__, studies: Mapping[str, Callable[[argparse.Namespace], Study]] = STUDIES,
    *, name: str = "freeze_study", sooner: float = 1.55,
) -> int:  # fmt: skip
    """Study one of `studies`, or show results. `doc`, `name`: of the command. `sooner`: default of --sooner."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=studies)
    parser.add_argument("--reviews", type=Path, help="the archive for the BERT")
    parser.add_argument("--output", type=Path, default=Path("outputs") / name)
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--first-seed", type=int, default=0, help="seeds whose test data were read choose no more")
    parser.add_argument("--sooner", type=float, default=sooner, help="than dense: of those ways the latest is chosen")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--way", type=float, nargs=2, metavar=("EPOCHS", "ALPHA"), help="do not choose, take this one")
    parser.add_argument("--show", type=Path, nargs="+", help="results of earlier calls")
    options = parser.parse_args()
    console = terminal(120)
    if options.show is None:
        if options.model is None:
            parser.error("name a model, or results to --show")
        try:
            results = [measure(studies[options.model](options), options)]
        except ValueError as error:
            parser.error(str(error))
        (options.output / f"{options.model}.json").write_text(json.dumps(results[0], indent=1) + "\n")
    else:
        results = [json.loads(path.read_text()) for path in options.show]
    for result in results:
        show(result, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
