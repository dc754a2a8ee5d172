"""The recovery of a job without lost ranks, and with new processes in their places, for any training loop.

1. The job's `Membership` notices that a rank is lost, or a transfer of this rank fails. The alarm breaks this process's
   connections, so that everything that waits for another rank ends with an error.
2. Every rank gives up its microbatches in flight, and calls `Membership.agree`. There it tells the others which weight
   version it has, and the sums over all ranks for the step to that version.
3. The remaining ranks form a new process group. A rank that lacks the newest version makes it: the rank has the reduced
   gradients, and receives the sums from other ranks.
4. The ranks switch to the program without the lost ranks, which was proved before the run began (`proved_losses`), and
   repeat the batch.

If another rank is lost meanwhile, this begins again. If some stage is on no remaining rank, the job ends.

A launcher may start a new process in the place of a lost one. The new process builds its part of the model alone, while
the others train, and then asks to be admitted (`come_back`). The other ranks decide after which batch they admit it:
the request travels with a batch's norm reduction, as a stop request does. After this batch all ranks agree, as above,
and the new process gets weights, optimizer and position from the ranks that have them. If all ranks are present, the
program of the flags runs again, as if no rank had been lost.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure import failure_guard
from megatron.pipeline.runtime.failure.errors import OnThisRank, SameEverywhere
from megatron.pipeline.runtime.failure.membership import Membership
from megatron.pipeline.runtime.transport.channels import TransferError
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.survivors import ReplicaRank, Survivors
from megatron.trainer.report.membership_change import MembershipChange
from megatron.trainer.run.epoch_groups import EpochGroups
from megatron.trainer.run.proved_losses import ProvedLosses

_Made = TypeVar("_Made")
PATIENCE = 300.0
"""Seconds after which a rank that is alive but does not come is lost, for example because its data loader hangs.

Work that keeps ranks from hearing an alarm, such as a save or the search for a program, takes about as long on all of
them."""
MOST_ATTEMPTS = 3
_ALARM_PATIENCE = 2.0
"""Seconds that a rank with a failed transfer waits for another rank's alarm before it raises one."""
_JOINING = 30 * 24 * 3600.0
"""Seconds that a new process waits to be admitted; it gives up earlier if no process is left that could admit it."""


class Settings(Protocol):
    """The flags of a run that a recovery reads."""

    failure_timeout: float
    minimum_speed: float
    distributed_backend: str
    distributed_timeout_minutes: int


class RecoveringRun(Protocol):
    """The run of a training loop on one rank.

    Attributes:
        iteration: the number of batches that have begun.
        survivors: the program of the ranks that are left; None: all ranks are present.
    """

    iteration: int
    survivors: Survivors | None


_Run = TypeVar("_Run", bound=RecoveringRun)


class Recovery(ABC, Generic[_Run]):
    """The handler of lost ranks: it notices them, and lets this rank continue without them or with new processes.

    A training loop has a subclass, which knows the state of its run.

    Args:
        settings: the flags of the run.
        store: the job's store.
        place_size: the number of consecutive ranks that are lost, and come back, together.
        is_new: whether this process takes the place of a lost one.

    Attributes:
        membership: this rank's place among the processes of the job.
        epoch: the ranks that train together now.
        proved: the programs without lost ranks, once `prove` was called.
        has_state: whether weights, optimizer and position are the job's.
    """

    proved: ProvedLosses

    def __init__(
        self, settings: Settings, store: dist.Store, *, rank: int, world_size: int, place_size: int = 1,
        is_new: bool = False,
    ) -> None:  # fmt: skip
        self._settings, self._world_size, self._place_size = settings, world_size, place_size
        self._timeout = timedelta(minutes=settings.distributed_timeout_minutes)
        self.membership = Membership(
            store, rank, world_size, failure_timeout=settings.failure_timeout,
            on_alarm=lambda sentence: self._groups.break_waits(), group_size=place_size,
        )  # fmt: skip
        self._groups = self._make_epoch_groups()
        self._lost: dict[int, str] = {}  # rank -> reason, of the losses that are not reported yet
        self.has_state = not is_new
        if self.has_state:
            self.epoch = self.membership.begin(self._timeout.total_seconds())

    def prove(self, schedule: PipelineSchedule, size: int, *, num_replicas: int) -> None:
        """Prove the programs without lost ranks; a new process reads them from the store. Collective.

        `size`: the number of microbatches of a replica in a batch. Raises as `ProvedLosses.prove` does.
        """
        self.proved = ProvedLosses(
            self.membership, schedule, size, num_replicas=num_replicas, place_size=self._place_size,
            minimum_speed=self._settings.minimum_speed,
        )  # fmt: skip
        try:
            self._prove()
        except SameEverywhere as error:
            self.membership.accept_losses(False)
            self.membership.leave()  # a thread that still runs while the interpreter exits may abort the process
            if self._prints_for_all:
                raise OnThisRank(str(error)) from error
            raise
        if not self.has_state:
            self.proved.lines = ()  # the other ranks have logged them

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
        self, run: _Run, settled: int, stop_requests: int, *, admits: bool = False
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
        reports = [] if admits else self._give_up(run)
        self._agree(run, settled, stop_requests, admits=admits)
        if admits:  # no rank waits for this one any more, since all have come
            reports = self._give_up(run)
        notes, reports = self._form(run, reports, start=start, settled=settled, stop_requests=stop_requests)
        stepped = {report.batch: report for report in reports if report.batch < run.iteration}
        for each in notes:
            stop_requests |= each["stop_requests"]
        settled = min(run.iteration, *(each["settled"] for each in notes))  # a loaded checkpoint may be older
        return settled, stop_requests, [stepped[batch] for batch in sorted(stepped)]

    def come_back(self, run: _Run) -> None:
        """Join the job in the place of a lost process, when the other ranks admit this one.

        Args:
            run: the run that this process has built alone, without an engine. It has no state yet.

        Raises:
            JobHasEnded: the job has ended meanwhile.
            OnThisRank: no process is left that could admit this one, or this one cannot take part; with the reason.
        """
        self.epoch = self.membership.begin(_JOINING)
        start = time.monotonic()
        self._require_same(run, json.loads(next(iter(self.epoch.notes.values()))))
        reports = self._give_up(run)
        try:
            self._form(run, reports, start=start, settled=None, stop_requests=0)
        except ValueError as error:
            raise OnThisRank(str(error)) from error

    def fit(self, run: _Run, size: int) -> bool:
        """If ranks were lost, fit the program to batches of `size` microbatches per replica; return whether it changes.

        Collective over the remaining ranks; the pipeline must be drained. If the program changes, the caller must
        replace the data iterators. Raises ValueError if the program would be slower than `--minimum-speed`.
        """
        before = run.survivors
        if before is None or before.schedule.num_microbatches == size * self.proved.num_replicas:
            return False
        began = time.monotonic()
        survivors = self.told(lambda: self.proved.of(before.lost, size))
        self._end_engine(run)
        with self._groups.connecting(time.monotonic() - began):
            self._change_program(run, survivors)
        return True

    def end_without_lost(self) -> None:
        """After a loss behind all work: let the launcher end the lost processes, which may only be stopped. Collective
        over the remaining ranks."""
        self.epoch = self.membership.agree("null", patience=PATIENCE)

    def confirm(self) -> None:
        """Return once this process is certain to be in the job. See `Membership.confirm`."""
        self.membership.confirm()

    # --- what a subclass knows of its run

    def _make_epoch_groups(self) -> EpochGroups:
        """The groups of this process. Called when the membership has opened its connections, and nothing else has."""
        return EpochGroups(self._settings)

    def _prove(self) -> None:
        """Prove all programs. Collective. Raises as `ProvedLosses.prove` does."""
        self.proved.prove()

    @abstractmethod
    def _place_of(self, rank: int) -> ReplicaRank:
        """The place of a rank of the whole job in the program."""

    def _part_of(self, rank: int) -> tuple[int, ...]:
        """A key that ranks with the same weights share. It begins with the pipeline rank."""
        return (self._place_of(rank).rank,)

    @abstractmethod
    def _note(self, run: _Run, settled: int | None, stop_requests: int) -> dict | None:
        """This rank's message to the others, for JSON; None: it has no state.

        It has `version`, `sums`, `settled`, `stop_requests` and whatever else the subclass reads. `settled`: None on a
        new process, which the others admit after they have done all due work.
        """

    @abstractmethod
    def _require_same(self, run: _Run, note: Mapping) -> None:
        """Raise OnThisRank if this new process has built another run than the rank with this note."""

    def _hear(self, run: _Run, notes: Mapping[int, dict]) -> None:
        """Keep what the notes of an agreement say, even if the job is formed only after another one."""

    def _prepare(self, run: _Run) -> None:
        """Do what has to come before the connections break."""

    @abstractmethod
    def _abandon(self, run: _Run) -> list[BatchReport]:
        """Give up what is in flight, and the engine. Returns the reports of batches that have stepped."""

    @abstractmethod
    def _end_engine(self, run: _Run) -> None:
        """Close the engine of a drained pipeline."""

    @abstractmethod
    def _next_size(self, run: _Run, notes: Mapping[int, dict]) -> int:
        """The number of microbatches of a replica in the next batch."""

    @abstractmethod
    def _take_on(self, run: _Run, of_ranks: Mapping[int, dict]) -> list[BatchReport]:
        """Start again from the newest version that any rank has. Returns the reports of steps that this rank makes."""

    @abstractmethod
    def _begin(self, run: _Run, survivors: Survivors | None, notes: Mapping[int, dict]) -> None:
        """Switch groups, stages and engine to the program of the present ranks. Collective over these ranks.

        `survivors`: None if all ranks are present. `notes`: of the ranks that have state; the other ranks receive it.
        """

    @abstractmethod
    def _change_program(self, run: _Run, survivors: Survivors | None) -> None:
        """Switch stages and engine to a program of the present ranks. Collective over these ranks."""

    @abstractmethod
    def _report(self, run: _Run, change: MembershipChange) -> None:
        """Report a change of ranks."""

    def _formed(self, run: _Run) -> None:
        """Do what has to come after the report that the job has been formed."""

    # --- parts

    def _agree(self, run: _Run, settled: int | None, stop_requests: int, *, admits: bool = False) -> None:
        note = json.dumps(self._note(run, settled, stop_requests))
        self.epoch = self.membership.agree(note, admits=admits, patience=PATIENCE)

    def _form(
        self, run: _Run, reports: list[BatchReport], *, start: float, settled: int | None, stop_requests: int
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
            self._hear(run, notes)
            try:
                began = time.monotonic()
                survivors = self.told(lambda notes=notes: self._survivors(run, notes))
                with self._groups.connecting(time.monotonic() - began):
                    self._form_groups()
                    reports += self._take_on(run, notes)
                    self._begin(run, survivors, notes)
            except Exception as error:
                num_failed += 1
                if not self.has_state and not isinstance(error, RuntimeError):
                    raise  # an error of this process alone; the others continue without it
                if not self.comes_from_loss(error):
                    if not isinstance(error, RuntimeError) or num_failed > MOST_ATTEMPTS:
                        raise
                    self.membership.suspect([], " ".join(str(error).split()))  # for example, a rank was late
                self._give_up(run)
                self._agree(run, settled, stop_requests)
            else:
                break
        self._report_change(run, start=start, joined=joined)
        self._formed(run)
        return list(notes.values()), reports

    def _report_change(self, run: _Run, *, start: float, joined: Collection[int] = ()) -> None:
        """Report the losses, and the ranks that have joined: `start` says when the first was noticed."""
        lost, self._lost = self._lost, {}
        self._report(run, MembershipChange(
            iteration=run.iteration, lost=lost, joined=sorted(joined), ranks=self.epoch.ranks,
            world_size=self._world_size, ranks_of_place=self._place_size, seconds=time.monotonic() - start,
            survivors=run.survivors,
            was_made_before=run.survivors is not None and self.proved.knows(run.survivors),
        ))  # fmt: skip

    def _give_up(self, run: _Run | None) -> list[BatchReport]:
        """Give up the groups and what is in flight. `run`: None if it is not built."""
        if run is not None:
            self._prepare(run)
        self._groups.break_waits()
        reports = [] if run is None else self._abandon(run)
        self._groups.leave_behind()
        return reports

    def _form_groups(self) -> None:
        """Form the process group of the epoch's ranks. Collective over these ranks."""
        self._groups.form(self.epoch, self.membership.rank, self.membership.store())

    def told(self, make: Callable[[], _Made]) -> _Made:
        """The result of `make`, whose ValueError occurs on all ranks and ends the job.

        The launcher then restarts no rank.
        """
        try:
            return make()
        except ValueError as error:
            self.membership.accept_losses(False)
            if self._prints_for_all:
                raise OnThisRank(str(error)) from error
            raise

    @property
    def _prints_for_all(self) -> bool:
        """Whether rank 0, which prints an error of all ranks, is lost, and this rank prints it as the first that is
        left."""
        return self.has_state and self.membership.rank == self.epoch.ranks[0] != 0

    def _survivors(self, run: _Run, notes: Mapping[int, dict]) -> Survivors | None:
        """The program of the present ranks; None if all ranks are present."""
        present = {self._part_of(rank) for rank in self.epoch.ranks}
        if nowhere := sorted(present.difference(self._part_of(rank) for rank in notes)):
            raise ValueError(
                f"every replica has lost rank {nowhere[0][0]}, and its new processes have no weights yet; restart from "
                "the last checkpoint"
            )
        return self._program_of_present(self._next_size(run, notes))

    def _program_of_present(self, size: int | None = None) -> Survivors | None:
        """The program of the present ranks; None if all ranks are present. The rest is as in `ProvedLosses.of`."""
        absent = set(range(self._world_size)).difference(self.epoch.ranks)
        return self.proved.of({self._place_of(rank) for rank in absent}, size) if absent else None
