"""Fine-tuning through a pipeline beside its peers: the same models, samples, optimizer and losses, on two cores.

    python benchmarks/finetune_peers.py                  # 15 to 30 minutes; a table
    python benchmarks/finetune_peers.py --json result.json

Two models with random weights: the unbalanced T5 of `finetune_speed.py`, and a BERT of 4 equal layers that classifies
long texts. Each arm trains them with SGD on batches of 4 microbatches of 4 samples, without dropout; arms take turns.

ftpipe         `finetune.py` on our best mixed partition; it does not wait, and recomputes activations
gpipe, flush   `finetune.py` on the same partition; they wait, and keep activations, as the peers do
torch GPipe    torch.distributed.pipelining's tracer `pipeline()`, split where the second half of the blocks begins,
torch 1F1B     under its schedules; logits leave the last stage, and `loss_fn` makes the loss, as in its docs
naive          what a naive `device_map` comes to: one device works at a time. A CPU has no two devices, so it is one
               process on one core that computes forward and backward of each microbatch and then steps, by transformers
               alone; no device_map is set, and no transfers are counted, which two devices would have

The tracer runs the BERT as it comes. A T5 needs three things more, which the benchmark does for it: inputs that the
second stage uses have to pass through the first; what crosses has to be made contiguous; and gradients of the shared
embedding, of which the tracer makes a copy for each user, have to be summed. The last row is the T5 without them.

Losses of all batches agree among arms that wait, or the benchmark fails. ftpipe computes the same where it drains after
each batch, which a run with `--save_steps 1` does; that is compared, and of a turn the first batch.

Samples/s are those of the steady state: of a turn without the first and last quarter of its batches.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks import finetune_models
from benchmarks.finetune_speed import RANKS, ROOT, cut

SIZE, MICROBATCHES = 4, 4
TOLERANCE = 1e-5
"""Of losses; see `check`."""

DRAINED = 3
"""Batches of the run of ftpipe that drains after each."""

ARMS = ("ftpipe", "gpipe", "flush", "torch GPipe", "torch 1F1B", "naive")
AS_IT_COMES = "torch GPipe, as it comes"
_OURS = {
    "ftpipe": ["--pipeline_schedule", "ftpipe"],
    "gpipe": ["--pipeline_schedule", "gpipe", "--no_recompute"],
    "flush": ["--pipeline_schedule", "flush", "--no_recompute"],
}
_PEERS = {"torch GPipe": "gpipe", "torch 1F1B": "1f1b", "naive": "naive"}


@dataclass(frozen=True)
class Model:
    """`split`: the block at which torch's second stage begins. `mend`: what its tracer needs beyond that."""

    name: str
    task: tuple[str, ...]
    split: str
    mend: tuple[str, ...]


MODELS = (
    Model("t5", ("--task", "text-to-text", "--max_target_length", "8"), "encoder.block.2",
          ("inputs", "contiguous", "shared")),
    Model("bert", ("--task", "sequence-classification"), "bert.encoder.layer.2", ()),
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """Losses of the batches, and seconds of a batch in the steady state."""

    losses: list[float]
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[each.name for each in MODELS], help="(default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each arm (default: 3)")
    parser.add_argument("--steps", type=int, default=16, help="batches of a turn, a multiple of 4 (default: 16)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text (default: 512)")
    parser.add_argument("--json", metavar="FILE", help="also write what was measured")
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
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(bench: "Bench", repeats: int) -> dict:
    """`seconds` of a batch by arm in each turn, `losses` by arm of the first turn, `as it comes`: how torch's failed,
    or None."""
    bench.prepare()
    turns: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        for arm in ARMS[:: -1 if repeat % 2 else 1]:
            turns[arm].append(bench.run(arm))
            samples = SIZE * MICROBATCHES / turns[arm][-1].seconds
            print(f"{bench.model.name}, turn {repeat + 1}: {arm} {samples:.1f} samples/s", file=sys.stderr, flush=True)
    drained = bench.ours("ftpipe", steps=DRAINED, more=["--save_steps", "1"])
    check({arm: each[0].losses for arm, each in turns.items()}, drained.losses)
    return {
        "seconds": {arm: [turn.seconds for turn in each] for arm, each in turns.items()},
        "losses": {arm: each[0].losses for arm, each in turns.items()} | {"ftpipe, drained": drained.losses},
        "as it comes": bench.failure() if bench.model.mend else None,
    }


def check(losses: dict[str, list[float]], drained: Sequence[float]) -> None:
    """Assert that all compute the same. `drained`: of ftpipe where it drains after each batch, the first so many."""
    waiting = {arm: (each, losses["naive"]) for arm, each in losses.items() if arm != "ftpipe"}
    others = {"ftpipe": (losses["ftpipe"][:1], losses["naive"][:1]), "drained": (drained, losses["naive"][:DRAINED])}
    for arm, (each, expected) in (waiting | others).items():
        assert len(each) == len(expected), f"{arm} has the losses {each}, and naive {expected}"
        apart = max(abs(one - other) for one, other in zip(each, expected, strict=True))
        assert apart < TOLERANCE, f"losses of {arm} are {apart:.1e} from those of naive: {each}, {expected}"


class Bench:
    """One model's arms. `folder`: for all that they write."""

    def __init__(self, model: Model, folder: Path, options: argparse.Namespace) -> None:
        self.model, self._folder, self._options = model, folder, options
        self._data = [
            *model.task, "--train_file", str(folder / "train.jsonl"), "--max_seq_length", str(options.length),
            "--per_device_train_batch_size", str(SIZE),
        ]  # fmt: skip

    def prepare(self) -> None:
        """Write model, samples and partitions."""
        write = {"t5": finetune_models.write_t5, "bert": finetune_models.write_bert}[self.model.name]
        write(self._folder, dropout=0.0, length=self._options.length)
        cut(self._folder / self.model.name, self._data, self._folder)

    def run(self, arm: str) -> Turn:
        """A turn of this arm."""
        return self.ours(arm) if arm in _OURS else self.peer(arm, self.model.mend)

    def ours(self, arm: str, *, steps: int | None = None, more: Sequence[str] = ()) -> Turn:
        """Of `finetune.py`."""
        metrics = self._folder / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        done = self._launch(
            RANKS, "finetune.py", "--partition", str(self._folder / "mixed.json"), "--metrics_file", str(metrics),
            "--overwrite_output_dir", *_OURS[arm], *self._words(steps), *more,
        )  # fmt: skip
        losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
        return Turn(losses, logged_seconds(done.stdout))

    def peer(self, arm: str, mend: Sequence[str]) -> Turn:
        """Of `finetune_peer_ranks.py`."""
        result = self._folder / "result.json"
        self._peer(arm, mend, result)
        found = json.loads(result.read_text())
        return Turn(found["losses"], steady_seconds(found["ends"]))

    def failure(self) -> str:
        """What torch says where nothing is done for it."""
        done = self._peer("torch GPipe", (), self._folder / "none.json", fails=True)
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w+(?:\.\w+)*Error: .+)$", done.stderr, re.MULTILINE)
        return next(each for each in errors if "Connection closed" not in each)

    def _peer(self, arm: str, mend: Sequence[str], result: Path, *, fails: bool = False) -> subprocess.CompletedProcess:
        return self._launch(
            1 if arm == "naive" else RANKS, "benchmarks/finetune_peer_ranks.py", "--peer", _PEERS[arm], "--split",
            self.model.split, "--result", str(result), *(word for each in mend for word in ("--mend", each)),
            *self._words(None), fails=fails,
        )  # fmt: skip

    def _words(self, steps: int | None) -> list[str]:
        return [
            "--model_name_or_path", str(self._folder / self.model.name), *self._data,
            "--gradient_accumulation_steps", str(MICROBATCHES), "--optim", "sgd", "--learning_rate", "1e-2",
            "--lr_scheduler_type", "constant", "--max_grad_norm", "0", "--dataloader_drop_last",
            "--max_steps", str(steps or self._options.steps), "--logging_steps", str(self._options.steps // 4),
            "--output_dir", str(self._folder / "out"),
        ]  # fmt: skip

    def _launch(self, processes: int, script: str, *words: str, fails: bool = False) -> subprocess.CompletedProcess:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        if bool(done.returncode) is not fails:
            sys.stderr.write(done.stderr)
            raise SystemExit(f"{script} {' '.join(words)} {'did not fail' if fails else 'failed'}")
        return done


def logged_seconds(log: str) -> float:
    """Of a batch, by the lines of `finetune.py`'s log but the first and the last."""
    lines = [float(each) / 1000 for each in re.findall(r"^step +\d+/.* \| ([\d.]+) ms$", log, re.MULTILINE)]
    inner = lines[1:-1] or lines
    return sum(inner) / len(inner)


def steady_seconds(ends: Sequence[float]) -> float:
    """Of a batch, by the times when batches ended, without the first and the last quarter of them."""
    quarter = len(ends) // 4
    return (ends[-quarter - 1] - ends[quarter - 1]) / (len(ends) - 2 * quarter)


def show(found: dict) -> None:
    """The table of the docs."""
    console = Console() if sys.stdout.isatty() else Console(width=120, no_color=True)
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
