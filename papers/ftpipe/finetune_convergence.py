"""The cost of staleness: a fine-tuned model's accuracy under ftpipe beside flush, on real data, and the time to it.

    python -m papers.ftpipe.finetune_convergence DATA --output runs      # DATA: folder made by examples/sentiment.py
    python -m papers.ftpipe.finetune_convergence DATA --model t5 --arms flush ftpipe --epochs 2 --output runs
    python -m papers.ftpipe.finetune_convergence DATA --ranks 2 --stages 2 --accumulation 2 --epochs 2 --evaluations 3 \
        --samples 1520 --part validation --arms flush gpipe ftpipe --seeds 3 --learning-rates 1e-3 --output runs
    python -m papers.ftpipe.finetune_convergence --show runs/results.json --picture docs/images/finetune_convergence.png

Unless flags say otherwise, the pipeline has four processes with two stages each, dealt out in turn to the ranks, so the
first stage is seven steps ahead of its backwards. The learning rate is the best one of flush on the validation data.
Then each arm trains with this rate from several seeds, without clipping, and is evaluated on the test data after each
epoch. One launch of the processes does all runs, one after another; the arms of a seed follow each other. Seconds are
those of training: evaluations are not counted, the drains before them are.

The model is the BERT of that folder, or its T5, which answers with a word. Its accuracy is the share of right answers.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean, geometric_mean, median

from rich.table import Table

from benchmarks.common.processes import call
from benchmarks.common.results import parser_of
from benchmarks.common.tables import terminal
from megatron.documents.picture import one_panel

BATCH = 16
MARGIN = 0.005
"""The time to accuracy ends at flush's best accuracy with the same seed, less this."""

MODELS = {
    "bert": (["--task", "sequence-classification"], "eval_accuracy"),
    "t5": (["--task", "text-to-text", "--max_target_length", "2"], "eval_exact_match"),
}
"""Folder of a model in DATA -> its flags, and the metric that is its accuracy."""
ARMS = {
    "flush": ["--pipeline_schedule", "flush", "--no_recompute"],
    "gpipe": ["--pipeline_schedule", "gpipe", "--no_recompute"],
    "ftpipe": ["--pipeline_schedule", "ftpipe"],
    "ftpipe, predicted": ["--pipeline_schedule", "ftpipe", "--weight_prediction"],
    "ftpipe, gap-aware": ["--pipeline_schedule", "ftpipe", "--gap_aware"],
}
"""Those that never use stale weights keep activations, which is faster and computes the same."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, nargs="?", help="the folder that examples/sentiment.py made")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune_convergence"))
    parser.add_argument("--model", choices=MODELS, default="bert", help="of the folder (default: bert)")
    arms = [arm for arm in ARMS if arm != "gpipe"]
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=arms, help="default: all but gpipe, which is flush's"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-4, 1e-3, 2e-3])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", type=int, default=8, help="of all ranks (default: 8)")
    parser.add_argument("--accumulation", type=int, default=1, help=f"microbatches of a batch of {BATCH}")
    parser.add_argument("--evaluations", type=int, default=1, help="in each epoch (default: 1, at its end)")
    parser.add_argument("--part", choices=("test", "validation"), default="test", help="to evaluate on (default: test)")
    parser.add_argument("--samples", type=int, help="of the training data (default: all)")
    parser.add_argument("--show", type=Path, nargs="+", help="results of earlier calls, shown together")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.show is None:
        results = measure(options)
        (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    else:
        results, *others = (json.loads(path.read_text()) for path in options.show)
        for other in others:
            results["accuracy"] |= other["accuracy"]
    show(results)
    if "seconds" in results and "gpipe" in results["accuracy"]:
        show_times(results)
    if options.picture:
        draw(results, options.picture)
    return 0


def measure(options: argparse.Namespace) -> dict:
    """Choose the learning rate, and run all arms. Returns the results: arm -> seed -> test accuracy at each evaluation,
    and the seconds of training until then."""
    options.output.mkdir(parents=True, exist_ok=True)
    tried = [(f"rate {rate:g}", "flush", 0, rate, "validation") for rate in options.learning_rates]
    found = launch(tried, options) if len(tried) > 1 else {tried[0][0]: ([math.nan], [0.0])}
    best = max(options.learning_rates, key=lambda rate: max(found[f"rate {rate:g}"][0]))
    runs = [(f"{arm} {seed}", arm, seed, best, options.part) for seed in range(options.seeds) for arm in options.arms]
    curves = launch(runs, options)
    return {
        "validation": {f"{rate:g}": found[f"rate {rate:g}"][0] for rate in options.learning_rates},
        "learning_rate": best,
        "evaluations": options.evaluations,
    } | {
        name: {arm: [curves[f"{arm} {seed}"][place] for seed in range(options.seeds)] for arm in options.arms}
        for place, name in enumerate(("accuracy", "seconds"))
    }


def launch(runs: list[tuple], options: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    """Run all `runs` in one launch. Returns name of the run -> at each evaluation, accuracy and seconds of training."""
    flags, metric = MODELS[options.model]
    steps = ["--eval_strategy", "steps", "--eval_steps", str(1 / (options.epochs * options.evaluations))]
    commands = {}
    for name, arm, seed, rate, part in runs:
        metrics = options.output / f"{name.replace(' ', '_').replace(',', '')}.jsonl"
        metrics.unlink(missing_ok=True)
        commands[str(metrics)] = [
            "--model_name_or_path", str(options.data / options.model), *flags,
            "--train_file", str(options.data / "train.jsonl"), "--validation_file", str(options.data / f"{part}.jsonl"),
            "--max_seq_length", "32", "--learning_rate", str(rate),
            "--per_device_train_batch_size", str(BATCH // options.accumulation),
            "--gradient_accumulation_steps", str(options.accumulation),
            "--num_train_epochs", str(options.epochs), "--seed", str(seed), "--max_grad_norm", "0",
            "--warmup_ratio", "0.1", "--weight_decay", "0.01", "--do_eval", "--do_train",
            *(steps if options.evaluations > 1 else ["--eval_each_epoch"]),
            "--output_dir", str(options.output / "model"), "--overwrite_output_dir", "--metrics_file", str(metrics),
            "--logging_steps", "200", *ARMS[arm],
            *(["--max_train_samples", str(options.samples)] if options.samples else []),
        ]  # fmt: skip
    listed = options.output / "commands.json"
    listed.write_text(json.dumps({"stages": options.stages, "commands": list(commands.values())}))
    call(options.ranks, "papers.ftpipe.finetune_runs:run_all", listed, check=True)
    found = {}
    for (name, *_), metrics in zip(runs, commands, strict=True):
        accuracy, seconds, trained = [], [], 0.0
        for line in map(json.loads, Path(metrics).read_text().splitlines()):
            trained += line.get("step_time_ms", 0.0) / 1000
            if metric in line:
                accuracy.append(line[metric])
                seconds.append(trained)
        found[name] = accuracy, seconds
    return found


def show(results: dict) -> None:
    """Print the table of the docs."""
    console = terminal(120)
    if len(results["validation"]) > 1:  # a single learning rate was not tried before
        rates = ", ".join(f"{rate}: {max(curve):.4f}" for rate, curve in results["validation"].items())
        console.print(f"flush on the validation data, best epoch by learning rate: {rates}", highlight=False)
    table = Table("", "final accuracy, mean", "least to most", "less than flush, points", "epochs to 99% of flush")
    flush = results["accuracy"]["flush"] if "flush" in results["accuracy"] else next(iter(results["accuracy"].values()))
    target = 0.99 * fmean(curve[-1] for curve in flush)
    for arm, curves in results["accuracy"].items():
        final = [curve[-1] for curve in curves]
        lost = [100 * (one[-1] - other[-1]) for one, other in zip(flush, curves, strict=True)]
        each_epoch = results.get("evaluations", 1)
        needed = [next((i / each_epoch for i, each in enumerate(curve, 1) if each >= target), None) for curve in curves]
        reached = [each for each in needed if each is not None]
        epochs = f"{median(reached):g} ({len(reached)} of {len(curves)})" if reached else "never"
        table.add_row(
            arm, f"{fmean(final):.4f}", f"{min(final):.4f} to {max(final):.4f}", f"{fmean(lost):+.2f}", epochs
        )
    console.print(table)


def show_times(results: dict) -> None:
    """Print the table of times."""
    curves, seconds, speedups = results["accuracy"], results["seconds"], {}
    epochs = len(curves["flush"][0]) / results["evaluations"]
    table = Table(
        "", "s an epoch", f"s to flush's best less {MARGIN:g}", "gpipe's epoch over it", "gpipe's time over it"
    )
    for arm in ("gpipe", *(each for each in curves if each != "gpipe")):
        reached = [
            next((at for at, value in zip(times, curve, strict=True) if value >= max(best) - MARGIN), math.inf)
            for times, curve, best in zip(seconds[arm], curves[arm], curves["flush"], strict=True)
        ]  # fmt: skip
        speedups[arm] = [times[-1] / epochs for times in seconds[arm]], reached
        cells = [
            (f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})", ratios(mine, each))
            for mine, each in zip(speedups["gpipe"], speedups[arm], strict=True)
        ]
        (epoch, over), (target, faster) = cells
        table.add_row(arm, epoch, target, over, faster)
    terminal(120).print(table)


def ratios(ones: list[float], others: list[float]) -> str:
    """Geometric mean of ratios by seed, and the least and the most; how many seeds have one, if not all."""
    found = [one / other for one, other in zip(ones, others, strict=True) if max(one, other) < math.inf]
    few = f", {len(found)} of {len(ones)}" if len(found) < len(ones) else ""
    return f"{geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f}){few}" if found else "never"


def draw(results: dict, path: Path) -> None:
    """Draw the accuracy over epochs, for each seed and as the mean."""
    with one_panel(path, 6, 4) as axes:
        for number, (arm, curves) in enumerate(results["accuracy"].items()):
            epochs = range(1, len(curves[0]) + 1)
            for curve in curves:
                axes.plot(epochs, curve, color=f"C{number}", alpha=0.25, linewidth=1)
            axes.plot(epochs, [fmean(each) for each in zip(*curves, strict=True)], color=f"C{number}", label=arm)
        axes.set_xlabel("epoch")
        axes.set_ylabel("accuracy on the test data")
        axes.set_xticks(epochs)


if __name__ == "__main__":
    sys.exit(main())
