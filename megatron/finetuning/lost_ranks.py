"""Fine-tuning that goes on without lost ranks, and with new processes in their places: `--go_on_without_lost_ranks`.

`Recovery` says what happens. Replicas of a fine-tuned pipeline have consecutive ranks. Each replica has the whole state
of each stage: the trained weights, or the adapters, with their optimizer. Frozen weights are read from the model's
folder. So a new process reads those of its stages there, and gets the rest from the first rank with the same stages.

What no file tells a new process is in the job's store (`begin`): the partition, which rank 0 may have made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch.distributed as dist

from megatron.finetuning import checkpoint
from megatron.finetuning.assembly import BuiltPipeline
from megatron.finetuning.data.batches import Share
from megatron.finetuning.partition_file import PartitionFile
from megatron.finetuning.plan import RunPlan
from megatron.finetuning.report import Report
from megatron.pipeline.library.ranks import Groups, Ranks, consecutive_ranks
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.gradients import NormReduction
from megatron.pipeline.survivors import ReplicaRank, Survivors
from megatron.trainer.report.membership_change import MembershipChange
from megatron.trainer.run.recovery import RecoveringRun, Recovery

_PARTITION = "partition"  # a key of the job's store
_NUM_BUILT, _ALL_BUILT = "ranks that have built their parts", "all ranks have built their parts"  # keys, too
_PACE = 0.02  # seconds between two looks at the store
_COMPARED = ("signature", "stages", "schedule", "seed", "optim", "samples", "batch_size", "flags")
"""The facts in which a new process has to agree with the others. The others have compared the files' contents."""


class TunedRun(RecoveringRun, Protocol):
    """The run of a fine-tuning's loop, which is the `Trainer`."""

    pipeline: BuiltPipeline
    report: Report
    facts: dict[str, object]

    def size_after(self, iteration: int) -> int: ...

    def stand_after(self, iteration: int) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class LostRanks(Recovery[TunedRun]):
    """The handler of lost ranks of a fine-tuning.

    Args:
        args: the flags of the run.
        store, is_new: as for `Recovery`.

    Attributes:
        ranks: the ranks of the whole job.
        has_begun: whether losses are accepted.
    """

    has_begun = False

    def __init__(self, args: argparse.Namespace, store: dist.Store, *, is_new: bool = False) -> None:
        self._args = args
        self.ranks = consecutive_ranks(args.rank, args.world_size, args.data_parallel_size)
        super().__init__(args, store, rank=args.rank, world_size=args.world_size, is_new=is_new)

    def require(self, plan: RunPlan) -> None:
        """Prove the programs of a plan without lost ranks. Collective.

        Raises ValueError for a plan whose stages cannot go on without a rank, and as `Recovery.prove` does.
        """
        why = refusal(plan)
        if why is not None:
            raise ValueError(f"--go_on_without_lost_ranks: {why}; or leave --go_on_without_lost_ranks out")
        self.prove(plan.schedule, self._args.gradient_accumulation_steps, num_replicas=self._args.data_parallel_size)

    def begin(self, plan: RunPlan) -> None:
        """Accept losses from the moment on when all ranks have built their parts, which this waits for. Collective.

        A rank that trained earlier could break the collectives with which another one still builds its part.

        Raises OnThisRank if a rank is lost before, or does not come within `--distributed_timeout_minutes`.
        """
        membership, deadline = self.membership, time.monotonic() + self._timeout.total_seconds()
        if membership.rank == 0:
            membership.ask(lambda store: store.set(_PARTITION, plan.partition.to_json()))
        if membership.ask(lambda store: store.add(_NUM_BUILT, 1)) == membership.world_size:
            membership.ask(lambda store: store.set(_ALL_BUILT, ""))
        while not membership.ask(lambda store: store.check([_ALL_BUILT])):
            if membership.alarm is not None:
                raise OnThisRank(f"{membership.alarm}, while the ranks built their parts; start the job again")
            if time.monotonic() > deadline:
                raise OnThisRank(
                    f"another rank has not built its part within {self._timeout}; see what it waits for, or give a "
                    "longer --distributed_timeout_minutes"
                )
            time.sleep(_PACE)
        membership.accept_losses()
        self.has_begun = True

    def partition(self) -> PartitionFile:
        """The partition of the job, for a new process."""
        return PartitionFile.from_json(self.membership.ask(lambda store: store.get(_PARTITION)).decode())

    # --- the run

    def _place_of(self, rank: int) -> ReplicaRank:
        return ReplicaRank(*divmod(rank, len(self.ranks.pipeline)))

    def _note(self, run: TunedRun, settled: int | None, stop_requests: int) -> dict | None:
        if not self.has_state:
            return None
        update, sums = self._update(run), self._update(run).sums_of_newest()
        return {
            "version": update.versions.newest, "settled": run.iteration if settled is None else settled,
            "stop_requests": stop_requests, "sums": None if sums is None else asdict(sums),
            "writes": run.report.writes, "facts": _compared(run),
        }  # fmt: skip

    def _require_same(self, run: TunedRun, note: Mapping) -> None:
        own = _compared(run)
        for name in _COMPARED:
            if own[name] != note["facts"][name]:
                raise OnThisRank(
                    f"this process has another {name} ({own[name]}) than those with which the job began "
                    f"({note['facts'][name]}); give this host the same files"
                )

    def _abandon(self, run: TunedRun) -> list[BatchReport]:
        pipeline, reports = run.pipeline, []
        if pipeline.engine is not None:
            reports = pipeline.engine.abandon(self._args.failure_timeout)
            pipeline.engine = None
        for stage in pipeline.stages:
            stage.abandon()
        pipeline.results.take()
        return reports

    def _end_engine(self, run: TunedRun) -> None:
        engine, run.pipeline.engine = run.pipeline.engine, None
        engine.close()

    def _next_size(self, run: TunedRun, notes: Mapping[int, dict]) -> int:
        return run.size_after(max(each["version"] for each in notes.values()))

    def _take_on(self, run: TunedRun, of_ranks: Mapping[int, dict]) -> list[BatchReport]:
        if not self.has_state:
            return []
        newest = max(each["version"] for each in of_ranks.values())
        found = (each["sums"] for each in of_ranks.values() if each["version"] == newest and each["sums"])
        sums = next(found, None)
        reports = self._update(run).go_on_from(newest, sums and _sums(sums))
        run.stand_after(newest)
        return reports

    def _begin(self, run: TunedRun, survivors: Survivors | None, notes: Mapping[int, dict]) -> None:
        own, present, pipeline = dist.get_rank(), self.epoch.ranks, run.pipeline
        columns = [[place for place, rank in enumerate(present) if self._place_of(rank).rank == stage]
                   for stage in range(len(self.ranks.pipeline))]  # fmt: skip
        column = columns[pipeline.place]
        if survivors is None:
            ranks = self.ranks
        else:
            ranks = Ranks((tuple(present.index(self._rank_of(each)) for each in survivors.ranks),), own)
        groups = Groups(ranks, self._timeout)
        copies = None if survivors is None else groups.of(columns)
        self._hand_over(run, columns, notes)
        self._update(run).regroup(
            data_parallel_group=groups.replicas, copies_group=copies, job_group=groups.reductions,
            counts_in_norm=own == column[0],
        )  # fmt: skip
        pipeline.ranks, pipeline.groups, pipeline.is_first = ranks, groups, own == column[0]
        self._change_program(run, survivors)
        if not any(note["writes"] for note in notes.values()) and own == 0:
            run.report.take_over()

    def _change_program(self, run: TunedRun, survivors: Survivors | None) -> None:
        pipeline, num_replicas = run.pipeline, self._args.data_parallel_size
        if survivors is None:
            program, share = pipeline.schedule, Share(pipeline.ranks.replica, num_replicas)
        else:
            program, share = survivors.schedule, Share(together=num_replicas)
        run.survivors = survivors
        pipeline.feed.share = share
        pipeline.feed.abandon(pipeline.feed.num_microbatches)  # the numbers of microbatches begin anew, too
        pipeline.begin(program, first_batch=run.iteration, first_microbatch=pipeline.feed.num_microbatches)

    def _report(self, run: TunedRun, change: MembershipChange) -> None:
        run.report.membership(change)

    # --- parts

    def _update(self, run: TunedRun) -> ModuleUpdate:
        return run.pipeline.update

    def _rank_of(self, place: ReplicaRank) -> int:
        """The rank in the whole job."""
        return self.ranks.pipelines[place.replica][place.rank]

    def _hand_over(self, run: TunedRun, columns: list[list[int]], notes: Mapping[int, dict]) -> None:
        """Give each new process the state of the first rank with the same stages that has it. Collective."""
        own = dist.get_rank()
        for column in columns:
            holder, *_ = [place for place in column if self.epoch.ranks[place] in notes]
            for new in [place for place in column if self.epoch.ranks[place] not in notes]:
                if own == holder:
                    dist.send_object_list([(run.state(), checkpoint.state_of(run.pipeline))], dst=new)
                elif own == new:
                    found: list[Any] = [None]
                    dist.recv_object_list(found, src=holder)
                    [(state, of_pipeline)] = found
                    checkpoint.load_state(run.pipeline, of_pipeline)
                    run.load_state(state)
                    self.has_state = True


def _compared(run: TunedRun) -> dict[str, object]:
    return {name: run.facts[name] for name in _COMPARED}


def _sums(note: Mapping[str, Any]) -> NormReduction:
    losses = {name: tuple(pair) for name, pair in note["losses"].items()}
    return replace(NormReduction(**note), losses=losses)


def refusal(plan: RunPlan) -> str | None:
    """Why a run of these stages cannot go on without a rank, and the remedy; None if it can."""
    shared = next((pair for pair, edge in plan.edge_bytes.items() if edge.parameters), None)
    if shared is not None:
        return (
            f"stages {shared[0]} and {shared[1]} share a trained parameter, whose value one sends to the other, and "
            "where ranks are lost a stage has several copies; make a partition with both uses in one stage, or train "
            "adapters (--lora_r)"
        )
    if plan.counted:
        return (
            f"{plan.captured.model_name} has batch norm, whose statistics each replica counts by itself; give another "
            "model"
        )
    return None
