"""What bounds a simulated run: the chain of instructions and transfers in which each starts when the one before ends.

A run gets faster only if something on this chain does. It is followed back from the end of the last computation: of all
that an instruction waited for, the last to come is on the chain. What it can have waited for is what
`megatron.pipeline.simulate` says; a start that none of it explains means that the timeline is no simulation on these
costs, and is refused. Of several that come at the same moment the rank's own work is named, so that the chain changes
ranks no more often than it has to.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megatron.pipeline.program.instruction import (
    AWAITS_REDUCTIONS,
    BUSY,
    HOST_WORDS,
    MOVES,
    RECEIVES,
    REDUCTIONS,
    SEND_OF,
    SENDS,
    SHARED_REDUCTIONS,
    Instruction,
    Kind,
    Lane,
    Tensor,
    kinds,
)
from megatron.pipeline.program.lane_order import awaited_in_lanes
from megatron.pipeline.program.move_order import awaited_moves
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.timeline import Span, Timeline

_TOLERANCE = 1e-9  # of the makespan
_Channel = tuple[Kind, int, int]  # the kind that sends, the sending stage, the receiving stage


def critical_path(timeline: Timeline, costs: Costs) -> tuple[Span, ...]:
    """The chain that bounds a simulated timeline, from its start to its end, without gaps.

    Args:
        timeline: what `simulate` returned.
        costs: what it was given.

    Returns:
        Spans that take time, in their order; each starts where the one before ends. A transfer stands at its sender:
        from its start to its arrival, or until its channel or its sender is free, whichever was waited for.

    Raises:
        ValueError: the timeline is no simulation on these costs.
    """
    chain = list(_Waits(timeline, costs).follow())
    return tuple(span for span in reversed(chain) if span.end > span.start)


def critical_path_text(path: Sequence[Span]) -> str:
    """A path in words: a line for each stretch on one rank or between two, then what each kind of work takes of it."""
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


@dataclass(frozen=True, slots=True)
class _Cause:
    """Work that may have been waited for: when it started and ended, and what it had waited for itself."""

    start: float
    end: float
    rank: int
    instruction: Instruction
    waits: Callable[[], Iterable["_Cause"]]


class _Waits:
    """What everything in a timeline waited for."""

    def __init__(self, timeline: Timeline, costs: Costs) -> None:
        self.timeline, self.overlap = timeline, costs.overlap
        self.rows, self.starts, self.ends = timeline.rows, timeline.starts, timeline.ends
        self.graph = timeline.graph
        forward, backward, self.latency = costs.edges(len(timeline.graph.edges))
        self.occupation = {Tensor.ACTIVATION: forward, Tensor.GRADIENT: backward}
        self.place: dict[tuple[Kind, int, int], tuple[int, int]] = {}  # of what has a microbatch: rank, position
        self.ends_of: dict[tuple[Kind, int, int, int], tuple[int, int]] = {}  # the same of transfers, by their peer
        self.sent: dict[_Channel, list[int]] = defaultdict(list)  # microbatches in the order of their channel
        self.members: dict[tuple[Kind, int | None], list[tuple[int, int]]] = defaultdict(list)
        self.reductions: dict[tuple[int, bool], list[int]] = defaultdict(list)  # of a rank, after their STEP or not
        self.reductions_to: dict[tuple[int, int | None], list[int]] = defaultdict(list)  # of a rank, a version
        self.moves: list[list[int]] = []  # positions of each rank's moves
        self.awaited: list[dict[int, int]] = []
        self.awaited_in_lanes: list[dict[int, tuple[int, ...]]] = []
        self.before_in_lane: list[dict[int, int]] = []  # of a rank's words to and from the host
        self.sends = any(each.kind in SENDS for row in self.rows for each in row)
        for rank in range(len(self.rows)):
            self._read(rank)
        self.queue_place = {
            (rank, position): (late, number)
            for (rank, late), positions in self.reductions.items()
            for number, position in enumerate(positions)
        }
        self.channel_place = {
            (*channel, microbatch): number
            for channel, microbatches in self.sent.items()
            for number, microbatch in enumerate(microbatches)
        }
        self.transfer_starts: dict[_Channel, list[float]] = {}

    def _read(self, rank: int) -> None:
        stepped, moves, row = set(), [], self.rows[rank]
        before_in_lane: dict[int, int] = {}
        last_of_lane: dict[Lane, int] = {}
        for position, each in enumerate(row):
            kind = each.kind
            if kind is Kind.STEP:
                stepped.add(each.version)
            elif kind in REDUCTIONS:
                self.members[kind, each.version].append((rank, position))
                self.reductions[rank, each.version in stepped].append(position)
                self.reductions_to[rank, each.version].append(position)
            elif kind in HOST_WORDS:
                before_in_lane[position] = last_of_lane.get(kind.row.lane, -1)
                last_of_lane[kind.row.lane] = position
            elif kind in SENDS or kind in RECEIVES:
                peer = self.graph.peer_of(each)
                self.ends_of[kind, each.stage, peer, each.microbatch] = rank, position
                if kind in SENDS:
                    self.sent[kind, each.stage, peer].append(each.microbatch)
            else:
                self.place[kind, each.stage, each.microbatch] = rank, position
                if kind in MOVES:
                    moves.append(position)
                if kind.row.makes and not self.sends:
                    for peer in self.graph.takers(kind.row.makes, each.stage):
                        self.sent[SEND_OF[kind.row.makes], each.stage, peer].append(each.microbatch)
        self.moves.append(moves)
        self.awaited.append(awaited_moves(row, num_frozen=self.graph.num_frozen) if moves else {})
        self.before_in_lane.append(before_in_lane)
        self.awaited_in_lanes.append(awaited_in_lanes(row, self.timeline.rank_of_stage) if before_in_lane else {})

    def follow(self) -> Iterator[Span]:
        """The spans of the chain, from the last one back."""
        ends = [cause for rank, row in enumerate(self.rows) for cause in self._before(rank, len(row))]
        cause = max(ends, key=lambda each: each.end, default=None)
        tolerance = _TOLERANCE * self.timeline.end
        while cause is not None:
            yield Span(cause.rank, cause.instruction, cause.start, cause.end)
            before = max(cause.waits(), key=lambda each: each.end, default=None)
            came = 0.0 if before is None else before.end
            if abs(came - cause.start) > tolerance:
                raise ValueError(
                    f"rank {cause.rank}: {cause.instruction} starts at {cause.start:g}, and what it waits for has come "
                    f"at {came:g}; give a simulated timeline, and the costs that it was simulated on"
                )
            cause = before

    # --- the rank itself

    def _computed(self, rank: int, position: int) -> _Cause:
        """A computation or a STEP."""
        start, end, instruction = self.starts[rank][position], self.ends[rank][position], self.rows[rank][position]
        return _Cause(start, end, rank, instruction, lambda: self._before_computed(rank, position, instruction))

    def _before_computed(self, rank: int, position: int, instruction: Instruction) -> Iterator[_Cause]:
        yield from self._before(rank, position)
        if instruction.kind in AWAITS_REDUCTIONS:
            yield from self._reductions_of(rank, position, instruction.version)
        needs = instruction.kind.row.needs
        for maker in self.graph.makers(needs, instruction.stage) if needs else ():
            yield self._arrived((SEND_OF[needs], maker, instruction.stage), instruction.microbatch)
        if position in self.awaited[rank]:
            yield self._moved(rank, self.awaited[rank][position] - 1)
        yield from self._awaited_in_lanes(rank, position)

    def _before(self, rank: int, position: int) -> Iterator[_Cause]:
        """What held the rank until it came to a position: the computation before, a SEND without overlap, or one that
        waited until those before it were read."""
        for earlier in range(position - 1, -1, -1):
            instruction = self.rows[rank][earlier]
            if instruction.kind in SENDS:
                yield from self._before_read(instruction)
            if instruction.kind in BUSY:
                computed = self._computed(rank, earlier)
                yield computed if self.overlap or self.sends else self._held(computed)
                return
            if instruction.kind in SENDS and not self.overlap:
                channel = instruction.kind, instruction.stage, self.graph.peer_of(instruction)
                held = self._occupation(channel)
                posted = max((each.end for each in self._before(rank, earlier)), default=0.0)
                yield _Cause(
                    posted, posted + held, rank, instruction, lambda place=earlier: self._before(rank, place)
                )  # fmt: skip
                return

    def _before_read(self, instruction: Instruction) -> Iterator[_Cause]:
        """What held the RECV for which a SEND of a stage without gradients waits."""
        bound, source = self.graph.most_unread(instruction.stage), instruction.stage
        if bound is None or instruction.kind is not Kind.SEND_F:
            return
        channel = instruction.kind, source, self.graph.peer_of(instruction)
        number = self.channel_place[(*channel, instruction.microbatch)] - bound
        if number >= 0 and self._crosses(channel):
            receive = channel[0].row.other_end, channel[2], source, self.sent[channel][number]
            yield from self._before(*self.ends_of[receive])

    def _held(self, computed: _Cause) -> _Cause:
        """The cause in a program without transfers: the computation, and the sending of what it made."""
        made, tensor = computed.instruction, computed.instruction.kind.row.makes
        cause = computed
        for peer in self.graph.takers(tensor, made.stage) if tensor else ():
            held = self._occupation((SEND_OF[tensor], made.stage, peer))
            if held:
                sending = Instruction(SEND_OF[tensor], made.stage, made.microbatch)
                cause = _Cause(cause.end, cause.end + held, cause.rank, sending, lambda before=cause: [before])
        return cause

    # --- transfers

    def _occupation(self, channel: _Channel) -> float:
        """Seconds for which a transfer holds its channel; none within a rank."""
        send, source, target = channel
        if not self._crosses(channel):
            return 0.0
        return self.occupation[send.row.sends][self.graph.edge_between(source, target)]

    def _crosses(self, channel: _Channel) -> bool:
        _, source, target = channel
        return self.timeline.rank_of_stage[source] != self.timeline.rank_of_stage[target]

    def _arrived(self, channel: _Channel, microbatch: int) -> _Cause:
        """The arrival of what a stage made."""
        if not self._crosses(channel):
            return self._maker(channel, microbatch)
        return self._transfer(channel, microbatch, self.latency[self.graph.edge_between(*channel[1:])])

    def _maker(self, channel: _Channel, microbatch: int) -> _Cause:
        send, source, _ = channel
        made = ((kind, source, microbatch) for kind in kinds(lambda word: word.makes is send.row.sends))
        return self._computed(*next(self.place[each] for each in made if each in self.place))

    def _transfer(self, channel: _Channel, microbatch: int, latency: float) -> _Cause:
        """A transfer over a channel, and `latency` behind it."""
        send, source, target = channel
        number = self.channel_place[(*channel, microbatch)]
        start = self._transfer_start(channel, number)
        end = start + self._occupation(channel) + latency
        instruction = Instruction(send, source, microbatch)
        instruction = replace(instruction, peer=self.graph.named_peer(instruction, target))
        rank = self.timeline.rank_of_stage[source]
        return _Cause(start, end, rank, instruction, lambda: self._before_transfer(channel, number))

    def _before_transfer(self, channel: _Channel, number: int) -> Iterator[_Cause]:
        send, source, target = channel
        microbatch = self.sent[channel][number]
        if self.sends:
            for end in ((*channel, microbatch), (send.row.other_end, target, source, microbatch)):
                yield from self._before(*self.ends_of[end])
        else:
            yield self._maker(channel, microbatch)
        if number:
            yield self._transfer(channel, self.sent[channel][number - 1], 0.0)

    def _transfer_start(self, channel: _Channel, number: int) -> float:
        if self.sends:
            rank, position = self.ends_of[(*channel, self.sent[channel][number])]
            return self.starts[rank][position]
        if channel not in self.transfer_starts:
            starts, free_at, occupation = [], 0.0, self._occupation(channel)
            for microbatch in self.sent[channel]:
                starts.append(max(self._maker(channel, microbatch).end, free_at))
                free_at = starts[-1] + occupation
            self.transfer_starts[channel] = starts
        return self.transfer_starts[channel][number]

    # --- in the background

    def _moved(self, rank: int, nth: int) -> _Cause:
        """The end of a rank's move; it starts when both ends have come to it."""
        position = self.moves[rank][nth]
        move = self.rows[rank][position]
        partner = self.timeline.rank_of_stage[self.timeline.pairs.of_stage(move.stage)]
        start = max(self.starts[each][self.moves[each][nth]] for each in (rank, partner))
        return _Cause(start, self.ends[rank][position], rank, move, lambda: self._before_move((rank, partner), nth))

    def _before_move(self, pair: tuple[int, int], nth: int) -> Iterator[_Cause]:
        for each in pair:
            yield from self._before(each, self.moves[each][nth])
        if nth:  # both ends have completed it at once
            yield self._moved(pair[0], nth - 1)

    def _awaited_in_lanes(self, rank: int, position: int) -> Iterator[_Cause]:
        """What an instruction waits for where weights live on the host: words of lanes, or reductions."""
        for earlier in self.awaited_in_lanes[rank].get(position, ()):
            reduces = self.rows[rank][earlier].kind in REDUCTIONS
            yield self._reduced(rank, earlier) if reduces else self._carried(rank, earlier)

    def _carried(self, rank: int, position: int) -> _Cause:
        """A word to or from the host."""
        start, end, instruction = self.starts[rank][position], self.ends[rank][position], self.rows[rank][position]
        return _Cause(start, end, rank, instruction, lambda: self._before_carried(rank, position))

    def _before_carried(self, rank: int, position: int) -> Iterator[_Cause]:
        yield from self._before(rank, position)
        yield from self._awaited_in_lanes(rank, position)
        if self.before_in_lane[rank][position] >= 0:
            yield self._carried(rank, self.before_in_lane[rank][position])

    def _reductions_of(self, rank: int, position: int, version: int | None) -> Iterator[_Cause]:
        """The reductions that a STEP waits for."""
        for earlier in self.reductions_to[rank, version]:
            if earlier < position:
                yield self._reduced(rank, earlier)

    def _reduced(self, rank: int, position: int) -> _Cause:
        start, end, instruction = self.starts[rank][position], self.ends[rank][position], self.rows[rank][position]
        shared = instruction.kind in SHARED_REDUCTIONS
        members = self.members[instruction.kind, instruction.version] if shared else [(rank, position)]
        return _Cause(start, end, rank, instruction, lambda: self._before_reduced(members))

    def _before_reduced(self, members: list[tuple[int, int]]) -> Iterator[_Cause]:
        for rank, position in members:
            yield from self._before(rank, position)
            yield from self._awaited_in_lanes(rank, position)
            late, number = self.queue_place[rank, position]
            if number:
                yield self._reduced(rank, self.reductions[rank, late][number - 1])
