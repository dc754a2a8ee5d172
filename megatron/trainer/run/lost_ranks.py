"""Pretraining that goes on without lost ranks, and with new processes in their places: `--go-on-without-lost-ranks`.

`Recovery` says what happens. A run over megatron.core adds to it:

- New process groups replace megatron.core's old groups. If replicas shard the optimizer, it is sharded again
  (`lost_shards`).
- A *place* is a pipeline rank of a replica: one rank, or the ranks that compute its layers together (tensor and context
  parallelism). Under expert parallelism it is that of all replicas that share out experts (`replicas_of_place`). Each
  of these takes a microbatch of its own, and a microbatch of the program stands for all of them. Programs, losses and
  returns are of whole places (`Membership` takes care of that), and each rank of a place connects with the ranks at the
  same index in other places.
- Ranks that are lost before the first batch are left out, too: those that remain prove the programs and build their
  parts together, and agree when each has built its part (`build`).
- A checkpoint that was being written is found complete, or dropped.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

import torch.distributed as dist

from megatron.pipeline.program.copies import share_of
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.runtime.failure.failure_board import silenced
from megatron.pipeline.runtime.update.gradients import NormReduction
from megatron.pipeline.survivors import ReplicaRank, Survivors
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    num_places,
    ranks_of_place,
    replica_in_place,
    replicas_of_place,
)
from megatron.trainer.changes.change import end_engine
from megatron.trainer.changes.state_in_memory import hand_to_new
from megatron.trainer.report.membership_change import MembershipChange
from megatron.trainer.run.assembly import assemble, tell_new_processes
from megatron.trainer.run.core_groups import CoreGroups
from megatron.trainer.run.lost_shards import LostShards, ending_alone
from megatron.trainer.run.places import part_of, place_of
from megatron.trainer.run.recovery import MOST_ATTEMPTS, PATIENCE, Recovery
from megatron.trainer.start_up.initialize import set_up
from megatron.trainer.start_up.optimizer import choose_kernel
from megatron.trainer.start_up.run import Run, TrainingProgram, build_engine


class LostRanks(Recovery[Run]):
    """The handler of lost ranks of a run over megatron.core.

    Args:
        args: the configuration with which the run began.
        store, rank, world_size, is_new: as for `Recovery`.
    """

    _groups: CoreGroups

    def __init__(
        self, args: TrainConfig, store: dist.Store, *, rank: int, world_size: int, is_new: bool = False
    ) -> None:
        self._args = args
        super().__init__(args, store, rank=rank, world_size=world_size, place_size=ranks_of_place(args), is_new=is_new)
        self._since: float | None = None  # when the first loss before the first batch was noticed
        self._of_save = ""  # the log line about a save that was broken off
        self._dropped: int | None = None  # the iteration of this save, if it made no checkpoint
        self._shards = LostShards(args, rank, is_new=is_new) if args.use_distributed_optimizer else None
        if self.has_state and rank == self.epoch.ranks[0]:
            self.membership.accept_losses()
        size = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        self.prove(args.schedule, size, num_replicas=num_places(args))

    def build(self, program: TrainingProgram) -> Run:
        """Build the run together with the other ranks, and without those that are lost meanwhile. Collective.

        If all ranks that are left have built their parts when another one is lost, they keep these and only form groups
        anew, unless they share out the optimizer's state, of which a part is lost then. Otherwise all build again. So
        no rank trains while another one builds, whose collectives its connections could break.

        Raises ValueError as `assemble` does, or if some stage is on no remaining rank.
        """
        num_failed = 0
        while True:
            run = self.told(partial(self._assembled, program))
            alarm = self.membership.alarm
            self._agree_to_build(run)
            are_built = all(json.loads(note) is not None for note in self.epoch.notes.values())
            if are_built and not self.epoch.lost:
                break
            reports = self._give_up(run)
            if are_built and self._shards is None:
                self._form(run, reports, start=self._since, settled=run.iteration, stop_requests=0)
                return run
            if run is not None:
                _close(run)
            run = None
            gc.collect()
            num_failed = 0 if self.epoch.lost else num_failed + 1
            if num_failed > MOST_ATTEMPTS:
                self.membership.accept_losses(False)
                why = "an error of another rank" if alarm is None else alarm
                raise OnThisRank(f"no rank is lost, and the ranks could not build their parts: {why}")
        if self._since is not None:
            self._report_change(run, start=self._since)
        return run

    def go_on(
        self, run: Run, settled: int, stop_requests: int, *, admits: bool = False
    ) -> tuple[int, int, list[BatchReport]]:
        if admits and self._shards is not None:
            self._shards.prepare_move(run)
        return super().go_on(run, settled, stop_requests, admits=admits)

    def come_back(self, run: Run) -> None:
        if self._shards is not None:
            self._shards.require_takes_over(run)
        self._groups.note_layers()
        super().come_back(run)

    # --- before the first batch

    def _prove(self) -> None:
        if not self.has_state:
            super()._prove()
            return
        while not self._proves():
            self._agree_to_build(None)

    def _proves(self) -> bool:
        """Prove the programs; return whether all are proved, and no rank was lost before."""
        try:
            self.proved.prove()
        except OnThisRank:
            if self.membership.alarm is None:
                raise
            return False
        return True

    def _agree_to_build(self, run: Run | None) -> None:
        """Agree on the next epoch: after a loss, or because this rank has built its part. Collective.

        `run`: None if this rank has not built its part over the ranks of the epoch.
        """
        noticed = time.monotonic() if run is None else None
        note = json.dumps(None if run is None else self._note(run, run.iteration, 0))
        patience = max(PATIENCE, self._timeout.total_seconds())  # what a rank builds by itself, no alarm interrupts
        self.epoch = self.membership.agree(note, timeout=2 * patience, patience=patience)
        self._lost |= self.epoch.lost
        if run is None or self.epoch.lost:
            self._since = self._since or noticed or time.monotonic()

    def _assembled(self, program: TrainingProgram) -> Run | None:
        """The run of the epoch's ranks; None if a rank was lost, or late, while it was built. Collective over these."""
        run: Run | None = None
        try:
            survivors = self._program_of_present()
            with self._groups.connecting(meeting=self._timeout), silenced():
                self._form_groups()
                args = replace(self._args, rank=dist.get_rank(), world_size=dist.get_world_size())
                args = set_up(args, group=lambda args: self._groups.name(args, survivors))
                silent = self._timeout.total_seconds() / 2  # the others notice a stop before their waits time out
                reading = self.membership.silent_for(silent) if args.rank == 0 else None
                run = assemble(
                    args, program, copies=self._groups.copies, takes_over=self.epoch.number > 0, reading=reading
                )
                self._groups.note_layers()
                if survivors is not None:
                    self._change_program(run, survivors)
            tell_new_processes(run, self.membership)
            return run
        except Exception as error:
            if run is not None:
                _close(run)
            if not self.comes_from_loss(error):
                if not failure_guard.is_timeout(error):
                    raise
                self.membership.suspect([], " ".join(str(error).split()))  # who does not come to agree is lost
        return None

    # --- the run

    def _make_epoch_groups(self) -> CoreGroups:
        return CoreGroups(self._args)

    def _place_of(self, rank: int) -> ReplicaRank:
        return place_of(self._args, rank)

    def _part_of(self, rank: int) -> tuple[int, ...]:
        return part_of(self._args, rank)

    def _note(self, run: Run, settled: int | None, stop_requests: int) -> dict | None:
        shards = None if self._shards is None else self._shards.note(run)
        if not (self.has_state or shards):  # a new process may have a shard on which the other ranks do not count yet
            return None
        return {
            "version": run.update.newest_version, "settled": run.iteration if settled is None else settled,
            "stop_requests": stop_requests, "sums": _as_note(run.update.sums_of_newest()),
            "writes": run.reporter.writes, "shards": shards, "is_new": not self.has_state,
            "data": run.args.data_digest, "train_iters": run.args.train_iters, "iteration": run.iteration,
            "consumed": run.consumed_samples, "consumed_valid": run.consumed_valid_samples, "flops": run.flops,
            "saved": run.saved_iteration, "has_saved": run.has_saved,
            "broken_off": None if run.writer is None else run.writer.broken_off,
        }  # fmt: skip

    def _require_same(self, run: Run, note: Mapping) -> None:
        if run.args.data_digest not in (None, note["data"]):  # None: this rank reads no data
            raise OnThisRank("the data are not those with which the job began; give this host the same files")

    def _hear(self, run: Run, notes: Mapping[int, dict]) -> None:
        if run.writer is not None:
            run.writer.has_saved |= any(each["has_saved"] for each in notes.values())

    def _prepare(self, run: Run) -> None:
        if run.writer is not None:
            run.writer.abandon()

    def _abandon(self, run: Run) -> list[BatchReport]:
        reports: list[BatchReport] = []
        if run.engine is not None:
            reports = run.engine.abandon(self._args.failure_timeout)
            run.engine = None
        for stage in run.stages:
            stage.abandon()
        run.deferred_bytes.add(-run.deferred_bytes.now)
        return reports

    def _end_engine(self, run: Run) -> None:
        end_engine(run)

    def _next_size(self, run: Run, notes: Mapping[int, dict]) -> int:
        consumed = max((each["version"], each["consumed"]) for each in notes.values())[1]
        return self._args.batch_sizes.num_microbatches(consumed)

    def _report(self, run: Run, change: MembershipChange) -> None:
        run.reporter.membership(change)

    def _formed(self, run: Run) -> None:
        if self._shards is not None:
            run.reporter.say(self._shards.tell())
        if run.writer is not None:
            run.reporter.say(self._of_save)
            run.writer.broken_off = None
            if self._dropped is not None and run.saved_iteration == self._dropped:
                run.saved_iteration = None

    def _take_on(self, run: Run, of_ranks: Mapping[int, dict]) -> list[BatchReport]:
        notes = list(of_ranks.values())
        if self._shards is not None:
            notes, self.has_state = self._shards.choose(run, of_ranks), not self._shards.is_new
        if not notes or not self.has_state:  # a checkpoint is loaded, or other ranks hand the state over
            return []
        newest = max(each["version"] for each in notes)
        sums = next((each["sums"] for each in notes if each["version"] == newest and each["sums"]), None)
        reports = run.update.go_on_from(newest, sums and NormReduction(**sums))
        run.stand_after(newest)
        return reports

    def _begin(self, run: Run, survivors: Survivors | None, notes: Mapping[int, dict]) -> None:
        own, ranks = dist.get_rank(), range(dist.get_world_size())
        self._settle_saving(run, notes)
        self._groups.name(self._args, survivors)
        copies = self._groups.copies
        if self._shards is None:
            self._groups.rebind(run)
            if len(notes) < len(ranks):
                self._hand_over(run, list(notes.values()))
            run.update.regroup(copies)
        else:
            if not self.has_state:
                _take_place(run, next(iter(notes.values())))
            self.told(partial(self._shards.rebuild, run, copies, epoch=self.epoch.number, ranks=self.epoch.ranks))
        self.has_state = True
        run.go_on_with(replace(run.args, rank=own, world_size=len(ranks)))
        self._change_program(run, survivors)
        if not any(note["writes"] for note in notes.values()):
            run.reporter.take_over()
        run.take_over_saving()

    def _settle_saving(self, run: Run, notes: Mapping[int, dict]) -> None:
        """Find out whether a save that was broken off has made its checkpoint. Collective over the present ranks."""
        self._of_save, self._dropped = "", None
        broken_off = next((each["broken_off"] for each in notes.values() if each["broken_off"] is not None), None)
        if broken_off is None:
            return
        run.take_over_saving()  # behind this, a stopped process that was rank 0 can commit nothing
        is_complete, iteration = run.writer.settle(*broken_off), broken_off[0]
        self._dropped = None if is_complete else iteration
        outcome = "is complete" if is_complete else "is dropped"
        self._of_save = (
            f"checkpoint of iteration {iteration} in {run.args.save}, which was being written when ranks were lost, "
            f"{outcome}"
        )

    def _change_program(self, run: Run, survivors: Survivors | None) -> None:
        args, own = self._args, dist.get_rank()
        schedule, place = args.schedule, own // self._place_size // num_places(args)
        if survivors is not None:
            schedule, place = survivors.schedule, own // self._place_size
        for stage, number in zip(run.stages, schedule.stages_of(place), strict=True):
            share = None if survivors is None else share_of(schedule.copies, number)
            stage.take_from_now(share, replica=replica_in_place(args, own), num_replicas=replicas_of_place(args))
            stage.recompute_from_now(schedule.recomputes(number), keeps=schedule.keeps(number))
        run.survivors = survivors
        run.engine = build_engine(run.args, run.model_and_optimizer, run.position(), survivors=survivors)

    def _hand_over(self, run: Run, notes: list[dict]) -> None:
        """Give new processes the state of the other ranks, whose notes are `notes`. Collective.

        Raises as `ending_alone` does.
        """
        note = notes[0]
        assert {each["iteration"] for each in notes} == {each["version"] for each in notes} == {note["iteration"]}, (
            "the others do not train until all have the state"
        )
        with ending_alone():
            hand_to_new(run.model_and_optimizer, iteration=note["iteration"], is_new=not self.has_state)
        if self.has_state:
            return
        choose_kernel(run.optimizer, run.args.optimizer_kernel)  # as after loading a checkpoint
        _take_place(run, note)
        self.has_state = True


def _close(run: Run) -> None:
    """Close what a run that is given up has opened; another one opens it again."""
    run.reporter.close()
    if run.writer is not None:
        run.writer.close()


def _take_place(run: Run, note: Mapping) -> None:
    """Set a new process's run to the position of the others. `note`: of a rank that has state."""
    run.iteration, run.saved_iteration = note["iteration"], note["saved"]
    run.consumed_samples, run.consumed_valid_samples = note["consumed"], note["consumed_valid"]
    run.flops, run.args = note["flops"], replace(run.args, train_iters=note["train_iters"], data_digest=note["data"])


def _as_note(sums: NormReduction | None) -> dict | None:
    return None if sums is None else asdict(sums)
