"""The log of a run: Megatron's log line, TensorBoard, Weights & Biases, the metrics file. Only the last rank writes."""

from __future__ import annotations

import errno
import importlib.util
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron import backend
from megatron.elastic.stages import Arrangement
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.relay.input_stash import DEVICE_PEAK, HOST_PEAK
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.report.log_line import LogInterval, Progress, by_pipeline_rank, log_line, main_loss
from megatron.trainer.report.membership_change import MembershipChange
from megatron.trainer.report.metrics import DEFERRED, LOSS, SAVED_ACTIVATIONS, ByProduct, MetricsFile, flops_per_sample

if TYPE_CHECKING:
    from megatron.trainer.plan.arrangement import Change, Outlook


_LATEST = 2
"""The number of batches whose records a rank writes again when it takes over the writing."""


class Reporter:
    """The writer of all reports of a run. Only the last rank writes.

    Raises ValueError if the metrics file or TensorBoard's directory cannot be written, except on a full disk.
    """

    def __init__(self, args: TrainConfig, *, writes: bool | None = None) -> None:
        self.args = args
        self.writes = args.rank == args.world_size - 1 if writes is None else writes
        self._latest: deque[tuple[BatchReport, Progress]] = deque(maxlen=_LATEST)
        self.membership_change: MembershipChange | None = None  # the latest one
        self._interval, self._has_begun = LogInterval(), False
        self._peak_memory = 0  # bytes; on CUDA, a relay reads and resets the peak in each batch (RelayLedger)
        self._said = ByProduct("the log", consequence="and more of it is tried")
        self._progress = ByProduct("progress.txt (--log-progress)", consequence="and later lines are tried")
        self._shown = ByProduct(f"--tensorboard-dir {args.tensorboard_dir}", consequence="without it from now on")
        wandb = f"--wandb-project {args.wandb_project}"
        self._published = ByProduct(wandb, consequence="and later values are tried", failures=(Exception,))
        self._metrics = self._board = self._wandb = None
        self._open()
        self._flops_per_token = flops_per_sample(args) / args.seq_length

    def _open(self) -> None:
        args = self.args
        self._metrics = MetricsFile(args.metrics_file) if self.writes and args.metrics_file else None
        missing = packages_not_here(args)
        for line in missing.values():
            self.say(f"warning: {line}")
        if self.writes and args.tensorboard_dir and "tensorboard" not in missing:
            with self._shown.attempt():
                self._board = _tensorboard(args)
        if self.writes and args.wandb_project and "wandb" not in missing:
            with ByProduct(self._published.name, consequence="without it", failures=(Exception,)).attempt():
                self._wandb = _weights_and_biases(args)

    @property
    def _flops(self) -> float | None:
        """The operations per token and GPU, of the GPUs that the run has now; None: the throughput is not logged."""
        shows = self.args.log_throughput and backend.is_cuda()
        return self._flops_per_token / self.args.world_size if shows else None

    def take_over(self) -> None:
        """Write from now on if the writing rank was lost and this is the last rank now.

        The previous writer may have been lost before it wrote the latest batches, so their records are written again,
        and so is the latest change of the ranks if it happened within them.
        """
        if self.writes or self.args.rank != self.args.world_size - 1:
            return
        self.writes = True
        self._open()
        for report, progress in self._latest:
            self._record(report, progress, {})
        change, batches = self.membership_change, [progress.iteration for _, progress in self._latest]
        if change is not None and (not batches or change.iteration >= batches[0] - 1):
            self._record_membership(change)

    def say(self, text: str) -> None:
        """Print a line for the user, once in the job; print nothing for an empty text."""
        if self.writes and text:
            with self._said.attempt():
                sys.stdout.write(text + "\n")
                sys.stdout.flush()

    def progress(self, text: str) -> None:
        """Append a line to progress.txt beside the checkpoints, for `--log-progress`. Called on rank 0."""
        if self.args.log_progress and self.args.rank == 0:
            job = os.environ.get("SLURM_JOB_ID", "")
            path, stamp = os.path.join(self.args.save, "progress.txt"), time.strftime("%Y-%m-%d %H:%M:%S")
            with self._progress.attempt(), open(path, "a", encoding="utf-8") as stream:
                stream.write(f"{stamp}\tJob ID: {job}\t# ranks: {self.args.world_size}\t{text}\n")

    def iteration(self, report: BatchReport, progress: Progress) -> None:
        """Record one batch, and print the log line at the end of an interval."""
        change = self.membership_change
        peaks = {
            name: by_pipeline_rank(
                values, self.args.pipeline_model_parallel_size, None if change is None else change.pipeline_ranks
            )
            for name, values in report.rank_metrics.items()
            if len(values) == self.args.world_size  # other lengths are from a batch before ranks were lost
        }
        counted = (peaks.get(name, ()) for name in (SAVED_ACTIVATIONS, DEFERRED))
        self._latest.append((report, progress))
        self._interval.add(report, progress, self.args.seq_length, *counted)
        if self.writes:
            self._begin(progress)
            self._record(report, progress, peaks)
        if progress.iteration % self.args.log_interval == 0:
            self.say(log_line(report, progress, self._interval, train_iters=self.args.train_iters, flops=self._flops))
            self._interval = LogInterval()

    def _begin(self, progress: Progress) -> None:
        """Before the first batch, record the arrangement in which a run begins or resumes, if it can change."""
        if not self._has_begun and self.args.changes and self._metrics is not None:
            values = _shape(self.args.arrangement)
            self._metrics.write(
                iteration=progress.iteration - 1, initial_samples=progress.consumed_samples - progress.num_samples,
                **{f"initial_{name}": value for name, value in values.items()},
                initial_layers_of_rank=list(self.args.arrangement.layers_of_rank),
            )  # fmt: skip
        self._has_begun = True

    def _record(self, report: BatchReport, progress: Progress, peaks: Mapping[str, list[int]]) -> None:
        seconds = max(progress.seconds, 1e-9)
        own = peaks.get(DEVICE_PEAK, ())[-1:]
        self._peak_memory = max(self._peak_memory, backend.peak_memory_bytes(), *own)
        values = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            **{_key(name): loss for name, loss in report.losses.items()},
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "loss_scale": report.loss_scale,
            "iteration_time_ms": 1000 * progress.seconds,
            "tokens_per_second": progress.num_samples * self.args.seq_length / seconds,
            "peak_memory_bytes": self._peak_memory,
        }
        if report.expert_load_imbalance is not None:
            values["expert_load_imbalance"] = report.expert_load_imbalance
        if self._metrics is not None:
            if report.tokens_per_expert:  # by layer of the model, counted from 1
                layers = enumerate(report.tokens_per_expert, start=1)
                peaks = {**peaks, "tokens_per_expert": {str(layer): [*row] for layer, row in layers if any(row)}}
            self._metrics.write(**values, **peaks, skipped=report.skipped)
        if progress.iteration % self.args.tensorboard_log_interval == 0:
            self._boards(progress, self._board_values({**values, **peaks}, report, progress))

    def _board_values(self, values: dict, report: BatchReport, progress: Progress) -> dict[str, float | None]:
        args = self.args
        named = {**report.losses, "batch-size": progress.num_samples, "grad-norm": report.grad_norm}
        if report.expert_load_imbalance is not None:
            named["expert-load-imbalance"] = report.expert_load_imbalance
        if args.log_learning_rate_to_tensorboard:
            named["learning-rate"] = report.learning_rate
        if args.log_loss_scale_to_tensorboard:
            named["loss-scale"] = report.loss_scale
        if args.log_timers_to_tensorboard:
            named["iteration-time"] = progress.seconds
        if args.log_memory_to_tensorboard:
            named["mem-max-allocated-bytes"] = values["peak_memory_bytes"]
            for name in (SAVED_ACTIVATIONS, DEFERRED, DEVICE_PEAK, HOST_PEAK):
                if name in values:
                    named[f"{name.replace('_', '-')}-max"] = max(values[name])
        if args.log_world_size_to_tensorboard:
            named["world-size"] = args.world_size
        if self._flops is not None:
            named["throughput"] = self._flops * values["tokens_per_second"] / 1e12
        return named

    def _boards(self, progress: Progress, values: dict[str, float | None]) -> None:
        values = {name: value for name, value in values.items() if value is not None}
        by_samples = [(f"{name} vs samples", values[name], progress.consumed_samples)
                      for name in (main_loss(values), "learning-rate", "grad-norm") if name in values]  # fmt: skip
        self._show(values, progress.iteration, by_samples)

    def _show(
        self, values: Mapping[str, float | str], iteration: int, further: Sequence[tuple[str, float, int]] = ()
    ) -> None:
        """Send values to Weights & Biases and TensorBoard, which is closed after a failed write.

        `further`: (name, value, iteration or samples) for TensorBoard alone.
        """
        if self._wandb is not None:
            with self._published.attempt():
                self._wandb.log(values, step=iteration)
        if self._board is None:
            return
        with self._shown.attempt():
            for each in (*((name, value, iteration) for name, value in values.items()), *further):
                (self._board.add_text if isinstance(each[1], str) else self._board.add_scalar)(*each)
        if self._shown.fails:
            self._board = None

    def evaluation(self, name: str, iteration: int, losses: dict[str, float], *, seconds: float) -> None:
        """Record an evaluation with its mean losses by name. `name`: "validation" or "test"."""
        main = main_loss(losses)
        loss = losses[main]
        perplexity = {"ppl": math.exp(min(20.0, loss))} if main == LOSS else {}
        others = {other: value for other, value in losses.items() if other != main}
        line = f" {name} loss at iteration {iteration} | {main} value: {loss:.6E} | "
        line += "".join(f"{main} PPL: {value:.6E} | " for value in perplexity.values())
        line += "".join(f"{other} value: {value:.6E} | " for other, value in others.items())
        self.say("-" * len(line) + f"\n{line}\n" + "-" * len(line))
        if not self.writes:
            return
        if self._metrics is not None:
            named = {f"{name}_{_key(other)}": value for other, value in others.items()}
            self._metrics.write(**{"iteration": iteration, f"{name}_loss": loss,
                                   **{f"{name}_{key}": value for key, value in perplexity.items()}, **named,
                                   "evaluation_time_ms": 1000 * seconds})  # fmt: skip
        shown = perplexity if self.args.log_validation_ppl_to_tensorboard else {}
        further = [(f"{main} {name} {key}", value, iteration) for key, value in shown.items()]
        self._show({f"{each} {name}": value for each, value in losses.items()}, iteration, further)

    def change(self, iteration: int, change: Change, outlook: Outlook | None) -> None:
        """Record a change of the pipeline after `iteration`, with the predicted times of a batch."""
        self._interval.saved_activation_bytes = self._interval.deferred_bytes = ()  # the ranks of a pipeline change
        self.say(f" pipeline changed at iteration {iteration} | {change.describe(outlook)} |")
        if not self.writes:
            return
        after, values = change.after, _shape(change.after)
        took = {
            "change_seconds": change.seconds,
            "change_bytes": change.num_bytes,
            "change_bytes_moved": change.bytes_moved,
        }
        if outlook is not None:
            took |= {"seconds_before": outlook.before, "seconds_predicted": outlook.after}
        if self._metrics is not None:
            self._metrics.write(iteration=iteration, **values, layers_of_rank=list(after.layers_of_rank), **took)
        self._show(_named({**values, **took}), iteration)

    def membership(self, change: MembershipChange) -> None:
        """Record that ranks were lost or have returned."""
        self.membership_change = change
        self.say(change.describe())
        if self.writes:
            self._record_membership(change)

    def _record_membership(self, change: MembershipChange) -> None:
        if self._metrics is not None:
            self._metrics.write(**change.record())
        self._show({**_named(change.numbers()), "membership": change.describe()}, change.iteration)

    def close(self) -> None:
        """Write pending output, and close all writers."""
        if self._metrics is not None:
            self._metrics.close()
        if self._board is not None:
            with self._shown.attempt():
                self._board.close()
        if self._wandb is not None:
            with self._published.attempt():
                self._wandb.finish()


def _shape(arrangement: Arrangement) -> dict[str, int]:
    """The numbers of an arrangement, by name in the metrics file."""
    return {
        "frozen_layers": arrangement.num_frozen,
        "pipeline_ranks": arrangement.pipeline,
        "replicas": arrangement.data,
        "microbatch_samples": arrangement.micro_batch_size,
    }


def _named(values: Mapping[str, float]) -> dict[str, float]:
    """Convert numbers from their names in the metrics file to their names in TensorBoard and Weights & Biases."""
    return {name.replace("_", "-"): float(value) for name, value in values.items()}


def _key(name: str) -> str:
    """The name of a loss in the metrics file."""
    return name.replace(" ", "_")


def packages_not_here(args: TrainConfig) -> dict[str, str]:
    """Package -> a sentence about it, for each package that flags need and that is not installed.

    A run continues without these packages, since the log and --metrics-file have the same values.
    """
    wanted = {
        "tensorboard": args.tensorboard_dir and f"--tensorboard-dir {args.tensorboard_dir}",
        "wandb": args.wandb_project and f"--wandb-project {args.wandb_project}",
    }
    return {
        name: f"{flag} has no effect: the package {name} is not installed here; pip install {name}"
        for name, flag in wanted.items()
        if flag and importlib.util.find_spec(name) is None
    }


def _tensorboard(args: TrainConfig):
    """Open TensorBoard's writer. Raises OSError on a full disk, and ValueError if the directory cannot be written."""
    from torch.utils.tensorboard import SummaryWriter

    try:
        os.makedirs(args.tensorboard_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.tensorboard_dir) as trial:  # the writer's thread raises no error here
            trial.write(bytes(4096))
        return SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"--tensorboard-dir {args.tensorboard_dir} cannot be written: {error.strerror}") from error


def _weights_and_biases(args: TrainConfig):
    import wandb

    folder = args.wandb_save_dir or os.path.join(args.save or ".", "wandb")
    os.makedirs(folder, exist_ok=True)
    config = {name: value for name, value in vars(args).items() if isinstance(value, (int, float, str, bool))}
    wandb.init(dir=folder, name=args.wandb_exp_name, project=args.wandb_project, entity=args.wandb_entity or None,
               config=config)  # fmt: skip
    return wandb


def configure_logging(level: int | None) -> None:
    """Set Python's logging to warnings, or to `--logging-level`."""
    # megatron.core demands 1 with tensor parallelism, but with 1 a job whose reductions overlap computations may hang
    # (pipeline/check/hardware_queues.py); docs/gpu.md says which jobs may set 1.
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    logging.basicConfig(level=logging.WARNING if level is None else level, format="%(name)s: %(message)s")
