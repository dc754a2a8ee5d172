"""Membership of the job: processes notice that one of them is lost, and the survivors agree on who continues.

Problem: a process dies, is stopped, or is cut off. Its peers notice at different moments, and some do not notice. The
process groups, over which they would tell each other, are broken. A rank that computes slowly must not be taken for a
lost one. A rank that was declared lost may wake up and continue as if nothing had happened.

Solution: everything goes through the job's store, over a connection and a thread that nothing else uses.

- **Detection.** Each process has a heartbeat and a door (`heartbeats`). It watches the processes at the distances 1, 2,
  4, ... in the ring of ranks. So if a whole host disappears, processes on other hosts notice, and the store can serve a
  thousand ranks. A process is lost if its door refuses connections, or if its heartbeat stays the same for
  `failure_timeout`, or for the longer time that it has announced (`silent_for`).
- **Alarm.** A process that finds another process lost, or has a link that fails (`suspect`), raises the alarm of the
  epoch. Every process hears the alarm within a heartbeat, and its `on_alarm` interrupts the training thread's wait.
- **Agreement.** All processes of an epoch call `agree`. Each appends a line to the next epoch's log, a key of the store
  whose appends have one order. The log also holds the processes that were found lost. The log decides the next epoch at
  the first line after which every process has arrived or is lost, so all readers find the same epoch
  (`epochs.decided`). A live rank that does not call `agree` holds up the others; after their `patience` it counts as
  lost.
- **Groups.** Ranks that compute layers together are lost together, and are taken in together (`epochs`).
- **Fencing.** A process that the decision leaves out ends with one sentence as soon as it looks at the store. Until
  then it writes only to the log of an epoch that is already decided, or to the keys of an epoch that is over (`store`).
- **Joining.** A new process asks to be taken in (`join`). It is taken into the next epoch for which all processes have
  called `agree` with `admits`.

The process that hosts the store must not be one that can be lost: the launcher hosts it (tools/launch.py, torchrun).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import PrefixStore, Store

from megatron.pipeline.runtime.failure.epochs import Epoch, decided, epoch_of, first_record, lost_with, of_whole_groups
from megatron.pipeline.runtime.failure.errors import JobHasEnded, OnThisRank, end_at_once
from megatron.pipeline.runtime.failure.failure_board import ANSWER_PATIENCE
from megatron.pipeline.runtime.failure.heartbeats import HAS_LEFT, Door, Lookout, Member
from megatron.pipeline.runtime.failure.store_thread import StoreThread

LAUNCHER = "launcher"
"""Prefix of the keys that a launcher reads. They have no other prefix in the job's store."""
ACCEPTS_LOSSES = "accepts_losses"
FAILURE_TIMEOUT = 10.0
_BEAT = 0.5  # seconds between heartbeats; with a short failure timeout there are more
_PACE = 0.05  # seconds between looks at the store while a process waits for an epoch; more with many ranks
_LONGEST_PAUSE = 0.5  # seconds between looks for a key
_ALL_LOOK = 1.0  # seconds between two looks at the log, for ranks that do not lead
_MOST_WATCHED = 16  # the most missing processes that a process watches in addition to those in the ring


def takes_in(store: Store, *, timeout: float = FAILURE_TIMEOUT) -> bool:
    """Return whether the job in this part of the store has begun, and still has a live process or has ended normally.

    If no process of the job gives a sign of life, the call takes up to `timeout` seconds.
    """
    store = PrefixStore("membership", store)
    number = 0
    while store.check([f"epoch/{number}"]):
        number += 1
    if number == 0:
        return False
    _, members = epoch_of(number - 1, json.loads(store.get(f"epoch/{number - 1}")))
    lookout = Lookout(store, members[0], timeout=timeout, interval=_BEAT)  # only looks, and gives no sign of life
    while True:
        lookout.look_at(members)
        reasons = [lookout.why_lost(member, is_awaited=True) for member in members]
        if HAS_LEFT in reasons or any(lookout.is_heard(member.token) for member in members):
            return True
        if all(reasons):
            return False
        time.sleep(_BEAT / 2)


def out_of(launcher: str, process: int) -> str:
    """Return the key at which a launcher finds why the other processes have taken its process for lost."""
    return f"out/{launcher}/{process}"


class Membership(StoreThread):
    """This process's place among the processes of the job.

    Args:
        store: the job's store, or a part of it that all processes of the job use, also those that join later.
        rank: this process's global rank.
        world_size: the number of ranks of the job.
        failure_timeout: seconds of silence after which a process counts as lost, unless its door proves it earlier. A
            call that holds the interpreter (GIL) that long silences a process, too.
        on_alarm: called on another thread with a sentence when a rank of the epoch is lost or suspected, and again with
            every heartbeat until this process calls `agree`, because the training thread may begin another wait after a
            call. Has to interrupt the training thread's wait, and must not block.
        on_thrown_out: called when the others have continued without this process. Must end the process.
        store_host: the rank whose process hosts the store, if no launcher does.
        group_size: the number of consecutive ranks that are lost, and come back, together.

    Attributes:
        epoch: the current epoch; None before `begin` or `join`.
        alarm: the sentence of the alarm in the current epoch, or None. After an alarm all ranks call `agree`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        failure_timeout: float = FAILURE_TIMEOUT,
        on_alarm: Callable[[str], None] = lambda sentence: None,
        on_thrown_out: Callable[[str], None] = end_at_once,
        store_host: int = 0,
        group_size: int = 1,
    ) -> None:
        super().__init__(store, "membership", name=f"rank {rank}", store_host=store_host)
        self.rank, self.world_size, self.group_size, self._timeout = rank, world_size, group_size, failure_timeout
        self._interval = min(_BEAT, failure_timeout / 10)
        self._pace = min(self._interval, _PACE * max(1.0, world_size / 64))  # the store serves all ranks
        self._on_alarm, self._on_thrown_out = on_alarm, on_thrown_out
        self._whole = store
        self._door = Door((self._root.host, self._root.port))
        self._me = Member(
            rank, secrets.token_hex(8), socket.gethostname(), self._door.address, self._door.port, os.getpid(),
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
        )  # fmt: skip
        self.epoch: Epoch | None = None
        self.alarm: str | None = None
        self._members: dict[str, Member] = {}
        self._former: set[str] = set()  # tokens of earlier epochs' processes: their requests to join are settled
        self._lookout = Lookout(self._store, self._me, timeout=failure_timeout, interval=self._interval)
        self._wants: str | None = None  # "begin" or "join", until this process has its place
        self._arrival: dict[str, Any] | None = None  # this process's line, while it is in `agree`
        self._patience = self._gives_up_at = math.inf
        self._forget_agreement()
        self._newcomers: tuple[Member, ...] = ()
        self._num_read = 0  # epochs that this process has seen begin without it
        self._start()

    # -- called by the training thread --------------------------------------------------------------------------------

    def begin(self, timeout: float = 600.0) -> Epoch:
        """Collective: return epoch 0, with all ranks of the job. In a job that has begun already, the same as `join`.

        Raises OnThisRank if a rank does not come within `timeout` seconds.
        """
        self._ask(lambda: self._store.set(f"start/{self.rank}", json.dumps(self._me)))
        self._wants = "begin"
        return self._next(-1, timeout)

    def join(self, timeout: float = 600.0) -> Epoch:
        """Ask to be taken into the job in the place of a lost process of this rank. Return the first epoch with it.

        Raises:
            OnThisRank: no such epoch begins within `timeout` seconds, or no process is left that could begin one.
            JobHasEnded: all processes have left the job normally.
        """
        self._ask(self._ask_to_join)
        return self._next(-1, timeout)

    def newcomers(self) -> tuple[int, ...]:
        """Return the ranks of live new processes that ask to be taken in, if their groups are complete."""
        return tuple(sorted(member.rank for member in self._newcomers))

    def suspect(self, ranks: Iterable[int], reason: str) -> None:
        """Raise the alarm: a link to these ranks has failed. `agree` then finds out whether they are lost.

        Args:
            ranks: none if it is not known which rank is at fault; who does not come to `agree` is lost.
            reason: why, in a few words, such as "connection closed by peer in 1RECV_F3".
        """
        suspects, epoch = sorted(set(ranks)), self.epoch
        named = f"suspects rank{'s' * (len(suspects) > 1)} {', '.join(map(str, suspects))}"

        def tell() -> None:
            if self.epoch is not epoch:
                return  # the links of that epoch are gone
            for member in self._members.values():
                if member.rank in suspects and member != self._me:
                    told = f"rank {self.rank}: {reason}"
                    self._append({"kind": "suspected", "token": member.token, "reason": told})
                    self._waited_for.append(member)
            self._raise_alarm(f"rank {self.rank} {named if suspects else 'cannot go on'}: {reason}")

        self._ask(tell)
        self._wait(lambda: self.alarm is not None or self.epoch is not epoch, ANSWER_PATIENCE, "raise the alarm")

    def agree(
        self, note: str = "", *, admits: bool = False, timeout: float = 600.0, patience: float = math.inf
    ) -> Epoch:
        """Collective over the ranks of the epoch that still live: return the next epoch, which is the same on all.

        Args:
            note: passed to all ranks, in `Epoch.notes`.
            admits: whether this rank admits new processes to that epoch. They are admitted if all ranks do.
            timeout: seconds that a live rank may take to call `agree`.
            patience: seconds after which live ranks that have not called `agree` count as lost, if more ranks have
                called it than not. A late rank may hang, or may only compute: give more seconds than the longest
                computation that no alarm interrupts.

        Raises OnThisRank if a live rank does not call `agree` in time, or if the store is gone or silent.
        """
        assert self.epoch is not None, "agree before begin or join"
        newcomers = [list(member) for member in self._newcomers] if admits else None
        self._gives_up_at, self._patience = time.monotonic() + patience, patience
        self._arrival = {"kind": "arrived", "token": self._me.token, "note": note, "admits": newcomers}
        return self._next(self.epoch.number, timeout)

    @contextmanager
    def silent_for(self, seconds: float) -> Iterator[None]:
        """A context in which a call may hold the interpreter for so many seconds, and this process stays in the job.

        megatron.core's C++ does so while it makes the indices of samples. A stop of this process is noticed after that
        time, its end as usual.
        """
        self._announce(seconds)
        try:
            yield
        finally:
            self._announce(0.0)

    def _announce(self, seconds: float) -> None:
        self._lookout.announced = seconds
        self._ask(lambda: self._lookout.beat(at_once=True))

    def await_keys(self, keys: list[str]) -> None:
        """Wait until processes of the job have written all these keys of the membership's part of the store.

        Raises OnThisRank if the alarm is raised meanwhile, or, in a process that is not in the job yet, if no process
        is left that could write them.
        """
        pause, looks_at = 0.01, time.monotonic() + self._timeout
        while not self.ask(lambda store: store.check(keys)):
            if self.alarm is not None:
                raise OnThisRank(self.alarm)
            if self.epoch is None and time.monotonic() >= looks_at:
                if not takes_in(self._whole.clone(), timeout=self._timeout):
                    raise OnThisRank(f"no rank is left to admit rank {self.rank}")
                looks_at = time.monotonic() + self._timeout
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def confirm(self) -> None:
        """Return once the store has confirmed that this process is in the latest epoch; else the process ends.

        Call it before something is done that outlasts the process, such as naming a checkpoint the latest.
        """
        target = self._num_ticks + 2  # a whole look at the store that begins after this call
        self.wake()
        self._wait(lambda: self._num_ticks >= target, self._timeout, "confirm that it is in the job")

    def store(self) -> Store:
        """Return the part of the store for the process groups of the current epoch. No earlier epoch has keys there.

        The result has a connection of its own, which may be broken (`connections`).
        """
        assert self.epoch is not None, "no epoch yet"
        return PrefixStore(f"of_epoch/{self.epoch.number}", self._whole.clone())

    def accept_losses(self, accepts: bool = True) -> None:
        """Tell the launcher whether the job continues when a process is lost. By default the launcher ends the job."""
        key = f"{LAUNCHER}/{ACCEPTS_LOSSES}"
        self._ask(lambda: self._root.set(key, "yes" if accepts else "no"))

    def leave(self) -> None:
        """Leave the job normally. The others do not take this process for a lost one. Never raises."""
        self._stop()
        self._door.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _next(self, number: int, timeout: float) -> Epoch:
        doing = f"begin epoch {number + 1}" if number >= 0 else "come into the job"
        self.wake()
        try:
            self._wait(lambda: self.epoch is not None and self.epoch.number > number, timeout, doing)
        finally:
            self._arrival = None
        return self.epoch

    def _why_not(self) -> str:
        if not self._absent:
            return ""
        ranks = ", ".join(map(str, sorted(self._absent)))
        named = f"; rank{'s' * (len(self._absent) > 1)} {ranks} did not come"
        return named + ("" if self.epoch is None else ", though alive")

    def _fail(self, error: OnThisRank) -> None:
        self.alarm = str(error)
        super()._fail(error)
        self._on_alarm(self.alarm)

    def _pause(self) -> float:
        return self._interval if self._wants is None and self._arrival is None else self._pace

    def _say_goodbye(self) -> None:
        self._lookout.leave()

    def _tick(self) -> None:
        self._door.clear()
        self._lookout.beat()
        self._answer()
        if self._wants == "begin":
            self._try_to_begin()
        elif self._wants == "join":
            self._try_to_join()
        elif self.epoch is not None:
            self._follow()
            self._look_at_others()
            self._hear_alarm()
            if self._arrival is not None:
                self._try_to_decide()

    # -- coming in ----------------------------------------------------------------------------------------------------

    def _try_to_begin(self) -> None:
        keys = [f"start/{rank}" for rank in range(self.world_size)]
        if not self._store.check(["epoch/0"]):
            if not self._store.check(keys):
                if self._num_ticks % 20 == 0:
                    self._absent = {rank for rank, key in enumerate(keys) if not self._store.check([key])}
                return
            members = [Member(*json.loads(text)) for text in self._store.multi_get(keys)]
            self._store.compare_set("epoch/0", "", json.dumps(first_record(members)))
        epoch, members = self._read(0)
        if self._me in members:
            self._enter(epoch, members)
        else:  # the job has begun with an earlier process of this rank
            self._ask_to_join()

    def _ask_to_join(self) -> None:
        self._store.append("joins", json.dumps(self._me) + "\n")
        self._wants = "join"

    def _try_to_join(self) -> None:
        while self._store.check([f"epoch/{self._num_read}"]):
            epoch, members = self._read(self._num_read)
            if self._me in members:
                self._enter(epoch, members)
                return
            self._num_read += 1
            self._former |= self._members.keys()
            self._members = {member.token: member for member in members}
        if self._lookout.is_due():
            self._lookout.look_at(self._members.values())
            reasons = [self._why_lost(member) for member in self._members.values()]
            if reasons and set(reasons) == {HAS_LEFT}:
                raise JobHasEnded(f"the job has ended before rank {self.rank} was admitted")
            if self._num_read and all(reasons):
                raise OnThisRank(f"no rank of epoch {self._num_read - 1} is left to admit rank {self.rank}")

    def _read(self, number: int) -> tuple[Epoch, tuple[Member, ...]]:
        return epoch_of(number, json.loads(self._store.get(f"epoch/{number}")))

    def _enter(self, epoch: Epoch, members: tuple[Member, ...]) -> None:
        """Make `epoch` the current one. End this process if `epoch` does not have it."""
        left_out = [member for member in self._members.values() if member not in members] if self.epoch else []
        if self._me not in members:
            others = f"the others went on with epoch {epoch.number} without it" if members else "no rank could continue"
            reason = epoch.lost.get(self.rank, "no reason is known")
            sentence = f"rank {self.rank} was declared lost ({reason}), and {others}"
            self._on_thrown_out(sentence)
            raise OnThisRank(sentence)
        for member in left_out:
            reason = epoch.lost[member.rank]
            if not reason.startswith(HAS_LEFT):  # the launcher ends the process if it still runs
                self._root.set(f"{LAUNCHER}/{out_of(member.launcher, member.process)}", reason)
        self._former |= self._members.keys()
        self._members = {member.token: member for member in members}
        self._newcomers = tuple(each for each in self._newcomers if each.rank not in epoch.ranks)
        self._forget_agreement()
        with self._changed:
            self._wants, self._arrival, self.epoch, self.alarm = None, None, epoch, None

    def _forget_agreement(self) -> None:
        self._has_arrived = False
        self._marked: set[str] = set()  # tokens that this process has found lost
        self._gone: set[str] = set()  # tokens that are lost in the log, with their groups
        self._waited_for: list[Member] = []
        self._absent: set[int] = set()
        self._reads_at = 0.0

    # -- the others ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        number = self.epoch.number + 1
        if self._store.check([f"epoch/{number}"]):
            self._enter(*self._read(number))

    def _in_ring(self) -> list[Member]:
        """Return the other processes of the epoch in ring order, from the next rank on."""
        others = sorted(self._members.values())
        place = others.index(self._me)
        return others[place + 1 :] + others[:place]

    def _look_at_others(self) -> None:
        if not self._lookout.is_due():
            return
        asking = self._asking()
        ring = self._in_ring()
        near = [ring[2**power - 1] for power in range(len(ring).bit_length())]
        self._lookout.look_at([*near, *self._waited_for, *asking])
        heard = (member for member in asking if self._lookout.is_heard(member.token))
        self._newcomers = of_whole_groups(heard, self.group_size)
        for member in {*near, *self._waited_for}:
            reason = None if member.token in self._marked else self._why_lost(member)
            if reason is not None:
                self._marked.add(member.token)
                self._append({"kind": "lost", "token": member.token, "reason": reason})
                self._raise_alarm(f"rank {member.rank} is lost: {reason}")

    def _why_lost(self, member: Member) -> str | None:
        return self._lookout.why_lost(member, is_awaited=self._arrival is not None or self._wants == "join")

    def _asking(self) -> list[Member]:
        """Return, for each rank without a process, the latest process that asks to be taken in."""
        if not self._store.check(["joins"]):
            return []
        lines = self._store.get("joins").decode().splitlines()
        latest = {member.rank: member for member in (Member(*json.loads(line)) for line in lines)}
        absent = sorted(latest.keys() - self.epoch.ranks)
        return [latest[rank] for rank in absent if latest[rank].token not in self._former]

    # -- alarm and agreement ------------------------------------------------------------------------------------------

    def _append(self, line: dict[str, Any]) -> None:
        self._store.append(f"log/{self.epoch.number + 1}", json.dumps(line) + "\n")

    def _raise_alarm(self, sentence: str) -> None:
        self._store.compare_set(f"alarm/{self.epoch.number}", "", sentence)

    def _hear_alarm(self) -> None:
        key = f"alarm/{self.epoch.number}"
        if self.alarm is None and self._store.check([key]):
            self.alarm = self._store.get(key).decode()
        if self.alarm is not None and self._arrival is None:
            self._on_alarm(self.alarm)

    def _try_to_decide(self) -> None:
        """Write this process's arrival, and decide the next epoch once the log allows it.

        The lowest rank reads the log often. The others read it rarely, in case the lowest rank is lost.
        """
        if not self._has_arrived:
            self._append(self._arrival)
            self._has_arrived = True
        leads = self._me == min(member for member in self._members.values() if member.token not in self._gone)
        if not leads and time.monotonic() < self._reads_at:
            return
        self._reads_at = time.monotonic() + _ALL_LOOK
        number = self.epoch.number + 1
        log = [json.loads(line) for line in self._store.get(f"log/{number}").decode().splitlines()]
        record = decided(self._members.values(), log, group_size=self.group_size)
        if record is not None:
            self._store.set(f"epoch/{number}", json.dumps(record))  # every rank writes the same
            self._enter(*self._read(number))
            return
        arrived, lost = ({line["token"] for line in log if line["kind"] == kind} for kind in ("arrived", "lost"))
        self._gone = lost_with(self._members.values(), lost, self.group_size) - {self._me.token}
        missing = [member for member in self._in_ring() if member.token not in arrived | self._gone]
        self._waited_for = missing[:_MOST_WATCHED]
        self._absent = {member.rank for member in missing}
        num_here = len(self._members) - len(missing) - len(self._gone)
        if time.monotonic() >= self._gives_up_at and num_here > len(missing):
            for member in missing:
                reason = f"it did not come within {self._patience:g} s, though alive"
                self._append({"kind": "lost", "token": member.token, "reason": reason})
