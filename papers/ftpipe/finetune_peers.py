"""Samples/s of fine-tuning by this project's pipelines and by peers, with equal models, data and losses, on two cores.

    python -m papers.ftpipe.finetune_peers                  # about 10 minutes; a table
    python -m papers.ftpipe.finetune_peers --json result.json

There are two models with random weights: the unbalanced T5 of `finetune_speed.py`, and a BERT of 4 equal layers that
classifies long texts. Each arm trains them with SGD on batches of 4 microbatches of 4 samples, without dropout; arms
take turns in the same two processes.

ftpipe         `finetune.py` on the best mixed partition; it does not wait, and recomputes activations
gpipe, flush   `finetune.py` on the best sequential partition; they wait, and keep activations, as the peers do
torch GPipe    torch.distributed.pipelining's tracer `pipeline()`, split where the second half of the blocks begins,
torch 1F1B     under its schedules; the last stage outputs logits, and `loss_fn` computes the loss, as in its docs
naive          the equivalent of a naive `device_map`, with which one device works at a time. A CPU has no two devices,
               so one process on one core computes forward and backward of each microbatch and then steps, by
               transformers alone; no device_map is set, and the transfers between two devices are not counted

The tracer runs the BERT without changes. A T5 needs three repairs, which the benchmark makes: inputs that the second
stage uses have to pass through the first stage; sent tensors have to be made contiguous; and gradients of the shared
embedding, of which the tracer makes a copy for each user, have to be summed. The last row is the T5 without repairs.

The losses of all batches must agree among the arms that wait, or the benchmark fails. ftpipe computes the same losses
if it drains after each batch, as a run with `--save_steps 1` does. So the losses of such a run are compared, and those
of the first batch of each turn of ftpipe.

Samples/s are those of the steady state: a turn without the first and last quarter of its batches, by rank 0's clock.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.common.processes import ROOT, call, environment
from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from papers.ftpipe import finetune_models
from papers.ftpipe.finetune_speed import RANKS, cut

SIZE, MICROBATCHES = 4, 4
TOLERANCE = 1e-5
"""The largest allowed difference of losses (`check`)."""

_BATCHES = ("--gradient_accumulation_steps", str(MICROBATCHES), "--optim", "sgd")

DRAINED = 3
"""The number of batches in the run of ftpipe that drains after each batch."""

ARMS = ("ftpipe", "gpipe", "flush", "torch GPipe", "torch 1F1B", "naive")
AS_IT_COMES = "torch GPipe, as it comes"
_OURS = {
    "ftpipe": ("mixed", "--pipeline_schedule", "ftpipe"),
    "gpipe": ("sequential", "--pipeline_schedule", "gpipe", "--no_recompute"),
    "flush": ("sequential", "--pipeline_schedule", "flush", "--no_recompute"),
}
"""Arm -> its partition, and its flags."""
_SCHEDULES = {"torch GPipe": "gpipe", "torch 1F1B": "1f1b"}


@dataclass(frozen=True)
class Model:
    """A model to fine-tune.

    Attributes:
        task: flags of `finetune.py` for its task.
        split: the block at which torch's second stage begins.
        mend: the repairs that torch's tracer needs.
    """

    name: str
    task: tuple[str, ...]
    split: str
    mend: tuple[str, ...]


MODELS = (
    Model("t5", ("--task", "text-to-text", "--max_target_length", str(finetune_models.TARGET)), "decoder.block.0",
          ("inputs", "contiguous", "shared")),
    Model("bert", ("--task", "sequence-classification"), "bert.encoder.layer.2", ()),
)  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, json="also write what was measured")
    parser.add_argument("--models", nargs="+", choices=[each.name for each in MODELS], help="(default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each arm (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="batches of a turn, a multiple of 4 (default: 8)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text (default: 256)")
    options = parser.parse_args()
    if options.steps < 8 or options.steps % 4:
        parser.error(f"--steps {options.steps} has no quarters of 2 batches or more; give a multiple of 4 from 8 on")
    found = {}
    for model in MODELS:
        if options.models and model.name not in options.models:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[model.name] = measure(Bench(model, Path(folder), options), options.repeats)
    show(found)
    write(options.json, found)
    return 0


def measure(bench: "Bench", repeats: int) -> dict:
    """Run all turns of a model.

    Returns `seconds`: arm -> seconds of a batch in each turn; `losses`: arm -> losses of the first turn; `as it comes`:
    torch's error without repairs, or None if the model needs no repairs.
    """
    bench.prepare()
    turns = [bench.turn(arm) for repeat in range(repeats) for arm in ARMS[:: -1 if repeat % 2 else 1]]
    *done, drained = bench.run([*turns, bench.drained()])
    by_arm = {arm: [each for each in done if each["arm"] == arm] for arm in ARMS}
    losses = {arm: each[0]["losses"] for arm, each in by_arm.items()}
    check(losses, drained["losses"])
    return {
        "seconds": {arm: [each["seconds"] for each in turns] for arm, turns in by_arm.items()},
        "losses": losses | {"ftpipe, drained": drained["losses"]},
        "as it comes": bench.failure() if bench.model.mend else None,
    }


def check(losses: dict[str, list[float]], drained: Sequence[float]) -> None:
    """Assert that all arms compute the same losses. `drained`: the losses of ftpipe if it drains after each batch."""
    waiting = {arm: (each, losses["naive"]) for arm, each in losses.items() if arm != "ftpipe"}
    others = {"ftpipe": (losses["ftpipe"][:1], losses["naive"][:1]), "drained": (drained, losses["naive"][:DRAINED])}
    for arm, (each, expected) in (waiting | others).items():
        assert len(each) == len(expected), f"{arm} has the losses {each}, and naive {expected}"
        apart = max(abs(one - other) for one, other in zip(each, expected, strict=True))
        assert apart < TOLERANCE, f"losses of {arm} are {apart:.1e} from those of naive: {each}, {expected}"


class Bench:
    """The arms of one model. `folder`: the folder for all files that they write."""

    def __init__(self, model: Model, folder: Path, options: argparse.Namespace) -> None:
        self.model, self._folder, self._options = model, folder, options
        self._data = [
            *model.task, "--train_file", str(folder / "train.jsonl"), "--max_seq_length", str(options.length),
            "--per_device_train_batch_size", str(SIZE),
        ]  # fmt: skip

    def prepare(self) -> None:
        """Write model, samples and partitions."""
        write = {"t5": finetune_models.write_t5, "bert": finetune_models.write_bert}[self.model.name]
        write(self._folder, length=self._options.length)
        cut(self._folder / self.model.name, [*self._data, *_BATCHES], self._folder)

    def turn(self, arm: str, mend: Sequence[str] | None = None) -> dict:
        """The turn of an arm for `finetune_peer_runs.py`. `mend`: the repairs; None: all that the model needs."""
        if arm in _OURS:
            partition, *argv = _OURS[arm]
            own = ["--partition", str(self._folder / f"{partition}.json"), *argv]
            own += ["--metrics_file", str(self._folder / "metrics.jsonl")]
            return {"arm": arm, "argv": [*self._argv(self._options.steps), *own]}
        turn = {"arm": arm, "argv": self._argv(self._options.steps)}
        if arm in _SCHEDULES:
            needed = self.model.mend if mend is None else mend
            turn |= {"schedule": _SCHEDULES[arm], "split": self.model.split, "mend": list(needed)}
        return turn

    def drained(self) -> dict:
        """The turn of ftpipe that drains after each batch."""
        turn = self.turn("ftpipe")
        return turn | {"argv": [*turn["argv"], "--max_steps", str(DRAINED), "--save_steps", "1"]}

    def run(self, turns: Sequence[dict]) -> list[dict]:
        """Run turns in one launch. Returns `arm`, `losses` and `seconds` of each turn."""
        done = self._launch(turns, stderr=None)
        if done.returncode:
            raise SystemExit("an arm failed; what it says stands above")
        return json.loads((self._folder / "result.json").read_text())

    def failure(self) -> str:
        """The error of torch's tracer without repairs."""
        done = self._launch([self.turn("torch GPipe", mend=())], stderr=subprocess.PIPE)
        assert done.returncode, "torch runs this model as it comes: its row would be no failure"
        errors = re.findall(r"\b(\w+Error: \S.*)$", done.stderr, re.MULTILINE)
        assert errors, f"torch failed without an error: {done.stderr}"
        return next((each for each in errors if "Connection closed" not in each), errors[0])

    def _argv(self, steps: int) -> list[str]:
        return [
            "--model_name_or_path", str(self._folder / self.model.name), *self._data,
            *_BATCHES, "--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--max_grad_norm", "0",
            "--dataloader_drop_last", "--max_steps", str(steps), "--logging_steps", str(steps // 4),
            "--output_dir", str(self._folder / "out"), "--overwrite_output_dir",
        ]  # fmt: skip

    def _launch(self, turns: Sequence[dict], *, stderr: int | None) -> subprocess.CompletedProcess:
        listed = self._folder / "turns.json"
        listed.write_text(json.dumps(turns))
        return call(
            RANKS, "papers.ftpipe.finetune_peer_runs:run_all", listed, self._folder / "result.json", cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1"), stderr=stderr, text=True,
        )  # fmt: skip


def show(found: dict) -> None:
    """Print the table of the docs."""
    console = terminal(120)
    columns = [word for name in found for word in (f"{name}, samples/s", "least to most", "ftpipe over it")]
    table = Table("", *columns)
    for arm in ARMS:
        cells = []
        for each in found.values():
            seconds = each["seconds"][arm]
            speeds = [SIZE * MICROBATCHES / one for one in seconds]
            ratio = median(one / other for one, other in zip(seconds, each["seconds"]["ftpipe"], strict=True))
            cells += [f"{median(speeds):.1f}", f"{min(speeds):.1f} to {max(speeds):.1f}", f"{ratio:.2f}"]
        table.add_row(arm, *cells)
    failures = [each["as it comes"] for each in found.values()]
    table.add_row(AS_IT_COMES, *(word for each in failures for word in (each or "as above", "", "")))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
