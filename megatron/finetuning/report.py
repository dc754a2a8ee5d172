"""The output of a fine-tuning: log lines, the metrics file and trackers."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Mapping

from megatron.finetuning.trackers import Trackers
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.trainer.report.membership_change import MembershipChange
from megatron.trainer.report.metrics import MetricsFile

_TAKEN_OVER = 2
"""The number of batches whose values a rank writes again when it takes over the writing."""


class Report:
    """The output of a run: log lines, the metrics file and trackers. One rank writes, at first the first one.

    Args:
        writes: whether this rank writes.

    Raises ValueError if the metrics file cannot be written.
    """

    def __init__(self, args: argparse.Namespace, *, num_steps: int, steps_per_epoch: int, writes: bool) -> None:
        self._args, self._num_steps, self._steps_per_epoch = args, num_steps, steps_per_epoch
        self._metrics = self._trackers = None
        self.writes = False
        if writes:
            self._open()
        self._latest: deque[tuple[dict[str, float], float]] = deque(maxlen=_TAKEN_OVER)
        self._num_skipped = 0
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def _open(self) -> None:
        self.writes = True
        self._metrics = MetricsFile(self._args.metrics_file) if self._args.metrics_file else None
        self._trackers = Trackers(self._args)

    def take_over(self) -> None:
        """Write from now on, in the place of a lost rank, which may not have written its last lines."""
        self._open()
        for values, seconds in self._latest:
            self._record(values, seconds)

    def say(self, text: str) -> None:
        """Print a line on the rank that writes."""
        if self.writes:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def batch(self, report: BatchReport, seconds: float) -> None:
        """Report a batch. `seconds`: the time in which the engine ran the batch's part of the program,
        and the drain if one followed."""
        step, loss = report.batch + 1, report.losses["loss"]
        values = {"step": step, "loss": loss, "grad_norm": report.grad_norm, "learning_rate": report.learning_rate}
        values["epoch"] = step / self._steps_per_epoch
        if self._args.fp16:
            values |= {"loss_scale": report.loss_scale, "skipped": int(report.skipped)}
            self._num_skipped += report.skipped
        self._latest.append((values, seconds))
        if self.writes:
            self._record(values, seconds)
        self._losses.append(loss)
        self._seconds.append(seconds)
        if step % self._args.logging_steps == 0 or step == self._num_steps:
            milliseconds = 1000 * sum(self._seconds) / len(self._seconds)
            scale = f"loss scale {report.loss_scale:g} | skipped {self._num_skipped} | " if self._args.fp16 else ""
            self.say(
                f"step {step:6d}/{self._num_steps} | epoch {values['epoch']:.2f} | "
                f"loss {sum(self._losses) / len(self._losses):.4f} | learning rate {report.learning_rate:.3e} | "
                f"grad norm {report.grad_norm:.3f} | {scale}{milliseconds:.1f} ms"
            )
            self._losses, self._seconds = [], []

    def _record(self, values: Mapping[str, float], seconds: float) -> None:
        """Write the values of a batch to the metrics file and the trackers."""
        if self._metrics is not None:
            self._metrics.write(**values, step_time_ms=1000 * seconds)
        self._trackers.show("train", {name: each for name, each in values.items() if name != "step"}, values["step"])

    def evaluation(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Report an evaluation after `step` batches."""
        named = {f"eval_{name}": value for name, value in values.items()}
        self.say(f"evaluation after step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in named.items()))
        if self._metrics is not None:
            self._metrics.write(step=step, **named, eval_time_ms=1000 * seconds)
        if self._trackers is not None:
            self._trackers.show("eval", values, step)

    def frozen(self, step: int, num_frozen: int, num_layers: int, before: int, seconds: float) -> None:
        """Report that another number of layers is frozen after `step` batches."""
        now = f"{num_frozen} of {num_layers} (before {before})"
        self.say(f"frozen layers after step {step}: {now}, change took {seconds:.2f} s")
        if self._metrics is not None:
            self._metrics.write(step=step, frozen_layers=num_frozen, change_time_ms=1000 * seconds)

    def membership(self, change: MembershipChange) -> None:
        """Report a change of the ranks with which the run goes on."""
        self.say(change.describe())
        if self._metrics is not None:
            self._metrics.write(**change.record())

    def close(self) -> None:
        """Write pending values, and close the files."""
        if self._metrics is not None:
            self._metrics.close()
        if self._trackers is not None:
            self._trackers.close()
