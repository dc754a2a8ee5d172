"""The times of words, if each computation starts as soon as its rank and its input are ready."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.synthesis.problem import Problem, Words


@dataclass(frozen=True, slots=True)
class Times:
    """The times of words.

    Attributes:
        seconds: the end of the last computation.
        mean_start: the mean start of all computations.
        starts: for each rank, the start of each computation of its word.
        ends: for each queue, the end of its computation of each microbatch.
    """

    seconds: float
    mean_start: float
    starts: list[list[float]]
    ends: list[list[float]]


class Clock:
    """Times words of one problem. A transfer is a mere delay here; only the simulator has it wait for its channel.

    Args:
        problem: the problem.
        sources: for each queue, the queue that it waits for, and the delay; None: those of the problem.
        seconds: the seconds of each microbatch's computation of each queue; None: those of the problem.
    """

    def __init__(
        self,
        problem: Problem,
        sources: Sequence[tuple[int, float]] | None = None,
        seconds: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self._sources = problem.sources if sources is None else sources
        self._seconds = problem.seconds_at if seconds is None else seconds
        self._num_queues, self._num_ranks = len(problem.queues), problem.num_ranks
        self._own, ranks = problem.queues_of_rank, problem.rank_of_queue
        wakes: list[set[int]] = [set() for _ in range(problem.num_ranks)]
        for queue, (source, _) in enumerate(self._sources):
            if source >= 0 and ranks[source] != ranks[queue]:
                wakes[ranks[source]].add(ranks[queue])
        self._wakes = [sorted(each) for each in wakes]

    def times(self, words: Words, known: Times | None = None, rank: int = 0, place: int = 0) -> Times | None:
        """Return the times of words, or None where ranks wait for each other in a circle.

        Args:
            words: the words.
            known: the times of words that differ from these on one rank only, and there from `place` on. Computations
                that start before that place keep their times.
            rank, place: where the words differ.
        """
        sources, seconds, wakes = self._sources, self._seconds, self._wakes
        ends: list[list[float]] = [[] for _ in range(self._num_queues)]
        starts: list[list[float]] = [[] for _ in words]
        places, free = [0] * self._num_ranks, [0.0] * self._num_ranks
        if known is not None and place:
            last = words[rank][place - 1]
            since = known.ends[last][words[rank][:place].count(last) - 1]
            for each, word in enumerate(words):
                kept = bisect_left(known.starts[each], since)
                if each == rank:
                    kept = min(kept, place)
                places[each], starts[each] = kept, known.starts[each][:kept]
                head = word[:kept]
                for queue in self._own[each]:
                    ends[queue] = known.ends[queue][: head.count(queue)]
                if kept:
                    free[each] = ends[word[kept - 1]][-1]
        to_do, is_in = list(range(self._num_ranks)), [True] * self._num_ranks
        total, count = sum(map(sum, starts)), sum(places)
        while to_do:
            rank = to_do.pop()
            is_in[rank] = False
            word, place, time, begun = words[rank], places[rank], free[rank], starts[rank]
            first, length = place, len(word)
            while place < length:
                queue = word[place]
                own = ends[queue]
                microbatch = len(own)
                source, delay = sources[queue]
                if source >= 0:
                    made = ends[source]
                    if microbatch >= len(made):
                        break
                    if (ready := made[microbatch] + delay) > time:
                        time = ready
                begun.append(time)
                total += time
                time += seconds[queue][microbatch]
                own.append(time)
                place += 1
            if place > first:
                places[rank], free[rank] = place, time
                count += place - first
                for other in wakes[rank]:
                    if not is_in[other]:
                        is_in[other] = True
                        to_do.append(other)
        if count < sum(map(len, words)):
            return None
        return Times(max(free), total / count, starts, ends)
