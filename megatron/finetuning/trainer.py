"""The loop of a run: batches through the engine, and evaluations and checkpoints between, where the pipeline drains.

A batch's report comes late where nothing drains, on all ranks alike. So whatever one rank alone knows (SIGTERM) travels
with a batch's norm and is acted upon by all in the same batch.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.finetuning import checkpoint
from megatron.finetuning.assembly import BuiltPipeline
from megatron.finetuning.checkpoint import CheckpointOrigin, SavedProgress
from megatron.finetuning.data.rows import Rows
from megatron.finetuning.evaluation import evaluate
from megatron.finetuning.report import Report
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.trainer.ranks import StopSignal

STOP = 1
"""Stop request: save and end the run."""


class Trainer:
    """Drives one run.

    Args:
        batches: yields the microbatches of each batch to come, as indices of samples.
        num_steps: batches of the whole run.
        validation: what is evaluated, or None.
        save: writes a checkpoint of where the run stands.
    """

    def __init__(
        self,
        pipeline: BuiltPipeline,
        args: argparse.Namespace,
        report: Report,
        stop: StopSignal,
        *,
        batches: Iterator[Sequence[Sequence[int]]],
        num_steps: int,
        validation: Rows | None,
        save: Callable[[int, int], None],
    ) -> None:
        self.pipeline, self.args, self.report, self.stop = pipeline, args, report, stop
        self._batches, self._num_steps, self._validation, self._save = batches, num_steps, validation, save
        self._waiting: deque[tuple[int, int, float]] = deque()  # batch, its first microbatch, seconds of its segment
        self._stop_requests = 0
        self.drains: deque[int] = deque(maxlen=64)
        self.saved_step: int | None = None
        self.evaluated_step: int | None = None

    def train(self) -> bool:
        """Train to the end (True), or until a stop request ends the run (False)."""
        engine, args = self.pipeline.engine, self.args
        first = engine.next_batch
        while engine.next_batch < self._num_steps:
            self._batch(next(self._batches))
            step = engine.next_batch
            saves = args.save_steps and step % args.save_steps == 0
            evaluates = self._validation is not None and args.eval_steps and step % args.eval_steps == 0
            if not (saves or evaluates or self._stop_requests):
                continue
            self._drain()
            if evaluates and not self._stop_requests:
                self.evaluate()
            if saves or self._stop_requests:
                self._save_here()
            if self._stop_requests:
                self.report.say(f"exiting on request after step {step}")
                return False
        self._drain()
        if args.save_strategy != "no" and self.saved_step != engine.next_batch > first:
            self._save_here()
        return True

    def evaluate(self) -> dict[str, float]:
        """The metrics of the validation data. The pipeline has to be drained."""
        step = self.pipeline.engine.next_batch
        start = time.perf_counter()
        found = evaluate(self.pipeline, self._validation, size=self.args.per_device_train_batch_size)
        self.report.evaluation(step, found, time.perf_counter() - start)
        self.evaluated_step = step
        return found

    def _batch(self, microbatches: Sequence[Sequence[int]]) -> None:
        engine = self.pipeline.engine
        if self.stop.received:
            engine.stop_requests |= STOP
        self.pipeline.feed.add(engine.next_batch, engine.next_microbatch, microbatches)
        batch, first, start = engine.next_batch, engine.next_microbatch, time.perf_counter()
        reports = engine.run_batch(len(microbatches), sum(map(len, microbatches)))
        self._waiting.append((batch, first, time.perf_counter() - start))
        self._report(reports)

    def _drain(self) -> None:
        self._report(self.pipeline.engine.drain())
        self.drains.append(self.pipeline.engine.next_batch)
        assert not self._waiting, f"batches without a report after a drain: {self._waiting}"

    def _report(self, reports: Sequence[BatchReport]) -> None:
        for report in reports:
            batch, first, seconds = self._waiting.popleft()
            assert batch == report.batch, (batch, report)
            self._stop_requests |= report.stop_requests
            self.pipeline.feed.forget(batch, first)
            self.report.batch(report, seconds)
            if report.nan:
                raise ValueError(
                    f"the loss or the gradient of step {batch + 1} is not finite (loss {report.losses.get('loss')}, "
                    f"gradient norm {report.grad_norm}); lower --learning_rate"
                )

    def _save_here(self) -> None:
        engine, start = self.pipeline.engine, time.perf_counter()
        self._save(engine.next_batch, engine.next_microbatch)
        self.saved_step = engine.next_batch
        self.report.say(f"checkpoint-{engine.next_batch} took {time.perf_counter() - start:.1f} s")


def checkpoint_saver(
    pipeline: BuiltPipeline, args: argparse.Namespace, origin: CheckpointOrigin, facts: dict
) -> Callable[[int, int], None]:
    """What writes `checkpoint-N` into --output_dir. `facts`: of every `SavedProgress`.

    Once the first is there, those go that --overwrite_output_dir gives up.
    """
    output, begun, is_first = Path(args.output_dir or "."), pipeline.engine.next_batch, True

    def save(batches: int, microbatches: int) -> None:
        nonlocal is_first
        folder = output / f"checkpoint-{batches}"
        checkpoint.save(pipeline, folder, origin, SavedProgress(batches, microbatches, **facts))
        if args.rank == 0:
            if args.overwrite_output_dir and is_first:
                checkpoint.drop_others(output, after=begun, but=folder)
            checkpoint.prune(output, args.save_total_limit)
        is_first = False

    return save
