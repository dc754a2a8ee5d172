"""Go on without lost ranks: `--go-on-without-lost-ranks`.

1. The job's `Membership` notices that a rank is lost, or a transfer of this rank fails. The alarm breaks this process's
   connections, so that whatever waits for another rank ends with an error.
2. Every rank gives up what it has in flight, and comes to `Membership.agree`. With that it says which weight version it
   has, and what was summed over all ranks for the step to that version.
3. The ranks that are left form new process groups, which megatron.core then has in place of the old ones. A rank that
   lacks the newest version makes it: it has the reduced gradients, and the others tell it the sums. Where replicas
   share out the optimizer, it is cut anew (`lost_shards`).
4. They make the program without the lost ranks (`pipeline.survivors`), which is proved, and repeat the batch.

If another rank is lost meanwhile, this begins again. If no rank is left that has a stage, the job ends.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist

from megatron import backend
from megatron.backend.gloo import connecting_within
from megatron.documents import counted
from megatron.pipeline.program.copies import share_of
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.connections import break_connections, open_connections
from megatron.pipeline.runtime.failure.errors import OnThisRank, number_of
from megatron.pipeline.runtime.failure.failure_board import silenced
from megatron.pipeline.runtime.failure.membership import Membership
from megatron.pipeline.runtime.stages.megatron.groups import name_groups_of_survivors
from megatron.pipeline.runtime.transport.channels import TransferError, forget_names
from megatron.pipeline.runtime.update.gradients import NormReduction
from megatron.pipeline.survivors import ReplicaRank, Survivors, without
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.run.lost_shards import LostShards
from megatron.trainer.start_up.run import Run

_CONNECTING = 5.0
"""Seconds that ranks take to connect, beside `--failure-timeout`, within which a rank that does not come is lost."""
_MOST_ATTEMPTS = 3
_ALARM_PATIENCE = 2.0
"""Seconds that a rank whose transfer has failed waits for others' alarm before it raises one."""


class LostRanks:
    """Notices lost ranks, and takes this rank's run on without them.

    Args:
        args: the configuration with which the run began.
        store: the job's store.
    """

    def __init__(self, args: TrainConfig, store: dist.Store, *, rank: int, world_size: int) -> None:
        self._args = args
        self._world_size = world_size
        self._timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self.membership = Membership(
            store, rank, world_size, failure_timeout=args.failure_timeout, on_alarm=self._on_alarm
        )
        self._kept = open_connections()  # the store's, over which the ranks agree
        if number_of("TORCHELASTIC_RESTART_COUNT", 0):
            raise OnThisRank(
                f"rank {rank} was started again, and a job that goes on without a rank does not take it back; leave "
                "--max-restarts out"
            )
        self.epoch = self.membership.begin(self._timeout.total_seconds())
        self._shards = LostShards(args, rank) if args.use_distributed_optimizer else None

    def _on_alarm(self, sentence: str) -> None:
        break_connections(kept=self._kept)

    def comes_from_loss(self, error: Exception) -> bool:
        """Whether an error of this rank follows from the loss of another. Raises the alarm if nobody has."""
        deadline = time.monotonic() + _ALARM_PATIENCE
        if not failure_guard.is_consequence(error):
            deadline = 0.0  # an error of this rank's own, unless it comes from broken connections
        while self.membership.alarm is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.membership.alarm is None and failure_guard.is_consequence(error):
            peers = [self.epoch.ranks[error.peer_rank]] if isinstance(error, TransferError) else []
            self.membership.suspect(peers, " ".join(str(error).split()))
        return self.membership.alarm is not None

    def go_on(self, run: Run, settled: int, stop_requests: int) -> tuple[int, int, list[BatchReport]]:
        """Collective over the ranks that are left: take the run on without the lost ones.

        Args:
            run: the run, which has an error that comes from a loss.
            settled: the last iteration after which this rank has done all that is due between batches.
            stop_requests: those of which this rank knows.

        Returns:
            Both of all ranks, and the reports of this rank's batches that have stepped and are not reported yet.

        Raises:
            ValueError: no rank is left that has some stage, or the program would be slower than `--minimum-speed`.
        """
        start = time.monotonic()
        reports = self._give_up(run)
        lost: dict[int, str] = {}
        num_failed = 0
        while True:
            note = {
                "version": run.update.versions.newest, "settled": settled, "stop_requests": stop_requests,
                "sums": _as_note(run.update.sums_of_newest()),
                "shards": None if self._shards is None else self._shards.note(run),
            }  # fmt: skip
            self.epoch = self.membership.agree(json.dumps(note))
            lost |= self.epoch.lost
            notes = [json.loads(each) for each in self.epoch.notes.values()]
            try:
                began = time.monotonic()
                survivors = self._survivors()
                searched = time.monotonic() - began  # others may have taken as much longer
                with connecting_within(timedelta(seconds=self._args.failure_timeout + _CONNECTING + searched)):
                    self._make_groups()
                    reports += self._take_on(run)
                    self._begin(run, survivors)
            except Exception as error:
                num_failed += 1
                if not self.comes_from_loss(error):
                    if not isinstance(error, RuntimeError) or num_failed > _MOST_ATTEMPTS:
                        raise
                    self.membership.suspect([], " ".join(str(error).split()))  # a rank that was late, for example
                self._give_up(run)
            else:
                break
        named = ", ".join(f"rank {rank} ({why})" for rank, why in sorted(lost.items())) or "no rank"
        run.reporter.say(
            f"lost {named}: {counted(len(self.epoch.ranks), 'rank')} of {self._world_size} go on from iteration "
            f"{run.iteration} after {time.monotonic() - start:.1f} s"
            + _speed(run.survivors)
            + ("" if self._shards is None else self._shards.tell())
        )
        stepped = {report.batch: report for report in reports if report.batch < run.iteration}
        for each in notes:
            stop_requests |= each["stop_requests"]
        settled = min(run.iteration, *(each["settled"] for each in notes))  # a checkpoint may be from before
        return settled, stop_requests, [stepped[batch] for batch in sorted(stepped)]

    def confirm(self) -> None:
        """Return once it is sure that this process is in the job. See `Membership.confirm`."""
        self.membership.confirm()

    # --- parts

    def _give_up(self, run: Run) -> list[BatchReport]:
        break_connections(kept=self._kept)
        reports: list[BatchReport] = []
        if run.engine is not None:
            reports = run.engine.abandon(self._args.failure_timeout)
            run.engine = None
        for stage in run.stages:
            stage.abandon()
        run.deferred_bytes.add(-run.deferred_bytes.now)
        if dist.is_initialized():
            dist.destroy_process_group()
        return reports

    def _make_groups(self) -> None:
        """Form the process group of the ranks that are left. Collective over these."""
        forget_names()  # the epoch has a part of the store of its own
        with silenced():  # a loss meanwhile is told in a sentence
            dist.init_process_group(
                self._args.distributed_backend, store=self.membership.store(), timeout=self._timeout,
                rank=self.epoch.ranks.index(self.membership.rank), world_size=len(self.epoch.ranks),
            )  # fmt: skip

    def _take_on(self, run: Run) -> list[BatchReport]:
        """Begin anew with the newest version that a rank has. Returns the reports of steps that this rank makes."""
        of_ranks = {rank: json.loads(note) for rank, note in self.epoch.notes.items()}
        notes = list(of_ranks.values()) if self._shards is None else self._shards.choose(run, of_ranks)
        if not notes:  # a checkpoint is loaded
            return []
        newest = max(each["version"] for each in notes)
        sums = next((each["sums"] for each in notes if each["version"] == newest and each["sums"]), None)
        reports = run.update.go_on_from(newest, sums and NormReduction(**sums))
        behind = newest - run.iteration
        run.iteration = newest
        run.consumed_samples += behind * self._args.global_batch_size  # the rules refuse batches of several sizes
        return reports

    def _begin(self, run: Run, survivors: Survivors) -> None:
        """Let groups, stages and engine be those of the program of the ranks that are left. Collective over these."""
        args, own, ranks = self._args, dist.get_rank(), range(dist.get_world_size())
        schedule = survivors.schedule
        copies = CopyRanks.of(schedule, rank=own, ranks=ranks)
        name_groups_of_survivors(
            copies.copies, pipeline_rank=survivors.ranks[own].rank, num_pipeline_ranks=args.pipeline_model_parallel_size
        )
        if self._shards is None:
            run.update.regroup(copies)
        else:
            self._shards.rebuild(run, copies, epoch=self.epoch.number, ranks=self.epoch.ranks)
        for stage, number in zip(run.stages, schedule.stages_of(own), strict=True):
            stage.take_from_now(share_of(schedule.copies, number))
            stage.recompute_from_now(schedule.recomputes(number), keeps=schedule.keeps(number))
        run.engine = PipelineEngine(
            schedule, run.stages, run.update, ranks=ranks, timeout=self._timeout, backend=args.distributed_backend,
            device=backend.device(), first_batch=run.iteration, deferred_bytes=run.deferred_bytes,
            first_microbatch=run.consumed_samples // args.micro_batch_size,
        )  # fmt: skip
        run.survivors = survivors
        run.go_on_with(replace(run.args, rank=own, world_size=len(ranks)))
        run.reporter.take_over()
        run.take_over_saving()

    def _survivors(self) -> Survivors:
        args = self._args
        num_replicas = args.data_parallel_size
        lost = {
            ReplicaRank(replica=rank % num_replicas, rank=rank // num_replicas)
            for rank in set(range(self._world_size)).difference(self.epoch.ranks)
        }
        size = args.global_batch_size // (args.micro_batch_size * num_replicas)
        survivors = without(args.schedule, size, num_replicas=num_replicas, lost=lost)
        if survivors.slowdown * args.minimum_speed > 1:
            raise ValueError(
                f"without {counted(len(lost), 'rank')} the job has {1 / survivors.slowdown:.0%} of its speed, less "
                f"than --minimum-speed {args.minimum_speed:g}; restart it with all ranks from its last checkpoint"
            )
        return survivors


def _as_note(sums: NormReduction | None) -> dict | None:
    return None if sums is None else asdict(sums)


def _speed(survivors: Survivors) -> str:
    return (
        f"; a batch takes {survivors.slowdown:.2f} times as long as with all ranks, as simulated (at least "
        f"{survivors.bound / survivors.undisturbed:.2f}); program {survivors.schedule.short_hash}"
    )
