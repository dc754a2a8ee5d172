"""The losses for which a run is prepared: programs proved before it begins, and looked up when ranks are lost.

1. The ranks divide the distinct losses of one rank among themselves; there are as many as pipeline ranks. Each rank
   searches programs for its own, and writes the results, with the proved program, into the membership's part of the
   store.
2. Every rank reads the result for each loss. If no loss of one rank leaves the job fast enough for `--minimum-speed`,
   the run does not begin, since it could not keep its promise.
3. The same is done for losses of two ranks, if that takes at most a minute, as estimated from single losses.
4. At a loss, a rank takes the program from the store, and renames its replicas to those that have lost ranks. Programs
   for other losses are searched then.

A process that joins the job later finds all results in the store, and searches nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

from megatron.documents import counted
from megatron.pipeline.runtime.failure.errors import SameEverywhere, number_of
from megatron.pipeline.runtime.failure.membership import Membership
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.survivors import ReplicaRank, Survivors, without
from megatron.pipeline.survivors.losses import double_losses, single_losses
from megatron.pipeline.survivors.renaming import distinct, renamed
from megatron.pipeline.survivors.sharing import Sharing
from megatron.pipeline.survivors.table import Entry

_MOST_SECONDS = 60.0
"""The largest time for proving losses of two ranks at the start, in seconds, as estimated."""

Lost = tuple[ReplicaRank, ...]


class ProvedLosses:
    """The job's programs without lost ranks.

    Args:
        membership: this rank's membership, in an epoch.
        schedule: the schedule of a replica.
        size: the number of microbatches of a replica in a batch; programs are proved only for this number.
        num_replicas: the number of replicas in a program of all ranks.
        place_size: the number of ranks that are lost together.
        minimum_speed: the flag of this name.

    Attributes:
        num_replicas: as given.
        lines: log lines about the proofs and the cost of each loss.
    """

    def __init__(
        self, membership: Membership, schedule: PipelineSchedule, size: int, *, num_replicas: int, place_size: int,
        minimum_speed: float,
    ) -> None:  # fmt: skip
        self._membership, self._schedule, self._size = membership, schedule, size
        self.num_replicas, self._place_size, self._minimum_speed = num_replicas, place_size, minimum_speed
        self._entries: dict[Lost, Entry] = {}
        self.lines: tuple[str, ...] = ()

    def prove(self) -> None:
        """Prove the programs before the run begins; in a job that has begun, read them from the store. Collective.

        Raises:
            SameEverywhere: the job could not continue without any rank, or would be slower than `--minimum-speed`.
            OnThisRank: a rank was lost meanwhile. The ranks that are left can prove the rest.
        """
        began, num_ranks = time.monotonic(), self._schedule.num_ranks
        singles = self._share_out(single_losses(num_ranks))
        self._require_some(singles)
        losses = double_losses(num_ranks)
        estimate = self._seconds_of(len(losses), singles)
        pairs = self._share_out(losses) if estimate <= _MOST_SECONDS else []
        took = time.monotonic() - began
        self.lines = (*self._lines_of_singles(singles, took), _line_of_pairs(pairs, len(losses), estimate))

    def knows(self, survivors: Survivors) -> bool:
        """Whether a program was proved before the run began."""
        is_whole = survivors.schedule.num_microbatches == self._size * self.num_replicas
        return is_whole and distinct(survivors.lost, self.num_replicas)[0] in self._entries

    def of(self, lost: Collection[ReplicaRank], size: int | None = None) -> Survivors:
        """The program of the remaining ranks; the same on all of them.

        Args:
            size: the number of microbatches per replica in each batch; None: the number for which programs are proved
                before the run begins.

        Raises:
            ValueError: the job cannot continue, for the reason that `without` gives, or would be slower than
                `--minimum-speed`.
            OnThisRank: the store is gone.
        """
        survivors = self._found(lost, self._size if size is None else size)
        if survivors.slowdown * self._minimum_speed > 1:
            without_ranks = counted(len(lost) * self._place_size, "rank")
            raise ValueError(
                f"without {without_ranks} the job has {1 / survivors.slowdown:.0%} of its speed, less "
                f"than --minimum-speed {self._minimum_speed:g}; restart it with all ranks from its last checkpoint"
            )
        return survivors

    # --- parts

    def _found(self, lost: Collection[ReplicaRank], size: int) -> Survivors:
        num_replicas = self.num_replicas
        known, replicas = distinct(lost, num_replicas)
        entry = self._entries.get(known) if size == self._size else None
        if entry is None:
            return without(self._schedule, size, num_replicas=num_replicas, lost=lost)
        if entry.refusal is not None:
            raise ValueError(entry.refusal)
        packed = self._membership.ask(lambda store: store.get(_key_of_program(entry)))
        sharing = Sharing(self._schedule, self._size, num_replicas, frozenset(known))
        return renamed(entry.survivors(packed, sharing), replicas)

    def _share_out(self, losses: Sequence[Lost]) -> list[Entry]:
        """Search programs for losses, each loss on one rank; return the results of all ranks. Collective."""
        membership, keys = self._membership, [_key_of(lost) for lost in losses]
        ranks = () if membership.epoch is None else membership.epoch.ranks
        own = ranks.index(membership.rank) if ranks else -1  # a process that joins later has no part
        for at, (lost, key) in enumerate(zip(losses, keys, strict=True)):
            if at * len(ranks) // len(losses) != own or membership.ask(lambda store, key=key: store.check([key])):
                continue
            entry, packed = Entry.search(
                self._schedule, self._size, num_replicas=self.num_replicas, lost=lost, crowd=_crowd()
            )
            if packed:
                membership.ask(lambda store, entry=entry, packed=packed: store.set(_key_of_program(entry), packed))
            membership.ask(lambda store, key=key, entry=entry: store.set(key, str(entry)))
        membership.await_keys(keys)
        found = [Entry.parse(text) for text in membership.ask(lambda store: store.multi_get(keys))]
        self._entries.update(zip(losses, found, strict=True))
        return found

    def _seconds_of(self, num_losses: int, singles: Sequence[Entry]) -> float:
        """The estimated seconds of the search for losses of two ranks."""
        most = -(-num_losses // self._membership.world_size)
        return most * max(each.took for each in singles) * max(each.crowd for each in singles)

    def _require_some(self, singles: Sequence[Entry]) -> None:
        """Raise SameEverywhere if the job ends at the loss of any rank."""
        best = min(filter(lambda each: each.refusal is None, singles), key=lambda each: each.slowdown, default=None)
        if best is None:
            raise SameEverywhere(f"--go-on-without-lost-ranks: {singles[0].refusal}")
        if best.slowdown * self._minimum_speed > 1:
            raise SameEverywhere(
                f"--minimum-speed {self._minimum_speed:g}: without a rank the job has at most "
                f"{1 / best.slowdown:.0%} of its speed, as simulated, so the loss of any rank would end it; give at "
                f"most {int(100 / best.slowdown) / 100:g}, or leave --go-on-without-lost-ranks out"
            )

    def _lines_of_singles(self, singles: Sequence[Entry], took: float) -> list[str]:
        costs = " ".join("ends" if each.refusal else f"{each.slowdown:.2f}" for each in singles)
        lines = [
            f"programs without lost ranks were proved in {took:.1f} s; without one rank, by pipeline rank, a batch "
            f"takes {costs} times as long, as simulated"
        ]
        for rank, each in enumerate(singles):
            if each.refusal is not None:
                lines.append(f"warning: the loss of a rank {rank} of the pipeline ends the job: {each.refusal}")
            elif each.slowdown * self._minimum_speed > 1:
                lines.append(
                    f"warning: the loss of a rank {rank} of the pipeline ends the job: it leaves "
                    f"{1 / each.slowdown:.0%} of the speed, less than --minimum-speed {self._minimum_speed:g}"
                )
        return lines


def _line_of_pairs(pairs: Sequence[Entry], num_pairs: int, estimate: float) -> str:
    if not pairs:
        return (
            f"programs without two ranks are made when these are lost: to prove all {num_pairs} now would take about "
            f"{estimate:.0f} s, more than {_MOST_SECONDS:g} s"
        )
    found = [each for each in pairs if each.refusal is None]
    if not found:
        return "without two ranks no stage would be left whole, and the job ends"
    slowest = max(found, key=lambda each: each.slowdown)
    least, most = (f"{value:.2f}" for value in (min(each.slowdown for each in found), slowest.slowdown))
    range_of = most if least == most else f"{least} to {most}"
    where = f", most without {' and '.join(slowest.lost)} (replica and pipeline rank)" * (least != most)
    ends = f"; {len(pairs) - len(found)} of {len(pairs)} such losses end the job" * (len(found) < len(pairs))
    return f"without two ranks it takes {range_of} times as long{where}{ends}"


def _crowd() -> float:
    """The number of this job's processes that share a processor of this host, at least 1."""
    return max(1.0, number_of("LOCAL_WORLD_SIZE", 1) / len(os.sched_getaffinity(0)))


def _key_of(lost: Lost) -> str:
    return f"proved/{'+'.join(map(str, lost))}"


def _key_of_program(entry: Entry) -> str:
    return f"proved/program/{entry.sha256}"
