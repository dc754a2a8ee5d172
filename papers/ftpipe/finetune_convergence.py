"""The cost of staleness: a fine-tuned model's accuracy under ftpipe beside flush, on real data.

    python -m papers.ftpipe.finetune_convergence DATA --output runs      # DATA: folder made by examples/sentiment.py
    python -m papers.ftpipe.finetune_convergence DATA --model t5 --arms flush ftpipe --epochs 2 --output runs
    python -m papers.ftpipe.finetune_convergence --show runs/results.json --picture docs/images/finetune_convergence.png

The pipeline has four processes with two stages each, dealt out in turn to the ranks, so the first stage is seven steps
ahead of its backwards. The learning rate is the best one of flush on the validation data. Then each arm trains with
this rate from several seeds, without clipping, and is evaluated on the test data after each epoch. One launch of the
processes does all runs, one after another.

The model is the BERT of that folder, or its T5, which answers with a word. Its accuracy is the share of right answers.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean, median

from rich.table import Table

from benchmarks.common.processes import call
from benchmarks.common.results import parser_of
from benchmarks.common.tables import terminal
from megatron.documents.picture import one_panel

RANKS, STAGES = 4, 8
MODELS = {
    "bert": (["--task", "sequence-classification"], "eval_accuracy"),
    "t5": (["--task", "text-to-text", "--max_target_length", "2"], "eval_exact_match"),
}
"""Folder of a model in DATA -> its flags, and the metric that is its accuracy."""
ARMS = {
    "flush": ["--pipeline_schedule", "flush"],
    "gpipe": ["--pipeline_schedule", "gpipe"],
    "ftpipe": ["--pipeline_schedule", "ftpipe"],
    "ftpipe, predicted": ["--pipeline_schedule", "ftpipe", "--weight_prediction"],
    "ftpipe, gap-aware": ["--pipeline_schedule", "ftpipe", "--gap_aware"],
}


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
    if options.picture:
        draw(results, options.picture)
    return 0


def measure(options: argparse.Namespace) -> dict:
    """Choose the learning rate, and run all arms. Returns the results: arm -> seed -> test accuracy after each
    epoch."""
    options.output.mkdir(parents=True, exist_ok=True)
    tried = [(f"rate {rate:g}", "flush", 0, rate, "validation") for rate in options.learning_rates]
    found = launch(tried, options) if len(tried) > 1 else {tried[0][0]: [math.nan]}
    best = max(options.learning_rates, key=lambda rate: max(found[f"rate {rate:g}"]))
    runs = [(f"{arm} {seed}", arm, seed, best, "test") for seed in range(options.seeds) for arm in options.arms]
    curves = launch(runs, options)
    return {
        "validation": {f"{rate:g}": found[f"rate {rate:g}"] for rate in options.learning_rates},
        "learning_rate": best,
        "accuracy": {arm: [curves[f"{arm} {seed}"] for seed in range(options.seeds)] for arm in options.arms},
    }


def launch(runs: list[tuple], options: argparse.Namespace) -> dict[str, list[float]]:
    """Run all `runs` in one launch. Returns name of the run -> accuracy after each epoch."""
    flags, metric = MODELS[options.model]
    commands = {}
    for name, arm, seed, rate, part in runs:
        metrics = options.output / f"{name.replace(' ', '_').replace(',', '')}.jsonl"
        metrics.unlink(missing_ok=True)
        commands[str(metrics)] = [
            "--model_name_or_path", str(options.data / options.model), *flags,
            "--train_file", str(options.data / "train.jsonl"), "--validation_file", str(options.data / f"{part}.jsonl"),
            "--max_seq_length", "32", "--per_device_train_batch_size", "16", "--learning_rate", str(rate),
            "--num_train_epochs", str(options.epochs), "--seed", str(seed), "--max_grad_norm", "0",
            "--warmup_ratio", "0.1", "--weight_decay", "0.01", "--do_eval", "--do_train", "--eval_each_epoch",
            "--output_dir", str(options.output / "model"), "--overwrite_output_dir", "--metrics_file", str(metrics),
            "--logging_steps", "200", *ARMS[arm],
            *(["--max_train_samples", str(options.samples)] if options.samples else []),
        ]  # fmt: skip
    listed = options.output / "commands.json"
    listed.write_text(json.dumps({"stages": STAGES, "commands": list(commands.values())}))
    call(RANKS, "papers.ftpipe.finetune_runs:run_all", listed, check=True)
    return {
        name: [
            line[metric] for line in map(json.loads, Path(metrics).read_text().splitlines())
            if metric in line
        ]
        for (name, *_), metrics in zip(runs, commands, strict=True)
    }  # fmt: skip


def show(results: dict) -> None:
    """Print the table of the docs."""
    console = terminal(120)
    rates = ", ".join(f"{rate}: {max(curve):.4f}" for rate, curve in results["validation"].items())
    console.print(f"flush on the validation data, best epoch by learning rate: {rates}", highlight=False)
    table = Table("", "final accuracy, mean", "least to most", "less than flush, points", "epochs to 99% of flush")
    flush = results["accuracy"]["flush"] if "flush" in results["accuracy"] else next(iter(results["accuracy"].values()))
    target = 0.99 * fmean(curve[-1] for curve in flush)
    for arm, curves in results["accuracy"].items():
        final = [curve[-1] for curve in curves]
        lost = [100 * (one[-1] - other[-1]) for one, other in zip(flush, curves, strict=True)]
        needed = [next((i + 1 for i, each in enumerate(curve) if each >= target), None) for curve in curves]
        reached = [each for each in needed if each is not None]
        epochs = f"{median(reached):g} ({len(reached)} of {len(curves)})" if reached else "never"
        table.add_row(
            arm, f"{fmean(final):.4f}", f"{min(final):.4f} to {max(final):.4f}", f"{fmean(lost):+.2f}", epochs
        )
    console.print(table)


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
