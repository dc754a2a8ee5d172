"""The engine: drives a training loop's batches through the executor.

The loop announces a batch of m microbatches and gets the reports of the batches that every rank has finished by then.
Without flushes a batch's step is executed during the segment of a later batch. So a report comes `report_lag` batches
late, on all ranks alike. A drain executes everything pending. Evaluation and checkpoints need a drained pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store, distributed_c10d

from megatron.pipeline.program.instruction import AWAITS_REDUCTIONS, Instruction, Kind
from megatron.pipeline.program.lane_order import LaneOrder, MoveOrder
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.activations.transfers import ActivationTransfers, DeferredBytes, SavedMicrobatches
from megatron.pipeline.runtime.contract.stage import (
    EVALUATION_BATCH,
    BatchInfo,
    BatchReport,
    Stage,
    WeightUpdate,
    take_losses,
)
from megatron.pipeline.runtime.contract.trace import BatchExtent, RankTrace, Tracer
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.errors import annotate
from megatron.pipeline.runtime.fitting import numbered
from megatron.pipeline.runtime.relay.activation_stash import ActivationStash
from megatron.pipeline.runtime.relay.input_stash import InputStash, RelayLedger
from megatron.pipeline.runtime.relay.lanes import Lanes
from megatron.pipeline.runtime.steps import RefusedSteps
from megatron.pipeline.runtime.transport.channels import Channels
from megatron.pipeline.runtime.transport.lane import Chain, MoveQueue
from megatron.pipeline.schedules import PipelineSchedule

if TYPE_CHECKING:
    from megatron.pipeline.runtime.contract.tensors import EdgeTensors


class PipelineEngine:
    """Runs `schedule` on this rank's stage (or stages).

    Args:
        schedule: the schedule of the pipeline's programs.
        stage: the rank's stage, or a list of its stages in ascending order. Where stages of the schedule are copies,
            the list has the stage of the model for each of the rank's copies.
        update: the weight update of these stages.
        ranks: global ranks of this pipeline in pipeline order (default: all ranks).
        timeout: how long a rank waits for a transfer or a reduction.
        backend: "gloo" or "nccl", for the transfers between stages.
        device: the device of the stages' tensors.
        store: the store through which the pipeline's ranks connect (default: the default group's).
        metrics_group: the group over which evaluation sums losses, as a torch.distributed group or a bare backend
            (default: all ranks of the default group). Only the main thread uses it.
        tracer: records when instructions start and end; None: nothing is traced.
        first_batch, first_microbatch: the numbers at which a run resumes from a checkpoint, else 0.
        activation_memory: the memory with which this rank's stages were built. Needed to count activations and to
            move them between paired ranks or to the host.
        ledger: the ledger of the update, where weights live on the host and bytes are counted.
        deferred_bytes: counter of the bytes saved between I and W, for callers that read it, too.

    Attributes:
        saved: counter of the saved microbatches, by stage and on the rank, with their peaks over the run.
        stash: the inputs or activations of microbatches on the host; None where all of them stay on the device.
        notes: sentences for the log, the same on all ranks. The caller removes them.

    For a checkpoint, read `next_batch` and `next_microbatch` while the pipeline is drained. Set `stop_requests` (bits)
    to send them with the next norm reduction; `BatchReport.stop_requests` is their union over all ranks.

    Raises:
        ValueError: schedule, stages, update and ranks do not fit together.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stage: Stage | Sequence[Stage],
        update: WeightUpdate,
        *,
        ranks: Sequence[int] | None = None,
        timeout: timedelta = timedelta(minutes=10),
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        store: Store | None = None,
        metrics_group: Any = None,
        tracer: Tracer | None = None,
        first_batch: int = 0,
        first_microbatch: int = 0,
        activation_memory: ActivationMemory | None = None,
        ledger: RelayLedger | None = None,
        deferred_bytes: DeferredBytes | None = None,
    ) -> None:
        self.schedule = schedule
        self.tracer = tracer
        self.stop_requests = 0
        self._stages = list(stage) if isinstance(stage, Sequence) else [stage]
        self._metrics_group = metrics_group
        self._device = torch.device(device)
        distributed = torch.distributed.is_initialized()
        ranks = list(range(torch.distributed.get_world_size() if distributed else 1)) if ranks is None else list(ranks)
        global_rank = torch.distributed.get_rank() if distributed else 0
        if global_rank not in ranks:
            raise ValueError(f"rank {global_rank} is not one of the pipeline's ranks {ranks}")
        self._rank = ranks.index(global_rank)
        of_program = numbered(
            schedule, self._stages, update, rank=self._rank, num_ranks=len(ranks),
            counts_activations=activation_memory is not None,
        )  # fmt: skip
        moves = activation_memory is not None and not schedule.swaps
        self._ranks, self._rank_of_stage = tuple(ranks), schedule.rank_of_stage
        self._channels = Channels(
            ranks=ranks,
            rank_of_stage=schedule.rank_of_stage,
            edges=schedule.edges,
            copies=schedule.copies,
            rank=self._rank,
            stages=of_program,
            timeout=timeout,
            backend=backend,
            device=self._device,
            store=store or (distributed_c10d._get_default_store() if distributed else None),
            moves_activations=moves,
            on_error=failure_guard.report,
        )
        own = self._channels.name_of(min(of_program))
        self.saved = SavedMicrobatches(of_program, deferred_bytes)
        self._lanes = self.stash = None

        def mark(error: BaseException, word: Instruction) -> None:
            annotate(error, word, self._channels.name_of(word.stage))

        if schedule.residency is not None or schedule.swaps:
            if schedule.swaps:
                number_of = {each.index: number for number, each in of_program.items()}
                self.stash = ActivationStash(self.saved, activation_memory, number_of)
            elif schedule.residency.stashes_on_host:
                self.stash = InputStash(self.saved, device=self._device, ledger=ledger)
            self._lanes = Lanes(
                LaneOrder(schedule.num_stages),
                device=self._device,
                timeout=timeout.total_seconds(),
                tracer=tracer,
                on_error=failure_guard.report,
                annotate=mark,
                on_awaited=(lambda word: None) if self.stash is None else self.stash.note_awaited,
            )
        self._chain, self._late_chain = (
            Chain(
                device=self._device,
                timeout=timeout.total_seconds(),
                tracer=tracer,
                on_error=failure_guard.report if self._lanes is None else self._lanes.fail,
                annotate=lambda error, instruction: annotate(error, instruction, own),
            )
            for _ in range(2)
        )
        self._transfers = None
        if moves:
            queue = MoveQueue(device=self._device, tracer=tracer, on_error=failure_guard.report, annotate=mark)
            self._transfers = ActivationTransfers(
                self._channels,
                activation_memory,
                self.saved,
                queue,
                order=MoveOrder(num_frozen=schedule.num_frozen),
                pairs=schedule.pairs,
                timeout=timeout,
            )
        self._executor = Executor(
            of_program,
            update,
            self._channels,
            self._chain,
            self._late_chain,
            self.saved,
            graph=schedule.graph,
            weights=schedule.weights,
            copies=schedule.copies,
            num_held=schedule.num_held if schedule.copies else None,
            transfers=self._transfers,
            lanes=self._lanes,
            stash=self.stash,
            tracer=tracer,
            stop_requests=lambda: self.stop_requests,
            **({} if ledger is None else {"on_boundary": ledger.note_on_device}),
        )
        self._stream = schedule.stream(first_batch=first_batch, first_microbatch=first_microbatch)
        self._drained = True
        self._update = update
        self._refused = RefusedSteps()
        self.notes: list[str] = []
        self._guard = failure_guard.active()
        if self._guard is not None:
            self._guard.watch(name=own, doing=self._doing, overdue=self._channels.check_overdue)

    @property
    def next_batch(self) -> int:
        return self._stream.next_batch

    @property
    def next_microbatch(self) -> int:
        return self._stream.next_microbatch

    @property
    def is_drained(self) -> bool:
        return self._drained

    @property
    def num_instructions_executed(self) -> int:
        return self._executor.num_executed

    @property
    def bytes_sent(self) -> int:
        """Bytes of activations and gradients sent to stages on other ranks so far."""
        return self._channels.bytes_sent

    def num_unread_sends(self) -> int:
        """Return the number of incomplete transfers: sends that the peer has not read, and moves."""
        return self._channels.num_unread_sends() + (self._transfers.num_incomplete if self._transfers else 0)

    def run_batch(self, num_microbatches: int, num_samples: int) -> list[BatchReport]:
        """Start the next batch and execute its segment. Return the reports complete on all ranks, oldest first.

        `num_samples`: the batch's samples over all replicas.
        """
        batch = self._stream.next_batch
        first_microbatch = self._stream.next_microbatch
        rows = self._stream.start_batch(num_microbatches)
        self._executor.add_batch(BatchInfo(batch, num_microbatches, num_samples), first_microbatch)
        self._drained = False
        if self.tracer is not None:
            self.tracer.begin_batch(BatchExtent(batch, first_microbatch, num_microbatches))
        if not self._executor.run(rows[self._rank]):
            self._go_back(batch, num_microbatches)
        return self._take_reports(batch - self.schedule.report_lag)

    def drain(self) -> list[BatchReport]:
        """Execute everything pending, steps included. Return the remaining reports."""
        if not self._executor.run(self._stream.drain()[self._rank]):
            self._go_back(self._stream.next_batch, None)
        self._executor.settle()
        if self._transfers is not None:
            self._transfers.settle()
        if self._lanes is not None:
            self._lanes.settle()
        if self.stash is not None:
            self.stash.require_empty()
        self._drained = True
        return self._take_reports(self._stream.next_batch - 1)

    def evaluate(self, num_microbatches: int) -> dict[str, tuple[float, float]]:
        """Run `num_microbatches` forwards per pipeline with the newest weights.

        Returns loss name -> (numerator, denominator), summed over the metrics group and equal on all its ranks. Raises
        RuntimeError if the pipeline is not drained.
        """
        if not self._drained:
            raise RuntimeError("evaluation needs a drained pipeline; call drain() before it")
        self._executor.run_evaluation(self._stream.evaluation(num_microbatches)[self._rank], num_microbatches)
        self._executor.settle()
        return self._sum_losses(take_losses(self._stages, EVALUATION_BATCH))

    def change_edges(self, edges: Mapping[int, Mapping[int, EdgeTensors]]) -> None:
        """Change the tensors of the edges. Call it drained, and before the same batch on all ranks.

        `edges`: stage of this rank (a `GraphStage`) -> other stage -> the tensors between the two.
        """
        assert self._drained, "what is in flight has the shapes of before"
        for stage in self._stages:
            stage.edges = dict(edges[stage.index])

    def trace(self) -> RankTrace:
        """Return the trace of the last batches on this rank, for `trace.gather_traces` and `trace.timeline`.

        Raises ValueError if the engine has no tracer.
        """
        if self.tracer is None:
            raise ValueError("nothing was traced; give the engine a Tracer")
        return RankTrace(
            rank=self._ranks[self._rank],
            pipeline=self._ranks,
            rank_of_stage=self._rank_of_stage,
            batches=self.tracer.batches(),
            spans=self.tracer.spans(),
            edges=self.schedule.edges,
            copies=self.schedule.copies,
            deferred_bytes=self.tracer.deferred_bytes(),
        )

    def abandon(self, timeout: float) -> list[BatchReport]:
        """Give up the batches in flight after another rank was lost. Return the reports of batches that have stepped.

        The connections to other ranks are broken (`failure.connections`), so all waits of the threads fail. The stages
        and the update keep the data that they have saved for batches in flight. The engine cannot be used afterwards.

        Raises:
            RuntimeError: a thread that reduces gradients, moves or copies has not ended after `timeout` seconds. It
                might still write.
        """
        ended = [] if self._lanes is None else [self._lanes.abandon(timeout)]  # first: reductions may wait for them
        ended += [chain.abandon(timeout) for chain in (self._chain, self._late_chain)]
        if self._transfers is not None:
            ended.append(self._transfers.abandon(timeout))
        self._channels.abandon(timeout)
        if not all(ended):
            raise RuntimeError(f"a reduction, a move or a copy has not ended {timeout:g} s after its connections broke")
        reports = self._executor.reports
        return [reports[batch] for batch in sorted(reports)]

    def close(self) -> None:
        """Stop the threads. Call it on all ranks while the pipeline is drained. Not needed after a failure."""
        if self._guard is not None:
            self._guard.unwatch()
        for chain in (self._chain, self._late_chain):
            chain.close()
        if self._transfers is not None:
            self._transfers.close()
        if self._lanes is not None:
            self._lanes.close()
        self._channels.close()

    def _go_back(self, batch: int, num_microbatches: int | None) -> None:
        """Run the instructions that replace the rest of a row whose VALIDATE has refused the step before `batch`.

        All ranks refuse the same steps. So if too many are refused, all ranks turn optimistic steps off at the same
        batch.

        Args:
            batch: the batch that begins again. If the run drains, the batch that would come next.
            num_microbatches: the size of this batch; None: the run drains before it.
        """
        row = self._stream.refused()[self._rank]
        place = next(place for place, each in enumerate(row) if each.kind is Kind.ROLLBACK)
        self._executor.run(row[: place + 1])
        if self.tracer is not None and num_microbatches is not None:
            self.tracer.drop_last()
        too_many = self._refused.note(batch)
        if too_many is None:
            self._executor.run(row[place + 1 :])
            return
        self._update.give_up()
        self.notes.append(too_many)
        first_microbatch = self._stream.next_microbatch - (num_microbatches or 0)
        self.schedule = replace(self.schedule, optimistic=False)
        self._stream = self.schedule.stream(first_batch=batch, first_microbatch=first_microbatch)
        if num_microbatches is not None:
            self._executor.run(self._stream.start_batch(num_microbatches)[self._rank])

    def _take_reports(self, last_batch: int) -> list[BatchReport]:
        reports = self._executor.reports
        taken = []
        for batch in sorted(batch for batch in reports if batch <= last_batch):
            self._late_chain.wait_for(batch + 1)  # a norm reduction placed after the step completes the report
            taken.append(reports.pop(batch))
        return taken

    def _sum_losses(self, losses: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        names = self._stages[0].loss_names
        sums = torch.tensor([losses.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64, device=self._device)
        group = self._metrics_group
        if group is None and torch.distributed.is_initialized():
            group = torch.distributed.group.WORLD
        if group is not None and group.size() > 1:
            group.allreduce([sums]).wait()
        return {name: (sums[i, 0].item(), sums[i, 1].item()) for i, name in enumerate(names)}

    def _doing(self) -> tuple[str, int | None]:
        """Return (what this rank executes now, the global rank that it waits for, or None). For the guard's thread."""
        instruction = self._executor.current
        move = None if self._transfers is None else self._transfers.current
        doing, waits_for = self._computing(instruction)
        return (doing if move is None else f"{doing}, with {move} under way"), waits_for

    def _computing(self, instruction: Instruction | None) -> tuple[str, int | None]:
        waiting = self._channels.waiting
        reduction = self._chain.current or self._late_chain.current
        if instruction is None:
            return f"no instruction, waiting for {reduction}" if reduction else "between batches", None
        if self._lanes is not None and (word := self._lanes.waiting) is not None:
            return f"{instruction} waiting for {word}", None
        if self._transfers is not None and self._transfers.waiting is not None:
            move, peer = self._transfers.waiting
            return f"{instruction} waiting for {move}", peer
        if waiting is None:
            if instruction.kind in AWAITS_REDUCTIONS and reduction is not None:
                return f"{instruction} waiting for {reduction}", None
            return str(instruction), None
        return f"{instruction} waiting for {waiting}", self._channels.peer_of(waiting)
