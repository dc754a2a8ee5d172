"""Continuation of a run without lost ranks, and with new processes in their places: `--go-on-without-lost-ranks`.

1. The job's `Membership` notices that a rank is lost, or a transfer of this rank fails. The alarm breaks this process's
   connections, so that everything that waits for another rank ends with an error.
2. Every rank gives up its microbatches in flight, and calls `Membership.agree`. There it tells the others which weight
   version it has, and the sums over all ranks for the step to that version.
3. The remaining ranks form new process groups, which replace megatron.core's old groups. A rank that lacks the newest
   version makes it: the rank has the reduced gradients, and receives the sums from other ranks. If replicas shard the
   optimizer, the optimizer is sharded again (`lost_shards`).
4. The ranks switch to the program without the lost ranks, which was proved before the run began (`proved_losses`), and
   repeat the batch.

If another rank is lost meanwhile, this begins again. If some stage is on no remaining rank, the job ends. Ranks that
are lost before the first batch are left out, too: those that remain prove the programs and build their parts together,
and agree when each has built its part (`build`).

A *place* is a pipeline rank of a replica: one rank, or the ranks that compute its layers together (tensor and context
parallelism). Under expert parallelism it is that of all replicas that share out experts (`replicas_of_place`). Each of
these takes a microbatch of its own, and a microbatch of the program stands for all of them. Programs, losses and
returns are of whole places (`Membership` takes care of that), and each rank of a place connects with the ranks at the
same index in other places.

A launcher may start a new process in the place of a lost one. The new process builds its part of the model alone, while
the others train, and then asks to be admitted (`come_back`). The other ranks decide after which batch they admit it:
the request travels with a batch's norm reduction, as a stop request does. After this batch all ranks agree, as above,
and the new process gets weights, optimizer and position from the ranks that have them. If all ranks are present, the
program of the flags runs again, as if no rank had been lost.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from megatron.pipeline.program.copies import share_of
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.errors import OnThisRank, SameEverywhere
from megatron.pipeline.runtime.failure.failure_board import silenced
from megatron.pipeline.runtime.failure.membership import Membership
from megatron.pipeline.runtime.transport.channels import TransferError
from megatron.pipeline.runtime.update.gradients import NormReduction
from megatron.pipeline.survivors import Survivors
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
from megatron.trainer.run.epoch_groups import EpochGroups
from megatron.trainer.run.lost_shards import LostShards, ending_alone
from megatron.trainer.run.places import part_of
from megatron.trainer.run.proved_losses import ProvedLosses
from megatron.trainer.start_up.initialize import set_up
from megatron.trainer.start_up.optimizer import choose_kernel
from megatron.trainer.start_up.run import Run, TrainingProgram, build_engine

_Made = TypeVar("_Made")
_PATIENCE = 300.0
"""Seconds after which a rank that is alive but does not come is lost, for example because its data loader hangs.

Work that keeps ranks from hearing an alarm, such as a save or the search for a program, takes about as long on all of
them."""
_MOST_ATTEMPTS = 3
_ALARM_PATIENCE = 2.0
"""Seconds that a rank with a failed transfer waits for another rank's alarm before it raises one."""
_JOINING = 30 * 24 * 3600.0
"""Seconds that a new process waits to be admitted; it gives up earlier if no process is left that could admit it."""


class LostRanks:
    """The handler of lost ranks: it notices them, and lets this rank continue without them or with new processes.

    Args:
        args: the configuration with which the run began.
        store: the job's store.
        is_new: whether this process takes the place of a lost one.
    """

    def __init__(
        self, args: TrainConfig, store: dist.Store, *, rank: int, world_size: int, is_new: bool = False
    ) -> None:
        self._args = args
        self._world_size = world_size
        self._timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self._place_size = ranks_of_place(args)
        self.membership = Membership(
            store, rank, world_size, failure_timeout=args.failure_timeout,
            on_alarm=lambda sentence: self._groups.break_waits(), group_size=self._place_size,
        )  # fmt: skip
        self._groups = EpochGroups(args)
        self._lost: dict[int, str] = {}  # rank -> reason, of the losses that are not reported yet
        self._since: float | None = None  # when the first loss before the first batch was noticed
        self.has_state = not is_new  # whether weights, optimizer and position are the job's
        self._of_save = ""  # the log line about a save that was broken off
        self._dropped: int | None = None  # the iteration of this save, if it made no checkpoint
        self._shards = LostShards(args, rank, is_new=not self.has_state) if args.use_distributed_optimizer else None
        self.proved = ProvedLosses(args, self.membership)
        if not self.has_state:
            self.proved.prove()  # reads the proofs of the other ranks, which have logged them
            self.proved.lines = ()
            return
        self.epoch = self.membership.begin(self._timeout.total_seconds())
        self.membership.accept_losses()
        try:
            while not self._proves():
                self._agree_to_build(None)
        except SameEverywhere:
            self.membership.accept_losses(False)
            self.membership.leave()  # a thread that still runs while the interpreter exits may abort the process
            raise

    def build(self, program: TrainingProgram) -> Run:
        """Build the run together with the other ranks, and without those that are lost meanwhile. Collective.

        If all ranks that are left have built their parts when another one is lost, they keep these and only form groups
        anew, unless they share out the optimizer's state, of which a part is lost then. Otherwise all build again. So
        no rank trains while another one builds, whose collectives its connections could break.

        Raises ValueError as `assemble` does, or if some stage is on no remaining rank.
        """
        num_failed = 0
        while True:
            run = self._told(partial(self._assembled, program))
            alarm = self.membership.alarm
            self._agree_to_build(run)
            are_built = all(json.loads(note) is not None for note in self.epoch.notes.values())
            if are_built and not self.epoch.lost:
                break
            reports = self._give_up(run)
            if are_built and self._shards is None:
                self._form(run, reports, start=self._since, settled=run.iteration, stop_requests=0)
                return run
            if run is not None and run.writer is not None:
                run.writer.close()
            run = None
            gc.collect()
            num_failed = 0 if self.epoch.lost else num_failed + 1
            if num_failed > _MOST_ATTEMPTS:
                self.membership.accept_losses(False)
                raise OnThisRank(f"no rank is lost, and the ranks could not build their parts: {alarm}")
        if self._since is not None:
            self._report(run, start=self._since)
        return run

    def comes_from_loss(self, error: Exception) -> bool:
        """Whether an error of this rank follows from the loss of another rank. Raises the alarm if no rank has."""
        deadline = time.monotonic() + _ALARM_PATIENCE
        if not failure_guard.is_consequence(error):
            deadline = 0.0  # an error of this rank itself, unless it comes from broken connections
        while self.membership.alarm is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.membership.alarm is None and failure_guard.is_consequence(error):
            peers = [self.epoch.ranks[error.peer_rank]] if isinstance(error, TransferError) else []
            self.membership.suspect(peers, " ".join(str(error).split()))
        return self.membership.alarm is not None

    def go_on(
        self, run: Run, settled: int, stop_requests: int, *, admits: bool = False
    ) -> tuple[int, int, list[BatchReport]]:
        """Continue the run without the lost ranks, or with new processes. Collective over the remaining ranks.

        Args:
            run: the run, which has an error that comes from a loss, or is drained.
            settled: the last iteration after which this rank has done all work that is due between batches.
            stop_requests: the stop requests that this rank knows.
            admits: the run is drained after the same batch on all ranks, and new processes are to be admitted.

        Returns:
            `settled` and `stop_requests` of all ranks, and the reports of this rank's batches that have stepped and are
            not reported yet.

        Raises:
            ValueError: some stage is on no remaining rank, or the program would be slower than `--minimum-speed`.
        """
        start = time.monotonic()
        if admits and self._shards is not None:
            self._shards.prepare_move(run)
        reports = [] if admits else self._give_up(run)
        self.epoch = self.membership.agree(self._note(run, settled, stop_requests), admits=admits, patience=_PATIENCE)
        if admits:  # no rank waits for this one any more, since all have come
            reports = self._give_up(run)
        notes, reports = self._form(run, reports, start=start, settled=settled, stop_requests=stop_requests)
        stepped = {report.batch: report for report in reports if report.batch < run.iteration}
        for each in notes:
            stop_requests |= each["stop_requests"]
        settled = min(run.iteration, *(each["settled"] for each in notes))  # a loaded checkpoint may be older
        return settled, stop_requests, [stepped[batch] for batch in sorted(stepped)]

    def come_back(self, run: Run) -> None:
        """Join the job in the place of a lost process, when the other ranks admit this one.

        Args:
            run: the run that this process has built alone, without an engine. It has no state yet.

        Raises:
            JobHasEnded: the job has ended meanwhile.
            OnThisRank: no process is left that could admit this one, or this one cannot take part; with the reason.
        """
        if self._shards is not None:
            self._shards.require_takes_over(run)
        self._groups.note_layers()
        self.epoch = self.membership.begin(_JOINING)
        start = time.monotonic()
        data = json.loads(next(iter(self.epoch.notes.values())))["data"]
        if run.args.data_digest not in (None, data):  # None: this rank reads no data
            raise OnThisRank("the data are not those with which the job began; give this host the same files")
        reports = self._give_up(run)
        try:
            self._form(run, reports, start=start, settled=None, stop_requests=0)
        except ValueError as error:
            raise OnThisRank(str(error)) from error

    def fit(self, run: Run, size: int) -> bool:
        """If ranks were lost, fit the program to batches of `size` microbatches per replica; return whether it changes.

        Collective over the remaining ranks; the pipeline must be drained. If the program changes, the caller must
        replace the data iterators. Raises ValueError if the program would be slower than `--minimum-speed`.
        """
        before = run.survivors
        if before is None or before.schedule.num_microbatches == size * num_places(self._args):
            return False
        began = time.monotonic()
        survivors = self._told(lambda: self.proved.of(before.lost, size))
        end_engine(run)
        with self._groups.connecting(time.monotonic() - began):
            self._change_program(run, survivors)
        return True

    def confirm(self) -> None:
        """Return once this process is certain to be in the job. See `Membership.confirm`."""
        self.membership.confirm()

    # --- parts

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
        note = json.dumps(None) if run is None else self._note(run, run.iteration, 0)
        patience = max(_PATIENCE, self._timeout.total_seconds())  # what a rank builds by itself, no alarm interrupts
        self.epoch = self.membership.agree(note, timeout=2 * patience, patience=patience)
        self._lost |= self.epoch.lost
        if run is None or self.epoch.lost:
            self._since = self._since or noticed or time.monotonic()

    def _assembled(self, program: TrainingProgram) -> Run | None:
        """The run of the epoch's ranks; None if a rank was lost while it was built. Collective over these ranks."""
        try:
            survivors = self.proved.of_ranks(self.epoch.ranks)
            with self._groups.connecting(meeting=self._timeout), silenced():
                self._groups.form(self.epoch, self.membership.rank, self.membership.store())
                args = replace(self._args, rank=dist.get_rank(), world_size=dist.get_world_size())
                args = set_up(args, group=lambda args: self._groups.name(args, survivors))
                reading = self.membership.silent_for(self._timeout.total_seconds()) if args.rank == 0 else None
                run = assemble(
                    args, program, copies=self._groups.copies, takes_over=self.epoch.number > 0, reading=reading
                )
                self._groups.note_layers()
                if survivors is not None:
                    self._change_program(run, survivors)
            tell_new_processes(run, self.membership)
            return run
        except Exception as error:
            if not self.comes_from_loss(error):
                raise
        return None

    def _note(self, run: Run, settled: int | None, stop_requests: int) -> str:
        """This rank's message to the others, as JSON.

        `settled`: None on a new process, which the others admit after they have done all due work.
        """
        note, shards = None, None if self._shards is None else self._shards.note(run)
        if self.has_state or shards:  # a new process may have a shard on which the other ranks do not count yet
            note = {
                "version": run.update.newest_version, "settled": run.iteration if settled is None else settled,
                "stop_requests": stop_requests, "sums": _as_note(run.update.sums_of_newest()),
                "writes": run.reporter.writes, "shards": shards, "is_new": not self.has_state,
                "data": run.args.data_digest, "train_iters": run.args.train_iters, "iteration": run.iteration,
                "consumed": run.consumed_samples, "consumed_valid": run.consumed_valid_samples, "flops": run.flops,
                "saved": run.saved_iteration, "has_saved": run.has_saved,
                "broken_off": None if run.writer is None else run.writer.broken_off,
            }  # fmt: skip
        return json.dumps(note)

    def _form(
        self, run: Run, reports: list[BatchReport], *, start: float, settled: int | None, stop_requests: int
    ) -> tuple[list[dict], list[BatchReport]]:
        """Form the job of the epoch's ranks, or of a later epoch's if a rank is lost meanwhile. Collective.

        Returns the notes of the ranks that have state, and `reports` with the report of a step that this rank makes.
        """
        joined: set[int] = set()
        num_failed = 0
        while True:
            epoch = self.epoch
            self._lost |= epoch.lost
            joined = joined.difference(epoch.lost).union(epoch.joined)
            told = {rank: json.loads(each) for rank, each in epoch.notes.items()}
            notes = {rank: each for rank, each in told.items() if each is not None}
            if run.writer is not None:
                run.writer.has_saved |= any(each["has_saved"] for each in notes.values())
            try:
                began = time.monotonic()
                survivors = self._told(lambda notes=notes: self._survivors(notes))
                with self._groups.connecting(time.monotonic() - began):
                    self._groups.form(self.epoch, self.membership.rank, self.membership.store())
                    reports += self._take_on(run, notes)
                    self._begin(run, survivors, notes)
            except Exception as error:
                num_failed += 1
                if not self.has_state and not isinstance(error, RuntimeError):
                    raise  # an error of this process alone; the others continue without it
                if not self.comes_from_loss(error):
                    if not isinstance(error, RuntimeError) or num_failed > _MOST_ATTEMPTS:
                        raise
                    self.membership.suspect([], " ".join(str(error).split()))  # for example, a rank was late
                self._give_up(run)
                self.epoch = self.membership.agree(self._note(run, settled, stop_requests), patience=_PATIENCE)
            else:
                break
        self._report(run, start=start, joined=joined)
        if self._shards is not None:
            run.reporter.say(self._shards.tell())
        if run.writer is not None:
            run.reporter.say(self._of_save)
            run.writer.broken_off = None
            if self._dropped is not None and run.saved_iteration == self._dropped:
                run.saved_iteration = None
        return list(notes.values()), reports

    def _report(self, run: Run, *, start: float, joined: Collection[int] = ()) -> None:
        """Report the losses, and the ranks that have joined: `start` says when the first was noticed."""
        lost, self._lost = self._lost, {}
        run.reporter.membership(MembershipChange(
            iteration=run.iteration, lost=lost, joined=sorted(joined), ranks=self.epoch.ranks,
            world_size=self._world_size, ranks_of_place=self._place_size, seconds=time.monotonic() - start,
            survivors=run.survivors,
            was_made_before=run.survivors is not None and self.proved.knows(run.survivors),
        ))  # fmt: skip

    def _give_up(self, run: Run | None) -> list[BatchReport]:
        """Give up the groups and what is in flight. `run`: None if it is not built."""
        if run is not None and run.writer is not None:
            run.writer.abandon()
        self._groups.break_waits()
        reports: list[BatchReport] = []
        if run is not None:
            if run.engine is not None:
                reports = run.engine.abandon(self._args.failure_timeout)
                run.engine = None
            for stage in run.stages:
                stage.abandon()
            run.deferred_bytes.add(-run.deferred_bytes.now)
        self._groups.leave_behind()
        return reports

    def _take_on(self, run: Run, of_ranks: Mapping[int, dict]) -> list[BatchReport]:
        """Start again from the newest version that any rank has. Returns the reports of steps that this rank makes."""
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
        """Switch groups, stages and engine to the program of the present ranks. Collective over these ranks.

        `survivors`: None if all ranks are present. `notes`: of the ranks that have state; the other ranks receive it.
        """
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
            self._told(partial(self._shards.rebuild, run, copies, epoch=self.epoch.number, ranks=self.epoch.ranks))
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
        """Switch stages and engine to a program of the present ranks. Collective over these ranks."""
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

    def _told(self, make: Callable[[], _Made]) -> _Made:
        """The result of `make`, whose ValueError occurs on all ranks and ends the job.

        The launcher then restarts no rank. Rank 0 prints such an error. If rank 0 is lost, the first remaining rank
        prints it.
        """
        try:
            return make()
        except ValueError as error:
            self.membership.accept_losses(False)
            if self.membership.rank == self.epoch.ranks[0] != 0:
                raise OnThisRank(str(error)) from error
            raise

    def _survivors(self, notes: Mapping[int, dict]) -> Survivors | None:
        """The program of the present ranks; None if all ranks are present."""
        args = self._args
        present = {part_of(args, rank) for rank in self.epoch.ranks}
        if nowhere := sorted(present.difference(part_of(args, rank) for rank in notes)):
            raise ValueError(
                f"every replica has lost rank {nowhere[0][0]}, and its new processes have no weights yet; restart from "
                "the last checkpoint"
            )
        consumed = max((each["version"], each["consumed"]) for each in notes.values())[1]
        return self.proved.of_ranks(self.epoch.ranks, args.batch_sizes.num_microbatches(consumed))


def _take_place(run: Run, note: Mapping) -> None:
    """Set a new process's run to the position of the others. `note`: of a rank that has state."""
    run.iteration, run.saved_iteration = note["iteration"], note["saved"]
    run.consumed_samples, run.consumed_valid_samples = note["consumed"], note["consumed_valid"]
    run.flops, run.args = note["flops"], replace(run.args, train_iters=note["train_iters"], data_digest=note["data"])


def _as_note(sums: NormReduction | None) -> dict | None:
    return None if sums is None else asdict(sums)
