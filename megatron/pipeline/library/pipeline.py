"""The training of any ``nn.Module`` as a pipeline, without megatron.core and without this project's trainer.

The user gives modules, a loss, an optimizer and batches. The schedule decides the rest: the number of weight versions
and gradient buffers, the tensors that ranks exchange, and the place of each batch's reductions and step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.pipeline.library.arguments import is_duration, require_steps, require_values
from megatron.pipeline.library.batches import Announcement, Announcements, BatchData, MicrobatchFeed, split_batch
from megatron.pipeline.library.building import Tie, build_stage, place, stage_module, trained
from megatron.pipeline.library.ranks import Groups, LossCounts, close_at_exit, find_ranks, leave_at_exit
from megatron.pipeline.library.stages import LossFunction, Specs, edges_of, find_specs
from megatron.pipeline.library.state import load_state, require_loadable, state_of
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, BatchReport
from megatron.pipeline.runtime.contract.trace import CudaClock, RankTrace, Tracer, gather_traces
from megatron.pipeline.runtime.contract.trace import timeline as timeline_of
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.agreement import Agreement
from megatron.pipeline.runtime.failure.errors import write_error_file
from megatron.pipeline.runtime.stages.module.rank_update import make_updates, make_versions, steps_of
from megatron.pipeline.simulate.timeline import Timeline

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
_TIMEOUT = timedelta(minutes=10)


class Pipeline:
    """This rank's part of a pipeline.

    Every rank of the job must make a `Pipeline` and call `step` for every batch. All other methods but `trace` are
    collective: every rank must call them after the same batch.

    Args:
        module: this rank's stage, or its stages in ascending order. All modules of a rank must be on one device.
        schedule: a name in `PRESETS`, a schedule, or the path of a CSV file with a program.
        num_microbatches: number of microbatches of each batch; None: the number in the program's file.
        loss: (output of the last stage, targets) of a microbatch -> its mean loss, a scalar, or (sum, count). Required
            on the rank of the last stage. A batch's loss and gradient are the means over its microbatches, or over the
            total count.
        optimizer: makes a torch optimizer for a list of parameters: this rank's parameters that require gradients.
            Under `ftpipe`'s stale weights it is called once for each stage.
        scheduler: makes a learning-rate scheduler for that optimizer, or returns None for a constant rate; the
            scheduler steps when the optimizer steps.
        group: the ranks of this pipeline, in pipeline order; None: all ranks, or this rank's part of `replicas`.
        data_parallel_group: the ranks that hold the same stages as this rank in all pipelines, including this rank.
        replicas: the number of pipelines, each of consecutive ranks, if no group is given.
        clip_grad: the largest norm of all gradients together; 0: gradients are not clipped.
        recompute: whether to save only the inputs of each stage, and to recompute its activations for the backward.
        provisional: whether to predict the weights of 2bw from the gradients that are available so far.
        error_feedback: whether to predict the weights of 2bw by taking the last update again, instead of `provisional`.
        autocast: the dtype in which modules and loss compute under ``torch.autocast``: bfloat16, or None.
        tied: this rank's copy of a parameter that the first and the last stage share; None on the other ranks. The
            copies must be equal at the start.
        device: the device of the modules; None: the device of their parameters.
        timeout: the longest time to wait for a transfer or for another rank.
        traced_batches: number of last batches that `timeline` shows; 0: nothing is traced.

    Attributes:
        schedule: the schedule that is run.
        num_microbatches: number of microbatches of each batch.
        stages: the indices of this rank's stages.
        takes_batch: whether this rank has the first or the last stage, so that `step` needs a batch.
        has_failed: whether the state of the work in flight is unknown, so that the pipeline accepts no more batches.

    Raises:
        ValueError: on all ranks, if arguments contradict each other or differ between ranks.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        schedule: str | Path | Any,
        num_microbatches: int | None = None,
        *,
        loss: LossFunction | None = None,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        group: Any = None,
        data_parallel_group: Any = None,
        replicas: int = 1,
        clip_grad: float = 0.0,
        recompute: bool = False,
        provisional: bool = False,
        error_feedback: bool = False,
        autocast: torch.dtype | None = None,
        tied: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        timeout: timedelta = _TIMEOUT,
        traced_batches: int = 4,
    ) -> None:
        self._ranks = find_ranks(group, data_parallel_group, replicas)
        # One rank's wrong timeout is refused on all ranks, for which they need the groups.
        self._groups = Groups(self._ranks, timeout if is_duration(timeout) else _TIMEOUT)
        self._agreement = Agreement(self._ranks.job, self._groups.job, is_one_pipeline=len(self._ranks.pipelines) == 1)
        self._agreement.on(lambda: require_values(
            timeout=timeout, provisional=provisional, error_feedback=error_feedback, clip_grad=clip_grad,
            autocast=autocast, traced_batches=traced_batches, loss=loss, optimizer=optimizer, scheduler=scheduler,
        ))  # fmt: skip
        self._timeout = timeout
        placed = place(
            module, schedule, self._agreement, self._ranks, has_loss=loss is not None, has_tied=tied is not None,
            device=device, num_microbatches=num_microbatches, clip_grad=clip_grad, recompute=recompute,
            provisional=provisional, error_feedback=error_feedback, autocast=autocast,
        )  # fmt: skip
        self.schedule, self.num_microbatches, self._device = placed.schedule, placed.num_microbatches, placed.device
        self.stages: tuple[int, ...] = self.schedule.stages_of(self._ranks.rank)
        self._has_first, self._has_last = 0 in self.stages, self.schedule.num_stages - 1 in self.stages
        self.takes_batch = self._has_first or self._has_last
        self.modules = dict(zip(self.stages, placed.modules, strict=True))
        self._feed, self._counts = MicrobatchFeed(), LossCounts(self._ranks)
        weights = self.schedule.weights
        of_stage = self._agreement.on(lambda: trained(self.modules, stepping_alone=weights.refreshes))
        tie = self._agreement.on(lambda: Tie.of(tied, of_stage, self.schedule, self._ranks) if placed.is_tied else None)
        self._versions = make_versions(weights, of_stage, num_stages=self.schedule.num_stages, first_version=0)

        def stepping(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
            # A rank without trained parameters reports a learning rate, too, so it gets an empty parameter.
            trains = list(parameters.values()) or [nn.Parameter(torch.zeros(0, device=self._device))]
            made = require_steps("optimizer", optimizer(trains))
            scheduling = None if scheduler is None else scheduler(made)
            return {
                "optimizer": made,
                "scheduler": None if scheduling is None else require_steps("scheduler", scheduling),
            }

        steps = steps_of(weights, of_stage)
        made = self._agreement.on(lambda: {key: stepping(parameters) for key, parameters in steps.items()})
        self._update, self._updates = make_updates(
            steps, self._versions, made, weights=weights, job_group=self._groups.reductions, device=self._device,
            counts=self._counts, skips_unused=True, clip_grad=clip_grad, data_parallel_group=self._groups.replicas,
            counts_in_norm=self._ranks.replica == 0, reduce_partial=self.schedule.reduce_partial,
            provisional_microbatches=self.schedule.provisional_microbatches,
            tied=None if tie is None else tie.parameter(self._groups),
        )  # fmt: skip
        self._stage_modules = {
            index: stage_module(module, index, self.schedule, loss=loss, autocast=autocast, device=self._device)
            for index, module in self.modules.items()
        }
        self._announcements = Announcements(self._ranks.pipeline[self.schedule.rank_of_stage[0]], self._groups.pipeline)
        self._tracer = None
        if traced_batches:
            clock = CudaClock() if self._device.type == "cuda" else None
            self._tracer = Tracer(num_batches=traced_batches, clock=clock)
        self._engine: PipelineEngine | None = None
        self._start = 0, 0  # batch and microbatch at which the next engine begins
        self._specs: list[Specs] = []  # by the number of shapes in the announcements
        self._travelling: int | None = None  # the number of the shapes that are exchanged now
        self._reports: deque[BatchReport] = deque()  # the reports that no call has returned yet
        self.has_failed = self._is_closed = False
        self._guard = ExitStack()

    # --- training

    def step(self, batch: Any = None) -> BatchReport | None:
        """Train on one batch.

        Args:
            batch: (inputs, targets) on the ranks of the first and the last stage, split on dimension 0 into
                microbatches; see `split_batch`. A rank with only one of these stages may be given only inputs, or only
                targets.

        Returns:
            The report of the newest batch that all ranks have finished, equal on all ranks: with flushes the report of
            this batch, under 2bw of the batch before. None if no report is due.

        Raises:
            ValueError: the batch is missing or cannot be split. If the rank of the first stage finds this, all ranks of
                the pipeline raise the error, and the batch has not begun.
        """
        data, head = self._receive(batch, evaluates=False)
        engine = self._running()
        number = engine.next_batch
        if data is not None:
            self._feed.add(number, engine.next_microbatch, data)
        with self._failing():
            self._take(engine.run_batch(self.num_microbatches, head.num_samples * len(self._ranks.pipelines)))
        is_due = self._reports and self._reports[0].batch <= number - self.schedule.report_lag
        return self._reports.popleft() if is_due else None

    def drain(self) -> list[BatchReport]:
        """Finish all batches, so that the modules hold the newest weights.

        Returns the reports that no call has returned yet, oldest first.
        """
        self._settle()
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def evaluate(self, batch: Any = None) -> BatchReport:
        """Run the forwards of one batch, with the newest weights and all modules in evaluation mode.

        The pipeline is drained first. `batch` is given as to `step`. Returns a report with the mean loss over all
        replicas.
        """
        self._settle()
        data, head = self._receive(batch, evaluates=True)
        engine = self._running()
        self._feed.evaluate(data)
        with self._failing():
            losses = engine.evaluate(self.num_microbatches)
        self._feed.evaluate(None)
        self._update.show_newest()
        means = {name: total / count if count else math.nan for name, (total, count) in losses.items()}
        num_samples = head.num_samples * len(self._ranks.pipelines)
        return BatchReport(batch=EVALUATION_BATCH, losses=means, num_samples=num_samples)

    # --- progress and state

    @property
    def next_batch(self) -> int:
        """The number of batches that the run has begun, across restarts."""
        return self._start[0] if self._engine is None else self._engine.next_batch

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, from which the run continues exactly: a copy on the CPU for ``torch.save``.

        Each rank saves a file of its own. The pipeline is drained first. `state["modules"][stage]` is the state dict of
        a stage's module.
        """
        self._settle()
        if self._engine is not None:
            self._start = self._engine.next_batch, self._engine.next_microbatch
        return state_of(
            self.modules, self._updates, description=self._description(), progress=self._start,
            reports=list(self._reports), device=self._device,
        )  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run from this rank's `state_dict`, with the same schedule, modules and optimizer.

        Raises:
            ValueError: on all ranks, if the state belongs to another rank, schedule or module.
        """
        self._settle()
        self._agreement.on(lambda: require_loadable(state, self._description()))
        start, reports = self._agreement.on(lambda: load_state(state, self.modules, self._updates, device=self._device))
        self._stop()
        self._start, self._reports = start, deque(reports)

    # --- traces

    def trace(self) -> RankTrace:
        """This rank's trace of the last batches. Raises ValueError if nothing was traced."""
        if self._engine is None or self._tracer is None:
            raise ValueError("nothing was traced; give traced_batches, and run a batch")
        return self._engine.trace()

    def timeline(self) -> Timeline | None:
        """The measured timeline of the last batches, on the first rank of the pipeline; None on all other ranks.

        Collective: every rank of the pipeline must call it. `draw.draw_timeline` draws the timeline.
        `write_chrome_trace` writes a `trace` to a file for Perfetto.
        """
        self._settle()
        trace = self.trace()
        traces = [trace] if len(self._ranks.pipeline) == 1 else gather_traces(trace, group=self._groups.pipeline)
        return None if traces is None else timeline_of(traces)

    # --- the end

    def close(self) -> None:
        """End the run on all ranks: finish all batches in flight, show the newest weights, and end threads and groups.

        After a failure, only show the weights of this rank's newest step; ranks may then be one step apart.
        Reports that no call has returned are lost. If a script does not call `close`, the pipeline is closed when the
        script ends, provided that the process group still exists.
        """
        if self._is_closed:
            return
        if not self.has_failed:
            self._settle()
        self._is_closed = True
        leave_at_exit(self)
        if not self.has_failed:
            self._stop()
        for update in self._updates.values():
            update.close()
        if not self.has_failed:
            self._groups.close()

    def __enter__(self) -> Pipeline:
        """Begin a block in which a rank that fails, or is killed, ends the whole job in seconds.

        Every rank prints the reason. An error that all ranks raise alike, such as a batch that cannot be split, leaves
        the block as an exception.
        """
        if failure_guard.active() is None and self._ranks.is_whole_world:
            self._guard.enter_context(failure_guard.guard(timeout=self._timeout))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and error is not self._agreement.refusal:
            self.has_failed = True
            self._guard.__exit__(kind, error, traceback)
            with suppress(Exception):  # the caller's error is the one to report
                self.close()
            return
        with self._guard:
            self.close()

    # --- parts

    def _receive(self, batch: Any, *, evaluates: bool) -> tuple[BatchData | None, Announcement]:
        """Split a batch and exchange its announcement. Afterwards tensors of the batch's shapes can be exchanged."""
        if self._is_closed or self.has_failed:
            raise RuntimeError("the pipeline is closed, or has failed; make another")
        data, problem = None, None
        if self.takes_batch:
            try:
                data = split_batch(batch, self.num_microbatches, has_inputs=self._has_first,
                                   has_targets=self._has_last, device=self._device)  # fmt: skip
            except ValueError as error:
                problem = error
        with self._agreement.refusing():
            head = self._announcements.exchange(data, problem, evaluates=evaluates)
        if problem is not None:
            raise problem
        if data is not None and data.num_samples != head.num_samples:
            raise ValueError(
                f"this rank's batch has {data.num_samples} samples, and that of the first stage {head.num_samples}; "
                "give both the same batch"
            )
        if head.number != self._travelling:
            self._change_shapes(head.number, data, evaluates=evaluates)
        return data, head

    def _change_shapes(self, number: int, data: BatchData | None, *, evaluates: bool) -> None:
        """Change the shapes of the exchanged tensors to those of `number`.

        New shapes are found by running the first microbatch.
        """
        self._settle()
        if number == len(self._specs):
            first = None if data is None else data.microbatches[0]
            with self._agreement.refusing():
                found = find_specs(self._stage_modules, self.schedule, self._ranks, self._groups.pipeline, data=first,
                                   evaluates=evaluates, device=self._device)  # fmt: skip
            if not self._specs:
                updates = self._updates.values() if self.next_batch == 0 else ()
                self._counts.expect(self._agreement.gathered(found.count), self.schedule.weights, updates)
            self._specs.append(found.specs)
            self._announcements.confirm()
        if self._engine is not None:
            if self.schedule.moves_activations and self._specs[number] != self._specs[self._travelling]:
                raise ValueError(
                    "the shapes of a batch have changed, and activations that move have one size; give equal batches, "
                    "or use a schedule that moves none"
                )
            if not self.schedule.moves_activations:
                self._engine.change_edges(edges_of(self._specs[number], self.stages))
        self._travelling = number

    def _running(self) -> PipelineEngine:
        if self._engine is None:
            memory = ActivationMemory(self._device) if self.schedule.moves_activations else None
            stages = [
                build_stage(
                    self._stage_modules[index], index, self.schedule, versions=self._versions[index],
                    specs=self._specs[self._travelling], feed=self._feed, counts=self._counts, memory=memory,
                    device=self._device,
                )
                for index in self.stages
            ]  # fmt: skip
            has_nccl = self._device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config()
            backend = "nccl" if has_nccl else "gloo"
            close_at_exit(self, needs_group=self._groups.job is not None)
            self._engine = PipelineEngine(
                self.schedule, stages, self._update, ranks=self._ranks.pipeline, timeout=self._timeout,
                backend=backend, device=self._device, metrics_group=self._groups.job, tracer=self._tracer,
                first_batch=self._start[0], first_microbatch=self._start[1], activation_memory=memory,
            )  # fmt: skip
        return self._engine

    def _take(self, reports: Iterable[BatchReport]) -> None:
        for report in reports:
            self._feed.forget(report.batch)
            self._counts.forget(report.batch)
            self._reports.append(report)

    def _settle(self) -> None:
        if self._is_closed or self.has_failed:
            raise RuntimeError("the pipeline is closed, or has failed; make another")
        if self._engine is not None and not self._engine.is_drained:
            with self._failing():
                self._take(self._engine.drain())
        self._update.show_newest()

    def _stop(self) -> None:
        """End the engine, which must be drained. The next batch makes another engine."""
        if self._engine is not None:
            self._start = self._engine.next_batch, self._engine.next_microbatch
            self._engine.close()
            self._engine = None

    def _description(self) -> dict[str, Any]:
        """The properties that must be equal when a run continues from a saved state."""
        schedule = self.schedule
        return {
            "weights": schedule.weights.name + ", error feedback" * (schedule.provisional_microbatches == 0),
            "rank_of_stage": tuple(schedule.rank_of_stage), "stages": self.stages,
            "microbatches": self.num_microbatches, "replicas": len(self._ranks.pipelines),
            "program": getattr(schedule, "sha256", None),
        }  # fmt: skip

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A block whose failure leaves the state of the pipeline's work unknown.

        If the pipeline is not used as a context manager, the first failure is written to the launcher's error file.
        """
        try:
            yield
        except BaseException as error:
            self.has_failed = True
            if failure_guard.active() is None and not failure_guard.is_consequence(error):
                write_error_file(failure_guard.sentence_of(error, f"rank {self._ranks.own}"))
            raise
