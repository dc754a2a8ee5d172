"""Megatron's log line, and the sums and peaks of an interval that the line shows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.trainer.report.metrics import CLASS_LOSS, LOSS


@dataclass(frozen=True)
class Progress:
    """The position of the run after a batch, reported together with the batch."""

    iteration: int
    consumed_samples: int
    num_samples: int
    seconds: float


@dataclass
class LogInterval:
    """The sums and peaks since the last log line."""

    losses: dict[str, float] = field(default_factory=dict)
    num_losses: int = 0
    skipped: int = 0
    nan: int = 0
    iterations: int = 0
    seconds: float = 0.0
    tokens: int = 0
    saved_activation_bytes: Sequence[int] = ()  # peaks by pipeline rank, if they are counted
    deferred_bytes: Sequence[int] = ()  # peaks by pipeline rank of tensors kept between I and W

    def add(
        self,
        report: BatchReport,
        progress: Progress,
        seq_length: int,
        saved_activation_bytes: Sequence[int] = (),
        deferred_bytes: Sequence[int] = (),
    ) -> None:
        self.iterations += 1
        self.seconds += progress.seconds
        self.tokens += progress.num_samples * seq_length
        self.skipped += report.skipped
        self.nan += report.nan
        if not report.skipped and all(map(math.isfinite, report.losses.values())):
            for name, loss in report.losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + loss
            self.num_losses += 1
        self.saved_activation_bytes = _larger(self.saved_activation_bytes, saved_activation_bytes)
        self.deferred_bytes = _larger(self.deferred_bytes, deferred_bytes)

    def means(self) -> dict[str, float]:
        """The mean of each loss over the batches with finite losses."""
        return {name: total / self.num_losses for name, total in self.losses.items()} or {LOSS: math.nan}


def _larger(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """The larger of two counts for each rank; an empty list of counts is ignored."""
    return [max(pair) for pair in zip(before or now, now or before, strict=True)]


def main_loss(losses: Mapping[str, float]) -> str:
    """The name of the main training loss."""
    return next((name for name in (LOSS, CLASS_LOSS) if name in losses), LOSS)


def by_pipeline_rank(
    values: Sequence[float], num_pipeline_ranks: int, pipeline_ranks: Sequence[int] | None = None
) -> list[int]:
    """The largest value of each pipeline rank.

    Args:
        values: in the order of the job's ranks.
        pipeline_ranks: the pipeline rank of each value; None: the values are of a whole job, in whose ranks tensor
            ranks vary fastest, then replicas.
    """
    if pipeline_ranks is None:
        width = len(values) // num_pipeline_ranks
        pipeline_ranks = [rank // width for rank in range(len(values))]
    largest = [0] * num_pipeline_ranks
    for rank, value in zip(pipeline_ranks, values, strict=True):
        largest[rank] = max(largest[rank], int(value))
    return largest


def log_line(
    report: BatchReport,
    progress: Progress,
    interval: LogInterval,
    *,
    train_iters: int,
    flops: float | None = None,
    now: float | None = None,
) -> str:
    """Megatron's log line.

    Time and losses are means over the interval, saved activations are peaks by pipeline rank, and all other values are
    the last batch's. `flops`: floating-point operations per token and GPU; None leaves the throughput out.
    """
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    parts = [
        f" [{stamp}] iteration {progress.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {progress.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {1000 * interval.seconds / interval.iterations:.1f}",
        f"learning rate: {report.learning_rate:.6E}",
        f"global batch size: {progress.num_samples:5d}",
        *(f"{name}: {loss:.6E}" for name, loss in interval.means().items()),
        f"loss scale: {report.loss_scale:.1f}",
    ]
    if flops is not None:
        rate = flops * interval.tokens / interval.seconds / 1e12
        parts.insert(3, f"throughput per GPU (TFLOP/s/GPU): {rate:.1f}")
    if report.expert_load_imbalance is not None:
        parts.append(f"expert load imbalance: {report.expert_load_imbalance:.3f}")
    if report.grad_norm is not None:
        parts.append(f"grad norm: {report.grad_norm:.3f}")
    for what, num_bytes in (
        ("saved activations", interval.saved_activation_bytes),
        ("between I and W", interval.deferred_bytes),
    ):
        if num_bytes:
            parts.append(f"{what} (MiB): {' '.join(f'{each / 2**20:.1f}' for each in num_bytes)}")
    parts += [
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan:3d}",
        f"tokens per second: {interval.tokens / interval.seconds:.1f}",
    ]
    return " | ".join(parts) + " |"
