"""How the reductions of a program run beside its rows.

A rank runs its reductions one after another, in the order in which its row posts them, as one background thread does. A
reduction starts when it is posted and the one before it in its queue has completed; it completes when it has started at
every member of its group. (Replicas of a stage run the same program, so REDUCE_GRAD waits for no other row of it.)

A reduction that stands after the STEP of its version, the norm under `stash`, only reports. It has a queue of its own
beside the chain: in the same one, the gradients of the next microbatch would stand behind it until the first stage has
ended the microbatch before, and the pipeline would do one microbatch at a time.
"""

from megatron.pipeline.check.compact import REDUCE_EMBED, REDUCE_NORM, REDUCE_PARTIAL_EMBED, CompactProgram

Reduction = tuple[int, int]  # code, version


class Reductions:
    """The queues of all ranks: queue r is rank r's chain, queue r + the number of ranks its reports."""

    def __init__(self, compact: CompactProgram) -> None:
        self.num_ranks = len(compact.codes)
        reports_apart = compact.program.weights.updates_alone
        self._norm_queue = self.num_ranks if reports_apart else 0  # added to a rank
        ends = {compact.rank_of_stage[0], compact.rank_of_stage[-1]}
        self._groups = {
            REDUCE_NORM: [rank + self._norm_queue for rank in range(self.num_ranks)],  # all
            REDUCE_EMBED: sorted(ends),
            REDUCE_PARTIAL_EMBED: sorted(ends),
        }
        self._queues: list[list[Reduction]] = [[] for _ in range(2 * self.num_ranks)]
        self._num_started = [0] * (2 * self.num_ranks)
        self._num_completed = [0] * (2 * self.num_ranks)
        self._num_joined: dict[Reduction, int] = {}
        self._last_of_version: list[dict[int, int]] = [{} for _ in range(self.num_ranks)]
        self._awaited = [0] * self.num_ranks  # how many of its chain a rank waits for

    def post(self, rank: int, code: int, version: int) -> list[int]:
        """Post a reduction; run what can run. Returns the ranks that need not wait any longer."""
        queue = rank + (self._norm_queue if code == REDUCE_NORM else 0)
        self._queues[queue].append((code, version))
        if queue == rank:
            self._last_of_version[rank][version] = len(self._queues[queue])
        freed = []
        agenda = [queue]
        while agenda:
            queue = agenda.pop()
            index = self._num_completed[queue]
            if index == len(self._queues[queue]) or index < self._num_started[queue]:
                continue
            self._num_started[queue] = index + 1
            reduction = self._queues[queue][index]
            members = self.members(queue, reduction)
            self._num_joined[reduction] = num_joined = self._num_joined.get(reduction, 0) + 1
            if num_joined < len(members) > 1:
                continue
            for member in members:
                self._num_completed[member] += 1
                if member < self.num_ranks and self._num_completed[member] == self._awaited[member]:
                    self._awaited[member] = 0
                    freed.append(member)
            agenda += members
        return freed

    def is_done(self, rank: int, version: int) -> bool:
        """Whether what the rank's chain has of a version is complete; if not, the rank waits for it."""
        return self.are_done(rank, self._last_of_version[rank].get(version, 0))

    def are_done(self, rank: int, needed: int) -> bool:
        """Whether so many of the rank's chain are complete; if not, the rank waits for them."""
        if self._num_completed[rank] >= needed:
            return True
        self._awaited[rank] = needed
        return False

    def num_completed(self, rank: int) -> int:
        """How many of the rank's chain are complete."""
        return self._num_completed[rank]

    def are_awaited(self, rank: int) -> bool:
        """Whether the rank waits for its chain."""
        return bool(self._awaited[rank])

    def members(self, queue: int, reduction: Reduction) -> list[int]:
        """The queues that take part in a reduction of `queue`."""
        return self._groups.get(reduction[0], [queue])

    def incomplete(self, queue: int) -> list[Reduction]:
        """What stands in a queue and is not complete; the first one has started."""
        return self._queues[queue][self._num_completed[queue] :]

    def has_started(self, queue: int, reduction: Reduction) -> bool:
        return reduction in self._queues[queue][: self._num_started[queue]]
