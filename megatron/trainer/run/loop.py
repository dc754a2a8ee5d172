"""The training loop: it sends batches through the engine, writes reports, and evaluates and saves in between.

Without flushes the report of a batch comes some batches late (`Schedule.report_lag`), equally late on all ranks. No
rank decides alone: decisions by the iteration number are the same everywhere, and a stop request (SIGTERM, or the time
is up) travels with a batch's norm reduction, is read by all ranks in the same report, and ends the run after a drain.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron import backend
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.changes.change import change_arrangement
from megatron.trainer.checkpoint.checkpoint import save_checkpoint
from megatron.trainer.data.microbatches import MicrobatchIterator
from megatron.trainer.plan.arrangement import iterations_to_the_end
from megatron.trainer.ranks import ADMIT, STOP, StopSignal
from megatron.trainer.report.log_line import Progress, main_loss
from megatron.trainer.report.profiler import Profiler
from megatron.trainer.run.evaluation import evaluate, full_batch
from megatron.trainer.run.timeline import draw_last_batches
from megatron.trainer.start_up.run import Run

if TYPE_CHECKING:
    from megatron.trainer.run.lost_ranks import LostRanks


class TrainingError(ValueError):
    """An error with which training cannot continue and that the user can fix; raised on every rank."""


class Loop:
    """The loop that drives one run to its end.

    Args:
        run: the run that `assembly.assemble` has built.
        stop: notes SIGTERM as a stop request.
        started: `time.time()` at the program's start, for `--exit-duration-in-mins`.
        lost_ranks: notices lost ranks and continues without them; None: a lost rank ends the run.
    """

    def __init__(self, run: Run, stop: StopSignal, *, started: float, lost_ranks: LostRanks | None = None) -> None:
        self.run, self.stop, self.started, self.lost_ranks = run, stop, started, lost_ranks
        self._began = time.perf_counter()  # start of the last batch
        self._settled = run.iteration  # the iteration after which all work between batches is done
        self._valid_before = (run.iteration, run.consumed_valid_samples)  # before the work between batches
        self._waiting: deque[Progress] = deque()  # batches without a report yet
        self._stop_requests = 0  # of all ranks, from the reports
        self._admits = False  # whether to admit new processes of lost ranks after this batch, from the reports
        self._drains: deque[int] = deque(maxlen=64)  # batches before which the pipeline was drained
        self._iterators: list[MicrobatchIterator] = []
        self._validation: list[MicrobatchIterator] = []
        self.validated_iteration: int | None = None
        self._making = None
        if run.args.made_program is not None and run.args.made_program.measures and not run.args.skip_train:
            from megatron.trainer.changes.program_making import ProgramInMaking  # imports the planner

            self._making = ProgramInMaking(run.args, first=run.iteration)

    @property
    def args(self) -> TrainConfig:
        return self.run.args

    def train(self) -> bool:
        """Train until the last iteration; return whether it was reached.

        A stop request, `--exit-interval` or `--exit-duration-in-mins` may end training earlier.
        """
        run, args = self.run, self.args
        if run.iteration >= args.train_iters:
            return True
        if self._wants_to_change():  # the run was saved after the decision and before the change
            self._change_arrangement()
        else:
            self._feed()
        profiler = Profiler(args)
        self.stop.on_receipt = self._pass_on_stop_request
        if args.manual_gc:
            gc.disable()
            gc.collect()
        try:
            while run.iteration < self.args.train_iters or self._is_due():
                try:
                    if self._goes_on(profiler):
                        continue
                    return False
                except Exception as error:
                    if self.lost_ranks is None or not self.lost_ranks.comes_from_loss(error):
                        raise
                self._go_on_with_others()
        finally:
            self.stop.on_receipt = None
            profiler.close()
            if args.manual_gc:
                gc.enable()
        return True

    def _goes_on(self, profiler: Profiler) -> bool:
        """Run a batch and the work that is due after it. If work is left from before a loss, do only this work.

        Returns False if the run ends here.
        """
        run = self.run
        if not self._is_due():
            if self._fit(self._next_size()) and run.begun and run.begun[-1] != self._next_samples():
                survivors = run.survivors
                run.reporter.say(
                    f"batches have {survivors.schedule.num_microbatches} microbatches from iteration "
                    f"{run.iteration + 1} on: one takes {survivors.slowdown:.2f} times as long as with all ranks, as "
                    f"simulated; program {survivors.schedule.short_hash}"
                )
            profiler.before(run.iteration)
            self._batch()
            self._collect_garbage()
            profiler.after(run.iteration)
        if self._ends_stretch():
            self._valid_before = (run.iteration, run.consumed_valid_samples)
            ends, is_last = self._between_stretches(), run.iteration >= self.args.train_iters
            if not ends and is_last and self._is_to_save():
                self.save()
            if self.lost_ranks is not None and (ends or is_last or self._admits):
                self._finish_writing()  # while a loss can still be dealt with, and before all groups are formed anew
            if ends:
                return False
        self._settled = run.iteration
        if self._admits and run.iteration < self.args.train_iters:
            self._go_on_with_others(admits=True)
        return True

    def _is_to_save(self) -> bool:
        return self.args.save is not None and self.run.saved_iteration != self.run.iteration

    def _is_due(self) -> bool:
        """Whether work after the last batch is still due, because a rank was lost during it."""
        return self.run.iteration > self._settled and self._ends_stretch()

    def _go_on_with_others(self, *, admits: bool = False) -> None:
        """Continue without lost ranks; with `admits`, between two batches, admit new processes of lost ranks."""
        run = self.run
        self.close_data()
        self._settled, self._stop_requests, reports = self.lost_ranks.go_on(
            run, self._settled, self._stop_requests, admits=admits
        )
        if self._valid_before[0] == run.iteration > self._settled:
            run.consumed_valid_samples = self._valid_before[1]
        if run.saved_iteration == run.iteration > self._settled:
            run.saved_iteration = None  # the other ranks may not know that it was saved
        self._drains.append(run.iteration)  # the pipeline starts empty
        known = {progress.iteration: progress for progress in self._waiting}
        self._waiting.clear()
        consumed = run.consumed_samples - sum(report.num_samples for report in reports)
        for report in reports:
            number, size = report.batch + 1, report.num_samples
            consumed += size
            seconds = time.perf_counter() - self._began
            self._waiting.append(known.get(number) or Progress(number, consumed, size, seconds))
        self._report(reports)
        self._admits = False  # some ranks may lack the report; new processes ask again with the next batch
        self._feed()

    def _next_size(self) -> int:
        """The number of microbatches of one replica in the next batch."""
        return self.args.batch_sizes.num_microbatches(self.run.consumed_samples)

    def _next_samples(self) -> int:
        return self.args.batch_sizes.num_samples(self.run.consumed_samples)

    def _fit(self, size: int) -> bool:
        """If ranks were lost, fit the program to batches of `size` microbatches per replica; return whether it changes.

        The pipeline must be drained.
        """
        if self.lost_ranks is None or not self.lost_ranks.fit(self.run, size):
            return False
        self.close_data()
        self._feed()
        return True

    def _outgrows(self) -> bool:
        """Whether ranks were lost and the next batch needs another program than the last one."""
        survivors = self.run.survivors
        next_size = self._next_size() * self.run.replicas_in_program
        return survivors is not None and survivors.schedule.num_microbatches != next_size

    def _feed(self) -> None:
        """Give the stages iterators over the training data from the run's position on."""
        run = self.run
        for stage, iterator in zip(run.stages, self._samples(0, "training", run.consumed_samples), strict=True):
            stage.data_iterator = iterator

    def _samples(self, index: int, name: str, consumed: int) -> list[MicrobatchIterator]:
        iterators = self.run.samples(index, name, consumed)
        self._iterators += iterators
        return iterators

    def close_data(self) -> None:
        """End the processes that load samples."""
        for iterator in self._iterators:
            iterator.close()
        self._iterators, self._validation = [], []

    def give_up(self) -> None:
        """Close open files and processes after an error with which the program ends in order."""
        self.close_data()
        if self._making is not None:
            self._making.close()
        if self.run.cache is not None:
            self.run.cache.close()
        if self.run.writer is not None:
            with contextlib.suppress(ValueError, RuntimeError):  # the first error is the one to report
                self.run.writer.close()

    def _pass_on_stop_request(self) -> None:
        if self.run.engine is not None:  # no engine exists while the run changes; the next batch notes the request
            self.run.engine.stop_requests |= STOP

    def _batch(self) -> None:
        """Run one batch as a segment. The time is recorded for this batch, whose report may come later."""
        run = self.run
        if self.stop.received or self._time_is_up():
            run.engine.stop_requests |= STOP
        if self.lost_ranks is not None and self.lost_ranks.membership.newcomers():
            run.engine.stop_requests |= ADMIT
        if self._making is not None:
            self._making.announce(run.engine)
        num_samples = self._next_samples()
        num_microbatches = self._next_size() * run.replicas_in_program
        self._began = start = time.perf_counter()
        reports = run.engine.run_batch(num_microbatches, num_samples)
        seconds = time.perf_counter() - start
        run.begin_batch(num_samples)
        self._waiting.append(Progress(run.iteration, run.consumed_samples, num_samples, seconds))
        self._report(reports)

    def _drain(self) -> None:
        """Finish the batches in flight. The time is added to the last batch's."""
        start = time.perf_counter()
        reports = self.run.engine.drain()
        self._drains.append(self.run.iteration)
        seconds = time.perf_counter() - start
        if self._waiting:
            last = self._waiting.pop()
            self._waiting.append(replace(last, seconds=last.seconds + seconds))
        self._report(reports)
        assert not self._waiting, f"batches without a report after a drain: {self._waiting}"

    def _report(self, reports: list[BatchReport]) -> None:
        while self.run.engine.notes:
            self.run.reporter.say(self.run.engine.notes.pop(0))
        for report in reports:
            progress = self._waiting.popleft()
            assert progress.iteration == report.batch + 1, (progress, report)
            self._stop_requests |= report.stop_requests & STOP
            self._admits |= bool(report.stop_requests & ADMIT)
            if self._making is not None:
                self._making.note(report)
            self.run.reporter.iteration(report, progress)
            if self.run.decisions is not None:
                self.run.decisions.note(report)
            if report.nan and self.args.check_for_nan_in_loss_and_grad:
                name = main_loss(report.losses)
                raise TrainingError(
                    f"the loss or the gradient of iteration {progress.iteration} is not finite ({name} "
                    f"{report.losses.get(name)}, gradient norm {report.grad_norm}); lower --lr, or go on "
                    f"regardless with --no-check-for-nan-in-loss-and-grad"
                )

    def _time_is_up(self) -> bool:
        minutes = self.args.exit_duration_in_mins
        return minutes is not None and time.time() - self.started > 60 * minutes

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.run.iteration % interval == 0

    def _evaluates(self) -> bool:
        return self.args.has_split[1] and self.args.eval_iters > 0 and self._due(self.args.eval_interval)

    def _saves(self) -> bool:
        return self.args.save is not None and self._due(self.args.save_interval)

    def _decides(self) -> bool:
        return self.run.decisions is not None and self.run.decisions.is_due(self.run.iteration)

    def _makes_program(self) -> bool:
        return self._making is not None and self._making.is_due(self.run.iteration)

    def _ends_stretch(self) -> bool:
        """Whether the pipeline must be drained after this iteration; the same on every rank."""
        last = self.run.iteration >= self.args.train_iters
        ends = last or bool(self._stop_requests) or self._due(self.args.exit_interval)
        due = self._makes_program() or self._decides() or self._evaluates() or self._saves()
        return ends or self._admits or due or self._outgrows()

    def _between_stretches(self) -> bool:
        """Drain the pipeline, and decide, evaluate, save and change if due. Returns True if the run ends here."""
        args = self.args
        if not self.run.engine.is_drained:
            self._drain()
        if self._makes_program():
            self._finish_writing()
            if self._making.go_on(self.run):
                self._making = None
        if self._decides():  # also at the end of a run: then a resumed run continues like an uninterrupted one
            self._decide(self.run.decisions.decide)
        if self._evaluates() and not self._stop_requests and not self.validate():
            self._stop_requests |= STOP
        if self.run.decisions is not None and self.run.decisions.is_to_thaw:
            self._decide(self.run.decisions.thaw)
        ends = bool(self._stop_requests) or self._due(args.exit_interval)
        if self._saves() or (ends and args.save is not None):
            self.save()
        if not ends and self._agree_to_stop():  # a stop request came while evaluating or saving; do not save twice
            ends = True
            if self._is_to_save():
                self.save()
        if ends:
            why = "on request" if self._stop_requests else "as --exit-interval says"
            self.run.reporter.say(f"exiting {why} at iteration {self.run.iteration}")
        elif self._wants_to_change() and self.run.iteration < args.train_iters:
            self._change_arrangement()
        return ends

    def _decide(self, decide: Callable[[Run], None]) -> None:
        """Run a decision about changes; if it fails, log a warning and change nothing."""
        run = self.run
        self._finish_writing()
        try:
            decide(run)
        except CheckpointError as error:
            run.decisions.take_back()
            run.reporter.say(f"warning: nothing is decided at iteration {run.iteration}: {error}")
        else:
            outlook = run.decisions.outlook
            if outlook is not None and outlook.missed is not None:
                run.reporter.say(f"warning: at iteration {run.iteration} {outlook.missed}; the pipeline stays as it is")

    def _serve_from_cache(self) -> None:
        run = self.run
        if run.cache is not None:
            run.reporter.say(run.cache.describe())
            run.cache.serve(run.args, run.stages)

    def _wants_to_change(self) -> bool:
        return self.run.decisions is not None and self.run.decisions.wanted != self.args.arrangement

    def _change_arrangement(self) -> None:
        """Change to the decided arrangement; if that fails, log a warning and keep the current one."""
        run, decisions = self.run, self.run.decisions
        self._finish_writing()
        self.close_data()
        try:
            change = change_arrangement(run, decisions.wanted)
        except CheckpointError as error:
            decisions.note_failure()
            run.reporter.say(f"warning: nothing changes at iteration {run.iteration}: {error}")
        else:
            run.go_on_with(replace(run.args, train_iters=iterations_to_the_end(
                run.args, iteration=run.iteration, consumed_samples=run.consumed_samples
            )))  # fmt: skip
            decisions.note_change(change.seconds)
            self._serve_from_cache()
            run.reporter.change(run.iteration, change, decisions.outlook)
        self._feed()

    def _finish_writing(self) -> None:
        """Wait for a checkpoint that is written in the background, since it uses the group over which ranks agree."""
        if self.run.writer is not None:
            self.run.writer.finish()

    def _agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop. Collective."""
        stop_request = torch.tensor([int(self.stop.received or self._time_is_up())], device=backend.device())
        torch.distributed.all_reduce(stop_request, op=torch.distributed.ReduceOp.MAX)
        if stop_request.item():
            self._stop_requests |= STOP
        return bool(stop_request.item())

    def validate(self) -> bool:
        """Evaluate on the validation data and report it; False if a stop request interrupted it."""
        run = self.run
        self.validated_iteration = run.iteration
        self._fit(full_batch(self.args))
        if not self._validation:
            self._validation = self._samples(1, "validation", run.consumed_valid_samples)
        return self._evaluate("validation", self._validation)

    def test(self) -> bool:
        """Evaluate on the test data and report it; False if a stop request interrupted it."""
        self._fit(full_batch(self.args))
        return self._evaluate("test", self._samples(2, "test", 0))

    def _evaluate(self, name: str, iterators: list[MicrobatchIterator]) -> bool:
        run, args = self.run, self.args
        if args.manual_gc and args.manual_gc_eval:
            gc.collect()
        start = time.perf_counter()
        for stage, iterator in zip(run.stages, iterators, strict=True):
            stage.evaluation_iterator = iterator
        losses = evaluate(run.engine, args, self._agree_to_stop, replicas_in_program=run.replicas_in_program)
        if name == "validation":  # in full even if interrupted, so that later evaluations see the same samples
            samples = full_batch(args) * args.batch_sizes.samples_per_microbatch
            run.consumed_valid_samples += args.eval_iters * samples
        if losses is None:
            return False
        run.reporter.evaluation(name, run.iteration, losses, seconds=time.perf_counter() - start)
        if name == "validation" and run.decisions is not None:
            warning = run.decisions.note_validation(losses, iteration=run.iteration)
            if warning is not None and run.iteration < args.train_iters:  # at the end everything is reported
                run.reporter.say(f"warning: {warning}")
        return True

    def save(self) -> None:
        """Save a checkpoint at the run's position. Collective; the pipeline must be drained."""
        run, iteration = self.run, self.run.iteration
        self._finish_writing()
        if self.lost_ranks is not None:
            self.lost_ranks.confirm()
        start = time.perf_counter()

        def saved(path: Path) -> None:  # with --async-save called later, from another thread
            run.reporter.progress(f"Saved checkpoint\tIteration: {iteration}\t{path}")

        save_checkpoint(
            run.writer, run.model_and_optimizer, args=self.args, position=run.position(), on_saved=saved,
            changes=run.decisions.state_dict() if run.decisions is not None else None,
        )  # fmt: skip
        run.saved_iteration = iteration
        how = "is being written" if self.args.async_save else f"took {time.perf_counter() - start:.1f} s"
        run.reporter.say(f"checkpoint of iteration {iteration} in {self.args.save} {how}")

    def _collect_garbage(self) -> None:
        args = self.args
        if args.empty_unused_memory_level >= 1 and backend.is_cuda():
            torch.cuda.empty_cache()
        if args.manual_gc and args.manual_gc_interval and self.run.iteration % args.manual_gc_interval == 0:
            gc.collect()

    def finish(self) -> None:
        """Wait for checkpoints that are still being written, write the timeline, and close everything that is open."""
        run = self.run
        self.close_data()
        if self._making is not None:
            self._making.close()
            run.reporter.say(f"{AUTO}: the run ends before a program was made for its costs")
        if run.decisions is not None and (cost := run.decisions.cost_of_freezing()) is not None:
            run.reporter.say(cost)
        if run.cache is not None:
            run.reporter.say(run.cache.describe())
            run.cache.close()
        with contextlib.ExitStack() as stack:
            stack.callback(run.reporter.close)
            if run.writer is not None:
                run.writer.close()
            if self.args.pipeline_timeline is not None:
                draw_last_batches(run, drains=self._drains, may_lose_ranks=self.lost_ranks is not None)
        try:
            run.engine.close()
            run.update.close()
        except RuntimeError as error:
            if self.lost_ranks is None or not self.lost_ranks.comes_from_loss(error):
                raise


def run_to_the_end(run: Run, stop: StopSignal, *, started: float, lost_ranks: LostRanks | None = None) -> None:
    """Train; unless the run ends early, then evaluate on validation and test data, as Megatron-LM does."""
    loop = Loop(run, stop, started=started, lost_ranks=lost_ranks)
    try:
        _train_and_evaluate(loop)
        loop.finish()
    except ValueError:  # the program ends in order; other errors end the process and with it the data loaders
        loop.give_up()
        raise


def _train_and_evaluate(loop: Loop) -> None:
    run, args = loop.run, loop.args
    if not args.skip_train:
        run.reporter.say(f"at iteration {run.iteration} of {args.train_iters}")
        if run.iteration >= args.train_iters:
            run.reporter.say("nothing is left to train; --skip-train evaluates")
            return
    if (args.skip_train or loop.train()) and args.eval_iters > 0:
        goes_on = True
        if args.has_split[1] and loop.validated_iteration != run.iteration:
            goes_on = loop.validate()
        if goes_on and args.has_split[2]:
            loop.test()
