"""The training loop: batches, and between them evaluations and checkpoints, for which the pipeline drains.

Without a drain the report of a batch comes some batches later, on all ranks in the same batch. So a stop request that
only one rank knows of, such as a SIGTERM, travels with a batch's norm, and all ranks act upon it in the same batch.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.finetuning import checkpoint
from megatron.finetuning.assembly import BuiltPipeline, Summary
from megatron.finetuning.best import Best
from megatron.finetuning.checkpoint import CheckpointOrigin, SavedProgress
from megatron.finetuning.data.batches import Evaluated, Rows
from megatron.finetuning.data.preference import LOG_PROBABILITIES, Pairs
from megatron.finetuning.freezing import Freezer
from megatron.finetuning.trackers import Trackers
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure.agreement import gathered
from megatron.trainer.ranks import STOP, StopSignal
from megatron.trainer.report.metrics import MetricsFile

EVALUATED_TOGETHER = 32
"""The number of microbatches that one call of the engine evaluates."""


@dataclass
class Trainer:
    """The loop of one run.

    Attributes:
        origin: the source of everything in a checkpoint that is not a tensor of a stage.
        facts: the fields of `SavedProgress` that stay the same during a run.
        batches: yields the microbatches of each remaining batch, of all replicas, as row numbers.
        num_steps: number of batches of the whole run.
        validation: the rows to evaluate; None if there are no evaluations.
        best: the best evaluation so far; None if no flag asks for it.
        freezer: decides which layers are trained, and changes the pipeline; None if all are.
        summary: as for `build_pipeline`.
        generate: generates from the prompts of an evaluation, and returns further metrics; None: nothing is generated.
        drains: the last 64 batches before which the pipeline was drained.
        owes_evaluation: a stop request left out an evaluation at the checkpoint from which the run resumes.
        saved_step, evaluated_step: number of finished batches at the last checkpoint and at the last evaluation.
    """

    pipeline: BuiltPipeline
    args: argparse.Namespace
    report: Report
    stop: StopSignal
    origin: CheckpointOrigin
    facts: dict[str, object]
    batches: Iterator[Sequence[Sequence[int]]]
    num_steps: int
    validation: Rows | None
    best: Best | None
    freezer: Freezer | None
    summary: Summary
    generate: Callable[[BuiltPipeline], Mapping[str, float]] | None = None
    drains: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    owes_evaluation: bool = False
    saved_step: int | None = None
    evaluated_step: int | None = None
    _waiting: deque[tuple[int, int, float]] = field(default_factory=deque)  # batch, its first microbatch, seconds
    _stop_requests: int = 0

    def train(self) -> bool:
        """Train until the last batch or a stop request. Returns whether the last batch was reached.

        Raises ValueError if the loss or the gradient of a batch is not finite.
        """
        args, step = self.args, self.pipeline.engine.next_batch
        first, is_best = step, False
        if self.owes_evaluation:
            self._make_up(step)
        while step < self.num_steps and not self._has_ended:
            self._batch(next(self.batches))
            step, is_best = self.pipeline.engine.next_batch, False
            saves, evaluates, freezes = self._due(step)
            if not (saves or evaluates or freezes or self._stop_requests):
                continue
            self._drain()
            owes = evaluates and bool(self._stop_requests)  # a stop request does not wait for an evaluation
            is_best = not owes and self._evaluate_and_freeze(step, evaluates=evaluates, freezes=freezes)
            if saves or self._stop_requests or (is_best and args.save_strategy == "best"):
                self._save(first, is_best=is_best, owes_evaluation=owes)
            if self._stop_requests:
                self.report.say(f"exiting on request after step {step}")
                return False
        if self._has_ended:
            self.report.say(f"ends after step {step}: {self.best.without} evaluations without an improvement")
        self._drain()
        if args.save_strategy not in ("no", "best") and self.saved_step != step > first:
            self._save(first, is_best=is_best)
        return True

    @property
    def _has_ended(self) -> bool:
        return self.best is not None and self.best.ends

    def _due(self, step: int) -> tuple[bool, bool, bool]:
        """Whether a checkpoint, an evaluation and the end of an interval of freezing are due after `step` batches."""
        args = self.args
        return (
            bool(args.save_steps) and step % args.save_steps == 0,
            self.validation is not None and bool(args.eval_steps) and step % args.eval_steps == 0,
            self.freezer is not None and self.freezer.due(step),
        )

    def _evaluate_and_freeze(self, step: int, *, evaluates: bool, freezes: bool) -> bool:
        """Do what is due after `step` batches. Returns whether the evaluation is the best. Precondition: a drain."""
        found = self.evaluate() if evaluates else None
        is_best = found is not None and self.best is not None and self.best.judge(found)
        if self.freezer is not None and step < self.num_steps:
            self._freeze(step, found, is_due=freezes)
        return is_best

    def _make_up(self, step: int) -> None:
        """Evaluate and freeze as the run would have before the checkpoint from which it goes on."""
        args = self.args
        saves, evaluates, freezes = self._due(step)
        is_best = self._evaluate_and_freeze(step, evaluates=evaluates, freezes=freezes)
        if is_best and (saves or args.save_strategy == "best"):
            if args.resumed_from.resolve() == self._folder().resolve():
                self.best.saved_as(args.resumed_from.name)
            else:
                self._save(step, is_best=True)

    def _freeze(self, step: int, found: dict[str, float] | None, *, is_due: bool) -> None:
        """Freeze layers at the end of an interval, or train all again if the evaluation `found` has fallen."""
        freezer = self.freezer
        if found is not None and (warning := freezer.judge(step, found)):
            self.report.say(warning)
        before, num_frozen = freezer.num_frozen, freezer.decide(is_due=is_due)
        if num_frozen != before:
            start = time.perf_counter()
            self.pipeline = freezer.change(
                self.pipeline, num_frozen, summary=self.summary, num_steps=max(self.num_steps, 1)
            )
            self.report.frozen(step, num_frozen, freezer.num_layers, before, time.perf_counter() - start)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the validation rows and report their metrics. Precondition: the pipeline is drained."""
        step = self.pipeline.engine.next_batch
        start = time.perf_counter()
        found = evaluate(self.pipeline, self.validation, size=self.args.per_device_train_batch_size)
        if self.generate is not None:
            found |= self.generate(self.pipeline)
        self.report.evaluation(step, found, time.perf_counter() - start)
        self.evaluated_step = step
        return found

    def _batch(self, microbatches: Sequence[Sequence[int]]) -> None:
        engine = self.pipeline.engine
        if self.stop.received:
            engine.stop_requests |= STOP
        count = self.pipeline.feed.add(engine.next_batch, engine.next_microbatch, microbatches)
        batch, first, start = engine.next_batch, engine.next_microbatch, time.perf_counter()
        reports = engine.run_batch(count, sum(map(len, microbatches)))
        self._waiting.append((batch, first, time.perf_counter() - start))
        self._report(reports)

    def _drain(self) -> None:
        start = time.perf_counter()
        reports = self.pipeline.engine.drain()
        if self._waiting:
            batch, first, seconds = self._waiting.pop()
            self._waiting.append((batch, first, seconds + time.perf_counter() - start))
        self._report(reports)
        self.drains.append(self.pipeline.engine.next_batch)
        assert not self._waiting, f"batches without a report after a drain: {self._waiting}"

    def _report(self, reports: Sequence[BatchReport]) -> None:
        for report in reports:
            batch, first, seconds = self._waiting.popleft()
            assert batch == report.batch, (batch, report)
            self._stop_requests |= report.stop_requests
            self.pipeline.feed.forget(batch, first)
            self.report.batch(report, seconds)
            self._require_finite(report)

    def _require_finite(self, report: BatchReport) -> None:
        """Raise ValueError if a batch cannot be stepped, and a smaller loss scale would not help."""
        has_scale = self.args.fp16 and report.loss_scale > self.args.min_loss_scale
        if report.nan or (report.overflow and not has_scale):
            scale = f", loss scale {report.loss_scale:g}" if self.args.fp16 else ""
            raise ValueError(
                f"the loss or the gradient of step {report.batch + 1} is not finite (loss {report.losses.get('loss')}, "
                f"gradient norm {report.grad_norm}{scale}); lower --learning_rate"
                + (", or give --bf16" if self.args.fp16 else "")
            )

    def _folder(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.pipeline.engine.next_batch}"

    def _save(self, first: int, *, is_best: bool = False, owes_evaluation: bool = False) -> None:
        """Write `checkpoint-N` and remove the checkpoints that are no longer wanted.

        After the run's first checkpoint, --overwrite_output_dir removes checkpoints with more batches than `first`, at
        which the run began. `is_best`: the newest evaluation is the best. `owes_evaluation`: it is due and left out.
        """
        engine, args, start = self.pipeline.engine, self.args, time.perf_counter()
        folder = self._folder()
        output = folder.parent
        if is_best:
            self.best.saved_as(folder.name)
        state = None if self.best is None else self.best.state()
        freezing = None if self.freezer is None else self.freezer.state()
        progress = SavedProgress(
            engine.next_batch, self.pipeline.feed.num_microbatches, **self.facts, best=state, freezing=freezing,
            owes_evaluation=owes_evaluation,
        )  # fmt: skip
        checkpoint.save(self.pipeline, folder, self.origin, progress)
        if args.rank == 0:
            if args.overwrite_output_dir and self.saved_step is None:
                checkpoint.drop_others(output, after=first, but=folder)
            checkpoint.prune(output, args.save_total_limit, best=None if self.best is None else self.best.checkpoint)
        self.saved_step = engine.next_batch
        self.report.say(f"checkpoint-{engine.next_batch} took {time.perf_counter() - start:.1f} s")


def evaluate(pipeline: BuiltPipeline, rows: Rows, *, size: int) -> dict[str, float]:
    """Run all rows forward. Returns the mean loss over all terms and the task's metrics, the same on every rank.

    Collective: every rank must call it. Precondition: the pipeline is drained. `size`: rows of a microbatch.
    """
    if len(pipeline.ranks.pipelines) > 1:  # each replica has counted its own microbatches; the first one's are written
        found = gathered(pipeline.statistics() if pipeline.ranks.replica == 0 else None)
        pipeline.load_statistics(found[pipeline.ranks.pipelines[0][pipeline.ranks.rank]])
    microbatches = in_order(rows, size)
    losses, predictions = forward(pipeline, rows, microbatches)
    terms = [rows.num_terms(part) for part in microbatches]
    loss = math.fsum(loss * count for loss, count in zip(losses, terms, strict=True) if count) / max(sum(terms), 1)
    return {"loss": loss, **rows.metrics(predictions, loss)}


def in_order(rows: Rows, size: int) -> list[range]:
    """The row numbers of microbatches of `size` rows, of which the last one may be short."""
    return [range(first, min(first + size, len(rows))) for first in range(0, len(rows), size)]


def forward(
    pipeline: BuiltPipeline, rows: Evaluated, microbatches: Sequence[Sequence[int]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Run rows forward. Returns the loss of each microbatch, and the summaries of the model's outputs by name, a row of
    the tensor for each of `rows`, both the same on every rank.

    Collective: every rank must call it. Precondition: the pipeline is drained. `microbatches`: their row numbers.
    """
    share = pipeline.feed.share
    own = share.of(microbatches)
    for first in range(0, len(own), EVALUATED_TOGETHER):
        chunk = own[first : first + EVALUATED_TOGETHER]
        pipeline.feed.evaluate(rows, chunk)
        pipeline.engine.evaluate(len(chunk))
    found = gathered(pipeline.results.take())
    losses = share.joined([of_rank for of_rank, _ in found if of_rank], len(microbatches))
    predictions = {}
    for name in {name for _, kept in found for name in kept}:
        parts = share.joined([kept[name] for _, kept in found if name in kept], len(microbatches))
        real = [part[: len(indices)] for part, indices in zip(parts, microbatches, strict=True)]
        predictions[name] = torch.cat(real) if rows.lengths is None else rows.joined(real)
    return losses, predictions


def set_references(pipeline: BuiltPipeline, sources: Iterable[Rows | None], *, size: int) -> int:
    """Compute the reference log-probabilities of preference pairs (DPO) with the weights at the start of the run.

    A run that resumes from a checkpoint computes them again before it reads the checkpoint, by the same forwards of the
    same weights. Returns the number of pairs; 0 for another task.

    Collective: every rank must call it, before a step and before a checkpoint is read. `size`: rows of a microbatch.
    """
    found = [rows for rows in sources if isinstance(rows, Pairs)]
    for rows in found:
        _, kept = forward(pipeline, rows, in_order(rows, size))
        rows.reference = kept[LOG_PROBABILITIES]
    return sum(map(len, found))


class Report:
    """The output of a run: log lines, the metrics file and trackers. Only the first rank writes.

    Raises ValueError if the metrics file cannot be written.
    """

    def __init__(self, args: argparse.Namespace, *, num_steps: int, steps_per_epoch: int) -> None:
        self._args, self._num_steps, self._steps_per_epoch = args, num_steps, steps_per_epoch
        self.writes = args.rank == 0
        self._metrics = MetricsFile(args.metrics_file) if self.writes and args.metrics_file else None
        self._trackers = Trackers(args) if self.writes else None
        self._num_skipped = 0
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def say(self, text: str) -> None:
        """Print a line on the first rank."""
        if self.writes:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def batch(self, report: BatchReport, seconds: float) -> None:
        """Report a batch. `seconds`: the time in which the engine ran the batch's part of the program,
        and the drain if one followed."""
        if not self.writes:
            return
        step, loss = report.batch + 1, report.losses["loss"]
        values = {"loss": loss, "grad_norm": report.grad_norm, "learning_rate": report.learning_rate}
        values["epoch"] = step / self._steps_per_epoch
        if self._args.fp16:
            values |= {"loss_scale": report.loss_scale, "skipped": int(report.skipped)}
            self._num_skipped += report.skipped
        if self._metrics is not None:
            self._metrics.write(step=step, **values, step_time_ms=1000 * seconds)
        self._trackers.show("train", values, step)
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

    def close(self) -> None:
        """Write pending values, and close the files."""
        if self._metrics is not None:
            self._metrics.close()
        if self._trackers is not None:
            self._trackers.close()
