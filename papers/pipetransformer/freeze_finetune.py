"""The cost and the gain of freezing in `finetune.py`: a ViT and a BERT of transformers, dense, frozen and watched.

    python -m papers.pipetransformer.freeze_finetune vit --output runs              # digits of scikit-learn
    python -m papers.pipetransformer.freeze_finetune bert --reviews ARCHIVE --way 1 0.5 --seeds 3 --output runs
    python -m papers.pipetransformer.freeze_finetune --show runs/vit.json runs/bert.json

As in `freeze_study`, two processes with one thread each train a model that was pretrained once: the ViT on the digits 0
to 4 and by `finetune.py`, too, and the BERT by examples/sentiment.py, which names the archive. The two stages are cut
once, and are not cut anew when layers freeze:

dense     p=2, flush, activations are kept
frozen    also --freeze_training, by the paper's rule
watched   also --freeze_watch_validation: all layers train again when the validation accuracy falls by more than `watch`

The way of freezing is chosen as there, on other seeds and without test data; the frozen arm is the one that is tried.
Then each seed trains all arms, and each model that was written reads the test data once. A seed decides the order of
the samples and dropout, and for the ViT the shares of the data. The columns are those of `freeze_study`, and

than its start     seconds of a run whose batches all take as long as those before the first interval, over the run's;
                   the machine may be slower in one run than in another, and less so within a run. Dense's own says how
                   much less
simulated sooner   `sooner` from the simulator: for each number of frozen layers the model's operators are timed in one
                   process, and the program of the run is simulated with these times

A run that is in the folder of the output is not made again, so a study that was ended goes on.
"""

import json
import math
import shutil
import sys
from abc import abstractmethod
from pathlib import Path
from statistics import fmean

from benchmarks.common.processes import call, environment
from megatron.trainer.report.metrics import read_metrics
from papers.pipetransformer import freeze_study
from papers.pipetransformer.freeze_study import LAYERS, Study, python

RANKS, BATCH = 2, 64

DONE = "done"

COMMON = [
    "--lr_scheduler_type", "cosine", "--warmup_ratio", "0.1", "--max_grad_norm", "1", "--per_device_train_batch_size",
    "16", "--gradient_accumulation_steps", "4", "--pipeline_schedule", "flush", "--no_recompute", "--logging_steps",
    "1000",
]  # fmt: skip


class CapturedStudy(Study):
    """A study of `finetune.py`.

    Attributes:
        watch: the fall of the validation accuracy that ends freezing in the watched arm.
        flags: of the task.
        training_flags: of runs that train.
    """

    arms = ("dense", "frozen", "watched")
    tried_arm = "frozen"
    watch: float
    flags: tuple[str, ...]
    training_flags: tuple[str, ...] = ()

    @abstractmethod
    def files(self, seed: int) -> dict[str, Path]:
        """The data of `train`, `validation` and `test`."""

    def command(self, seed: int, *, test: bool) -> list[str]:
        files = self.files(seed)
        return [
            "--model_name_or_path", str(self.pretrained), *COMMON, *self.flags, *self.training_flags,
            "--train_file", str(files["train"]), "--validation_file", str(files["validation"]),
            "--eval_strategy", "epoch", "--do_train", "--overwrite_output_dir",
        ]  # fmt: skip

    def batches(self, seed: int) -> int:
        return math.ceil(len(self.files(seed)["train"].read_text().splitlines()) / BATCH)

    def plan(self) -> Path:
        """The stages of all runs, and the simulated times beside them, unless they exist."""
        path = self.folder / "plan" / "partition.json"
        if not path.exists():
            flags = ["--freeze_training", "--freeze_interval", "1", "--output_dir", str(self.folder / "plan")]
            launch("freeze_finetune_ranks:plan", self.folder / "plan", [[*self.command(101, test=False), *flags]])
        return path

    def arm(self, name: str, seed: int, way: tuple[int, float], *, test: bool) -> dict:
        start, alpha = way
        folder = self.folder / "runs" / f"{name}-{seed}-{start}-{alpha}-{'test' if test else 'tried'}"
        if not (folder / DONE).exists():
            self.run(folder, name, seed, way, test=test)
        simulated = json.loads(self.plan().with_name("simulated.json").read_text())
        read = read_run(folder / "metrics.jsonl", simulated, start=start * self.batches(seed))
        if test:
            [line] = [line for line in read_metrics(str(folder / "test.jsonl")) if "eval_accuracy" in line]
            read["test"] = line["eval_accuracy"]
        return read

    def run(self, folder: Path, name: str, seed: int, way: tuple[int, float], *, test: bool) -> None:
        """Train an arm in a folder that is made anew, and evaluate it on the test data."""
        partition = self.plan()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags, epoch, (start, alpha) = [], self.batches(seed), way
        if name != "dense":
            flags += ["--freeze_training", "--freeze_alpha", str(alpha), "--freeze_start", str(start * epoch)]
            flags += ["--freeze_interval", str(round(self.epochs_of_interval * epoch))]
        if name == "watched":
            flags += ["--freeze_watch_validation", str(self.watch)]
        model, metrics = folder / "model", [folder / "metrics.jsonl", folder / "test.jsonl"]
        commands = [
            [*self.command(seed, test=test), *flags, "--seed", str(seed), "--num_train_epochs", str(self.epochs),
             "--output_dir", str(model), "--metrics_file", str(metrics[0])]
        ]  # fmt: skip
        if test:
            commands.append(
                ["--model_name_or_path", str(model), *COMMON, *self.flags, "--do_eval", "--validation_file",
                 str(self.files(seed)["test"]), "--metrics_file", str(metrics[1])]
            )  # fmt: skip
        launch("run_all", folder, commands, partition=partition)
        shutil.rmtree(model)
        (folder / DONE).touch()


class VisionStudy(CapturedStudy):
    ways = (10, 0.5), (6, 0.33), (6, 0.5)
    watch = 0.02  # three of the 134 images
    pretraining_epochs = 30
    flags = ("--task", "image-classification", "--learning_rate", "1e-3", "--weight_decay", "0.05")

    def files(self, seed: int) -> dict[str, Path]:
        return digits(self.folder / f"data-{seed}", "5-9", seed)

    def prepare(self) -> None:
        if self.pretrained.exists():
            return
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            hidden_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=256, image_size=8,
            patch_size=2, num_channels=1,
        )  # fmt: skip
        first = self.folder / "first"
        ViTModel(config, add_pooling_layer=False).save_pretrained(first / "begun")
        files = digits(first / "data", "0-4", 0)
        command = [
            "--model_name_or_path", str(first / "begun"), *COMMON, *self.flags, "--train_file", str(files["train"]),
            "--validation_file", str(files["validation"]), "--num_train_epochs",
            str(self.pretraining_epochs), "--output_dir", str(first / "model"), "--overwrite_output_dir",
        ]  # fmt: skip
        launch("run_all", first, [command], stages=RANKS)
        # Without the head and its classes: other digits have another one.
        model = ViTModel.from_pretrained(first / "model", config=config, add_pooling_layer=False)
        model.save_pretrained(self.pretrained)


class TextStudy(CapturedStudy):
    ways = (2, 0.5), (1, 0.33), (1, 0.5)
    watch = 0.01  # 15 of the 1,500 reviews
    num_samples = 3840
    flags = (
        "--task", "sequence-classification", "--max_seq_length", "32", "--learning_rate", "5e-4", "--weight_decay",
        "0.01",
    )  # fmt: skip
    training_flags = ("--max_train_samples", str(num_samples))

    def __init__(self, *options: object, **others: object) -> None:
        super().__init__(*options, **others)
        self.pretrained = self.folder / "data" / "bert"

    def files(self, seed: int) -> dict[str, Path]:
        return {part: self.pretrained.with_name(f"{part}.jsonl") for part in ("train", "validation", "test")}

    def batches(self, seed: int) -> int:
        return math.ceil(self.num_samples / BATCH)

    def prepare(self) -> None:
        if self.options.reviews is None:
            raise ValueError("--reviews is needed: the archive that examples/sentiment.py names")
        if not self.pretrained.exists():
            archive, layers = str(self.options.reviews.resolve()), str(LAYERS)
            python("examples/sentiment.py", archive, "--folder", str(self.pretrained.parent), "--layers", layers)


STUDIES = {
    "vit": lambda options: VisionStudy(options, epochs=24, epochs_of_interval=2),
    "bert": lambda options: TextStudy(options, epochs=4, epochs_of_interval=0.5),
}


def digits(folder: Path, classes: str, seed: int) -> dict[str, Path]:
    """The images of `examples/digits.py` as JSONL."""
    import numpy

    files = {part: folder / f"{part}.jsonl" for part in ("train", "validation", "test")}
    if not files["test"].exists():
        python("examples/digits.py", "--classes", classes, "--folder", str(folder), "--seed", str(seed))
        for part, path in files.items():
            found = numpy.load(folder / f"{part}.npz")
            pairs = zip(found["images"].tolist(), found["labels"].tolist(), strict=True)
            path.write_text("".join(json.dumps({"image": image, "label": label}) + "\n" for image, label in pairs))
    return files


def launch(function: str, folder: Path, commands: list[list[str]], **content: object) -> None:
    """Call a function of `finetune_runs` or `MODULE:FUNCTION` beside this file on two processes, with command lines of
    `finetune.py`. Ends the study with the log if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    listed, log = folder / "commands.json", folder / "log.txt"
    listed.write_text(json.dumps({"commands": commands, **content}, default=str))
    name = f"papers.pipetransformer.{function}" if ":" in function else f"papers.ftpipe.finetune_runs:{function}"
    variables = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    with open(log, "w") as stream:
        ended = call(RANKS, name, listed, env=variables, stdout=stream, stderr=stream)
    if ended.returncode:
        raise SystemExit(f"{log.read_text()[-4000:]}\nthe run failed; {log}")


def read_run(metrics: Path, simulated: list[float], *, start: int) -> dict:
    """Read a metrics file, as `freeze_study.read_run` does.

    `simulated`: number of frozen layers -> seconds of a batch, of which the result has the sum over the run. `start`:
    the number of batches of which the mean time, taken for the whole run, is `as_at_first`.
    """
    batches, expected, frozen, validation, changes = [], 0.0, 0, [], []

    def seconds() -> float:
        return sum(batches) + sum(change[-1] for change in changes)

    for record in read_metrics(str(metrics)):
        if "step_time_ms" in record:
            batches.append(record["step_time_ms"] / 1000)
            expected += simulated[frozen]
        elif "frozen_layers" in record:
            frozen = record["frozen_layers"]
            changes.append([record["step"], frozen, RANKS, 1, record["change_time_ms"] / 1000])
        elif "eval_accuracy" in record:
            validation.append([seconds(), record["eval_accuracy"]])
    return {
        "seconds": seconds(), "validation": validation, "test": None, "changes": changes, "simulated": expected,
        "as_at_first": len(batches) * fmean(batches[:start] or batches),
    }  # fmt: skip


def main() -> int:
    return freeze_study.main(__doc__, STUDIES, name="freeze_finetune", sooner=1.2)


if __name__ == "__main__":
    sys.exit(main())
