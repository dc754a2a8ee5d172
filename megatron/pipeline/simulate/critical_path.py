"""The critical path of a simulated run: the chain of instructions and transfers that bounds its time.

Each part of the chain starts when the part before it ends. A run gets faster only if a part of the chain gets faster.
The chain is followed back from the end of the last computation: of all nodes for which a node of the graph waits
(`megatron.pipeline.graph`), the last to end is on the chain. If none of them ends at the node's start, the timeline was
not simulated on the given costs, and is refused. If several nodes end at the same moment, the rank's own work is
preferred, so that the chain changes ranks as rarely as possible.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from megatron.pipeline.graph.execution import NOBODY, START
from megatron.pipeline.graph.row_graph import graph_of
from megatron.pipeline.program.instruction import BUSY, MOVES, REDUCTIONS, SEND_OF, Instruction
from megatron.pipeline.simulate import channel_times, refusal
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.timeline import Span, Timeline

_TOLERANCE = 1e-9  # of the makespan


def critical_path(timeline: Timeline, costs: Costs) -> tuple[Span, ...]:
    """The chain that bounds a simulated timeline, from its start to its end, without gaps.

    Args:
        timeline: a timeline returned by `simulate`.
        costs: the costs of that simulation.

    Returns:
        The spans that take time, in order; each starts where the previous one ends. A transfer is a span of its sender.
        It ends with the awaited event: the arrival, or the moment at which its channel or its sender is free.

    Raises:
        ValueError: if the timeline was not simulated on these costs.
    """
    chain = list(_Chain(timeline, costs).follow())
    return tuple(span for span in reversed(chain) if span.end > span.start)


def critical_path_text(path: Sequence[Span]) -> str:
    """The text of a path: the total time of each kind of work, then a line for each stretch on or between ranks."""
    lines, totals = [], defaultdict(float)
    length = path[-1].end - path[0].start if path else 0.0
    for (rank, _), spans in groupby(path, key=lambda span: (span.rank, span.instruction.kind in BUSY)):
        stretch = list(spans)
        words = [str(span.instruction) for span in stretch]
        if len(words) > 6:
            words = [*words[:3], f"... {len(words) - 6} more ...", *words[-3:]]
        lines.append(f"{stretch[0].start:>10g} {stretch[-1].end:>10g}  rank {rank}  {'  '.join(words)}")
        for span in stretch:
            totals[span.instruction.kind.value] += span.end - span.start
    parts = [f"{name} {seconds:g} ({seconds / length:.1%})" for name, seconds in totals.items()]
    return "\n".join([f"critical path, {length:g}: {', '.join(parts)}", *lines])


class _Chain:
    """The nodes of a timeline's graph with their times, from which the critical chain is found.

    Attributes:
        places: node -> rank -> position of the node in the rank's row.
        starts, ends: times of each node, by its number.
    """

    def __init__(self, timeline: Timeline, costs: Costs) -> None:
        self.timeline, self.graph = timeline, graph_of(timeline, refusal=refusal, overlap=costs.overlap)
        self.occupation, self.latency = channel_times(self.graph, *costs.edges(len(timeline.graph.edges)))
        self.places: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, row in enumerate(self.graph.node_of):
            for position, node in enumerate(row):
                self.places[node][rank] = position
        self.starts, self.ends = [0.0], [0.0]
        self.before_on_channel: dict[int, int] = {}
        last_on_channel = [START] * len(self.graph.channels)
        for node, take in enumerate(self.graph.takes_of[1:], start=1):
            if take < 0:
                self.before_on_channel[node], last_on_channel[take] = last_on_channel[take], node
            self._time(node, take)

    def _time(self, node: int, take: int) -> None:
        """Note the start and the end of a node: those of the timeline, or for a node without a row, from its waits."""
        places, timeline = self.places.get(node, {}), self.timeline
        if places:
            start = max(timeline.starts[rank][position] for rank, position in places.items())
        else:
            start = max(came for _, _, came in self._waits(node, 0))
        if take < 0:
            end = start + self.occupation[~take] + self.latency[~take]
        elif places:
            end = max(timeline.ends[rank][position] for rank, position in places.items())
        else:
            end = start + (self.occupation[self._sent_over(node)] if node in self.graph.holds else 0.0)
        self.starts.append(start)
        self.ends.append(end)

    def follow(self) -> Iterator[Span]:
        """Yield the spans of the chain, from the last to the first."""
        rank, node = max(enumerate(self.graph.last), key=lambda each: self.ends[each[1]], default=(0, START))
        end, tolerance = self.ends[node], _TOLERANCE * self.timeline.end
        while node:
            rank = self._rank(node, rank)
            instruction = self._instruction(node, rank)
            yield Span(rank, instruction, self.starts[node], end)
            before, its, came = max(self._waits(node, rank), key=lambda wait: wait[2])
            if abs(came - self.starts[node]) > tolerance:
                raise ValueError(
                    f"rank {rank}: {instruction} starts at {self.starts[node]:g}, and what it waits for has come "
                    f"at {came:g}; give a simulated timeline, and the costs that it was simulated on"
                )
            node, rank, end = before, its, came

    def _waits(self, node: int, rank: int) -> list[tuple[int, int, float]]:
        """The waits of a node as (awaited node, rank of that node, time), a rank's own work first."""
        graph, ends, take = self.graph, self.ends, self.graph.takes_of[node]
        before, source = graph.befores[node], graph.sources[node]
        if take < 0:
            channel, previous = graph.channels[~take], self.before_on_channel[node]
            waits = [(before, channel.sender, ends[before]), (source, channel.receiver, ends[source])]
            if previous:
                waits.append((previous, channel.sender, self.starts[previous] + self.occupation[channel.number]))
            return waits
        kind, _ = graph.takes[take]
        if kind in MOVES:
            nth = graph.moves[rank].nodes.index(node)
            pair = sorted(self.places[node], key=lambda each: each != rank)
            requests = [(graph.moves[each].requested[nth][0], each) for each in pair]
            requests += [(graph.moves[rank].nodes[nth - 1], rank)] * (nth > 0)
            return [(each, its, ends[each]) for each, its in requests]
        its = rank if kind not in REDUCTIONS else NOBODY  # a reduction is a span of its first member
        return [(before, its, ends[before]), (source, its, ends[source])]

    def _rank(self, node: int, rank: int) -> int:
        """The rank whose span a node is, if `rank` has waited for the node."""
        if self.graph.takes_of[node] < 0 or node in self.graph.holds:
            return self.graph.channels[self._sent_over(node)].sender
        places = self.places.get(node)
        return rank if places is None or rank in places else min(places)

    def _sent_over(self, node: int) -> int:
        """The channel of a transfer, or of a SEND that holds its rank."""
        take = self.graph.takes_of[node]
        return self.graph.takes[take][1][0] if take >= 0 else ~take

    def _instruction(self, node: int, rank: int) -> Instruction | None:
        """The instruction of a node, for a transfer that of its sender; None for a node that only joins waits."""
        graph, take = self.graph, self.graph.takes_of[node]
        if take < 0 or node in graph.holds:
            channel = graph.channels[self._sent_over(node)]
            index = graph.holds[node] if node in graph.holds else channel.nodes.index(node)
            word = Instruction(SEND_OF[channel.tensor], channel.maker, self.timeline.first_microbatch + index)
            return replace(word, peer=self.timeline.graph.named_peer(word, channel.taker))
        return self.timeline.rows[rank][self.places[node][rank]] if node in self.places else None
