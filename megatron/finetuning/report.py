"""What a run of `finetune.py` says: log lines, the metrics file, TensorBoard. Rank 0 writes all of it."""

from __future__ import annotations

import argparse
import importlib.util
import sys

import torch

from megatron import backend
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.trainer.report.by_products import ByProduct
from megatron.trainer.report.metrics import MetricsFile


class Report:
    """Raises ValueError where the metrics file cannot be written."""

    def __init__(self, args: argparse.Namespace, *, num_steps: int, steps_per_epoch: int) -> None:
        self._args, self._num_steps, self._steps_per_epoch = args, num_steps, steps_per_epoch
        self.writes = args.rank == 0
        self._metrics = MetricsFile(args.metrics_file) if self.writes and args.metrics_file else None
        self._shown = ByProduct(f"--logging_dir {args.logging_dir}", consequence="without it from now on")
        self._board = None
        if self.writes and args.logging_dir:
            if importlib.util.find_spec("tensorboard") is None:
                self.say("warning: --logging_dir has no effect: the package tensorboard is not installed; "
                         "pip install tensorboard")  # fmt: skip
            else:
                from torch.utils.tensorboard import SummaryWriter

                with self._shown.attempt():
                    self._board = SummaryWriter(log_dir=args.logging_dir)
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def say(self, text: str) -> None:
        """A line for the user, once in the job."""
        if self.writes:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def batch(self, report: BatchReport, seconds: float) -> None:
        """One batch, of which the report has come. `seconds`: of its segment."""
        if not self.writes:
            return
        step, loss = report.batch + 1, report.losses["loss"]
        values = {
            "loss": loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "epoch": step / self._steps_per_epoch,
        }
        if self._metrics is not None:
            self._metrics.write(step=step, **values, step_time_ms=1000 * seconds)
        self._show("train", values, step)
        self._losses.append(loss)
        self._seconds.append(seconds)
        if step % self._args.logging_steps == 0 or step == self._num_steps:
            each = 1000 * sum(self._seconds) / len(self._seconds)
            self.say(
                f"step {step:6d}/{self._num_steps} | epoch {values['epoch']:.2f} | "
                f"loss {sum(self._losses) / len(self._losses):.4f} | learning rate {report.learning_rate:.3e} | "
                f"grad norm {report.grad_norm:.3f} | {each:.1f} ms"
            )
            self._losses, self._seconds = [], []

    def evaluation(self, step: int, values: dict[str, float], seconds: float) -> None:
        """One evaluation, after so many batches."""
        named = {f"eval_{name}": value for name, value in values.items()}
        self.say(f"evaluation after step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in named.items()))
        if self._metrics is not None:
            self._metrics.write(step=step, **named, eval_time_ms=1000 * seconds)
        self._show("eval", values, step)

    def _show(self, prefix: str, values: dict[str, float | None], step: int) -> None:
        if self._board is None:
            return
        with self._shown.attempt():
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(f"{prefix}/{name}", value, step)
        if self._shown.fails:
            self._board = None

    def close(self) -> None:
        """Write out what is pending."""
        if self._metrics is not None:
            self._metrics.close()
        if self._board is not None:
            with self._shown.attempt():
                self._board.close()


def peak_memory() -> list[int]:
    """Each rank's peak in bytes; see `backend.peak_memory_bytes`. Collective."""
    found: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, backend.peak_memory_bytes())
    return found
