"""The training loop: batches, and between them evaluations and checkpoints, for which the pipeline drains.

Without a drain the report of a batch comes some batches later, on all ranks in the same batch. So a stop request that
only one rank knows of, such as a SIGTERM, travels with a batch's norm, and all ranks act upon it in the same batch.

If ranks are lost, the others go on (`lost_ranks`): they repeat the batch that was in flight, and what is due after a
batch, an evaluation or a checkpoint, if any of them had not done it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.finetuning import checkpoint
from megatron.finetuning.assembly import BuiltPipeline, Summary
from megatron.finetuning.best import Best
from megatron.finetuning.checkpoint import CheckpointOrigin, SavedProgress
from megatron.finetuning.data.batches import Epochs, Evaluated, Microbatches, Rows, Share
from megatron.finetuning.data.preference import LOG_PROBABILITIES, Pairs
from megatron.finetuning.freezing import Freezer
from megatron.finetuning.report import Report
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure.agreement import gathered
from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.survivors import Survivors
from megatron.trainer.ranks import ADMIT, STOP, StopSignal

if TYPE_CHECKING:
    from megatron.finetuning.lost_ranks import LostRanks

EVALUATED_TOGETHER = 32
"""The number of microbatches of a replica that one call of the engine evaluates."""

_KEPT_BATCHES = 64  # many more than are in flight


@dataclass
class Trainer:
    """The loop of one run.

    Attributes:
        origin: the source of everything in a checkpoint that is not a tensor of a stage.
        facts: the fields of `SavedProgress` that stay the same during a run.
        epochs: has the microbatches of each batch, of all replicas, as row numbers; None: nothing is trained.
        num_steps: number of batches of the whole run.
        validation: the rows to evaluate; None if there are no evaluations.
        best: the best evaluation so far; None if no flag asks for it.
        freezer: decides which layers are trained, and changes the pipeline; None if all are.
        summary: as for `build_pipeline`.
        generate: generates from the prompts of an evaluation, and returns further metrics; None: nothing is generated.
        drains: the last 64 batches before which the pipeline was drained.
        owes_evaluation: a stop request left out an evaluation at the checkpoint from which the run resumes.
        saved_step, evaluated_step: number of finished batches at the last checkpoint and at the last evaluation.
        lost_ranks: notices lost ranks and goes on without them; None: a lost rank ends the run.
        iteration: number of batches that have begun.
        survivors: the program of the ranks that are left; None: all ranks are there.
        is_at_best: whether the weights are no longer the newest, since the best checkpoint becomes the model.
    """

    pipeline: BuiltPipeline
    args: argparse.Namespace
    report: Report
    stop: StopSignal
    origin: CheckpointOrigin
    facts: dict[str, object]
    epochs: Epochs | None
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
    lost_ranks: LostRanks | None = None
    iteration: int = 0
    survivors: Survivors | None = None
    is_at_best: bool = False
    _waiting: deque[tuple[int, int, float]] = field(default_factory=deque)  # batch, its first microbatch, seconds
    _stop_requests: int = 0
    _admits: bool = False  # whether to admit new processes of lost ranks after this batch

    def __post_init__(self) -> None:
        self.stand_at(self.iteration)
        self._first = self.iteration
        self._settled = self.iteration - self.owes_evaluation  # the batch after which all that is due is done
        self._num_before: dict[int, int] = {}  # batch -> number of microbatches before it, over all replicas
        self._is_best = False  # whether the evaluation after the last batch is the best
        # Batches behind which all that is due was done -> last checkpoint and best evaluation then.
        self._then: dict[int, tuple[int | None, dict[str, Any] | None]] = {}
        self._settle(self._settled)

    def stand_at(self, iteration: int) -> None:
        """Go on behind so many batches."""
        self.iteration = iteration
        self._ahead: Iterator[Microbatches] = iter(()) if self.epochs is None else self.epochs.batches(iteration)

    def run(self, finish: Callable[[], None]) -> None:
        """Train, and unless a stop request ends the run earlier, call `finish`, which may be called again after a loss.

        Raises ValueError if the loss or the gradient of a batch is not finite.
        """
        while True:
            try:
                if self._train():
                    finish()
                return
            except Exception as error:
                if self.lost_ranks is None or not self.lost_ranks.comes_from_loss(error):
                    raise
                if self.is_at_best:
                    raise OnThisRank(
                        f"{self.lost_ranks.membership.alarm}, while the best checkpoint was made the model; give "
                        "--resume_from_checkpoint"
                    ) from error
            self._go_on_with_others()

    def _train(self) -> bool:
        """Train until the last batch or a stop request. Returns whether the last batch was reached."""
        if self._settled < self.iteration == self._first:
            self._make_up(self.iteration)
            self._settle(self.iteration)
        while self._settled < self.iteration or not self._is_at_end:
            if self._settled == self.iteration:
                self._batch(next(self._ahead))
            if not self._do_what_is_due():
                return False
            self._settle(self.iteration)
            if self._admits and not self._is_at_end:
                self._go_on_with_others(admits=True)
        if self._has_ended:
            without = self.best.without
            self.report.say(f"ends after step {self.iteration}: {without} evaluations without an improvement")
        self._drain()
        if self.args.save_strategy not in ("no", "best") and self.saved_step != self.iteration > self._first:
            self._save(is_best=self._is_best)
        return True

    def _settle(self, iteration: int) -> None:
        """All that is due behind so many batches is done. Other ranks may have to do it again after a loss."""
        self._settled = iteration
        self._then[iteration] = self.saved_step, None if self.best is None else self.best.state()
        self._then.pop(iteration - _KEPT_BATCHES, None)

    @property
    def _is_at_end(self) -> bool:
        return self.iteration >= self.num_steps or self._has_ended

    def _do_what_is_due(self) -> bool:
        """Evaluate, freeze and save, as is due after the last batch. Returns whether the run goes on."""
        args, step = self.args, self.iteration
        self._is_best = False
        saves, evaluates, freezes = self._due(step)
        if not (saves or evaluates or freezes or self._stop_requests or self._admits):
            return True
        self._drain()
        owes = evaluates and bool(self._stop_requests)  # a stop request does not wait for an evaluation
        self._is_best = not owes and self._evaluate_and_freeze(step, evaluates=evaluates, freezes=freezes)
        if saves or self._stop_requests or (self._is_best and args.save_strategy == "best"):
            self._save(is_best=self._is_best, owes_evaluation=owes)
        if self._stop_requests:
            self.report.say(f"exiting on request after step {step}")
        return not self._stop_requests

    def _go_on_with_others(self, *, admits: bool = False) -> None:
        """Go on without lost ranks; with `admits`, after a batch, admit new processes of lost ranks."""
        self._settled, self._stop_requests, reports = self.lost_ranks.go_on(
            self, self._settled, self._stop_requests, admits=admits
        )
        self.saved_step, best = self._then[self._settled]  # all ranks do again what only some have done
        if best is not None:
            self.best.restore(best)
        if self._is_at_end:
            self.evaluated_step = None  # the others may lack an evaluation
        known = {batch: (batch, first, seconds) for batch, first, seconds in self._waiting}
        self._waiting.clear()
        self._waiting.extend(known.get(report.batch, (report.batch, 0, 0.0)) for report in reports)
        self._report(reports)
        self._admits = False  # some ranks may lack the report; new processes ask again with the next batch

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
                self._save(is_best=True)

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
        step = self.iteration
        start = time.perf_counter()
        found = evaluate(self.pipeline, self.validation, size=self.args.per_device_train_batch_size)
        if self.generate is not None:
            found |= self.generate(self.pipeline)
        self.report.evaluation(step, found, time.perf_counter() - start)
        self.evaluated_step = step
        return found

    def _batch(self, microbatches: Microbatches) -> None:
        if self.lost_ranks is not None:
            self._fit(self._size_of(microbatches))
        pipeline, feed = self.pipeline, self.pipeline.feed
        engine = pipeline.engine
        if self.stop.received:
            engine.stop_requests |= STOP
        if self.lost_ranks is not None and self.lost_ranks.membership.newcomers():
            engine.stop_requests |= ADMIT
        batch, first = engine.next_batch, engine.next_microbatch
        self._num_before[batch] = feed.num_microbatches
        self._num_before.pop(batch - _KEPT_BATCHES, None)
        count = feed.add(batch, first, microbatches)
        self.iteration += 1
        start = time.perf_counter()
        reports = engine.run_batch(count, sum(map(len, microbatches)))
        self._waiting.append((batch, first, time.perf_counter() - start))
        self._report(reports)

    def _size_of(self, microbatches: Microbatches) -> int:
        """The number of microbatches that each replica runs of a batch while all ranks are there."""
        return Share(0, self.args.data_parallel_size).num_of(len(microbatches))

    def _fit(self, size: int) -> None:
        """If ranks were lost, fit the program to batches of `size` microbatches of a replica."""
        program = None if self.survivors is None else self.survivors.schedule
        if program is None or program.num_microbatches == size * self.args.data_parallel_size:
            return
        self._drain()
        self.lost_ranks.fit(self, size)

    def size_after(self, iteration: int) -> int:
        """The number of microbatches that each replica runs of the batch behind so many batches."""
        return self._size_of(next(self.epochs.batches(iteration)))

    def stand_after(self, iteration: int) -> None:
        """Drop the batches behind so many, which are in flight and were given up."""
        assert iteration <= self.iteration, "no rank steps with a batch that another has not begun"
        feed = self.pipeline.feed
        feed.abandon(self._num_before[iteration] if iteration < self.iteration else feed.num_microbatches)
        self.stand_at(iteration)

    def state(self) -> dict[str, Any]:
        """The position of the run for a new process of a lost rank, besides weights and optimizers."""
        return {
            "iteration": self.iteration, "num_microbatches": self.pipeline.feed.num_microbatches,
            "best": None if self.best is None else self.best.state(), "saved_step": self.saved_step,
            "first": self._first, "facts": self.facts, "references": [rows.reference for rows in self._pairs],
        }  # fmt: skip

    @property
    def _pairs(self) -> list[Pairs]:
        return [rows for rows in (self.pipeline.feed.training, self.validation) if isinstance(rows, Pairs)]

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state` of a rank that has not been lost."""
        self.pipeline.feed.abandon(state["num_microbatches"])
        self.stand_at(state["iteration"])
        self._first, self.saved_step, self.facts = state["first"], state["saved_step"], state["facts"]
        for rows, reference in zip(self._pairs, state["references"], strict=True):
            rows.reference = reference
        if state["best"] is not None:
            self.best.restore(state["best"])
        self._settle(self.iteration)

    def _drain(self) -> None:
        if self.pipeline.engine.is_drained:
            return
        start = time.perf_counter()
        reports = self.pipeline.engine.drain()
        if self._waiting:
            batch, first, seconds = self._waiting.pop()
            self._waiting.append((batch, first, seconds + time.perf_counter() - start))
        self._report(reports)
        self.drains.append(self.iteration)
        assert not self._waiting, f"batches without a report after a drain: {self._waiting}"

    def _report(self, reports: Sequence[BatchReport]) -> None:
        for report in reports:
            batch, first, seconds = self._waiting.popleft()
            assert batch == report.batch, (batch, report)
            self._stop_requests |= report.stop_requests & STOP
            self._admits |= bool(report.stop_requests & ADMIT)
            self.pipeline.feed.forget(batch, first)
            self.report.batch(report, seconds)
            require = partial(self._require_finite, report)
            require() if self.lost_ranks is None else self.lost_ranks.told(require)

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
        return Path(self.args.output_dir) / f"checkpoint-{self.iteration}"

    def _save(self, *, is_best: bool = False, owes_evaluation: bool = False) -> None:
        """Write `checkpoint-N` and remove the checkpoints that are no longer wanted.

        After the run's first checkpoint, --overwrite_output_dir removes checkpoints with more batches than those with
        which the run began. `is_best`: the newest evaluation is the best. `owes_evaluation`: it is due and left out.
        """
        args, start = self.args, time.perf_counter()
        folder = self._folder()
        output = folder.parent
        if is_best:
            self.best.saved_as(folder.name)
        state = None if self.best is None else self.best.state()
        freezing = None if self.freezer is None else self.freezer.state()
        progress = SavedProgress(
            self.iteration, self.pipeline.feed.num_microbatches, **self.facts, best=state, freezing=freezing,
            owes_evaluation=owes_evaluation,
        )  # fmt: skip
        confirm = {} if self.lost_ranks is None else {"before_commit": self.lost_ranks.confirm}
        checkpoint.save(self.pipeline, folder, self.origin, progress, **confirm)
        if torch.distributed.get_rank() == 0:
            if args.overwrite_output_dir and self.saved_step is None:
                checkpoint.drop_others(output, after=self._first, but=folder)
            checkpoint.prune(output, args.save_total_limit, best=None if self.best is None else self.best.checkpoint)
        self.saved_step = self.iteration
        self.report.say(f"checkpoint-{self.iteration} took {time.perf_counter() - start:.1f} s")


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
    share, numbers = pipeline.feed.share, range(len(microbatches))
    own, at_once = share.of(microbatches), EVALUATED_TOGETHER * share.together
    for first in range(0, len(own), at_once):
        chunk = own[first : first + at_once]
        pipeline.feed.evaluate(rows, chunk, first=first)
        pipeline.engine.evaluate(len(chunk))
    found = gathered(pipeline.results.take())
    losses = {number: loss for of_rank, _ in found for number, loss in of_rank.items()}
    predictions = {}
    for name in {name for _, kept in found for name in kept}:
        parts = {number: part for _, kept in found for number, part in kept.get(name, {}).items()}
        real = [parts[number][: len(microbatches[number])] for number in numbers]
        predictions[name] = torch.cat(real) if rows.lengths is None else rows.joined(real)
    return [losses[number] for number in numbers], predictions


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
