"""How long a program takes, by executing its very instructions on a table of costs.

A closed formula knows one schedule. This executes any program, under the meaning that the runtime gives to its
instructions, so what it says changes when the program changes:

- a rank goes through its row in order; computations and STEPs take their time on the rank;
- SEND and RECV only post. A transfer starts when both ends have posted it and its channel (one per directed edge and
  kind of traffic) has taken the transfer before it; it occupies the channel for bytes / bandwidth and arrives
  `latency` later. Transfers overlap with computation;
- F waits until its input has arrived, B and I until the gradient of their output has;
- EVICT, ACCEPT, RETURN and LOAD only request a move of saved activations. Each rank carries its moves out one after
  another in the background, as `megatron.pipeline.moves` says; one starts when both its ends have come to it, and takes
  its time on the pair. What waits for moves is said there, too;
- REDUCE_* only post, too. The reductions of a rank run one after another in the background, in the order of its row;
  one starts when all its members have reached it (norm: every rank; embedding: the ranks that post it; gradients:
  replicas do the same at the same time, so none is waited for). One that stands after the STEP of its version serves
  the report alone and runs in a queue beside, so that no later STEP waits for it;
- STEP waits for the reductions of its version that its rank has posted.

A program without any transfers (a compute-only one) is timed as if each tensor were sent when it is made and its
receive posted in time.

Nothing that a rank does depends on which other rank was faster, so the ranks need not be executed in the order of
time: each runs until it waits for something whose time is not known yet, and is put back on the work list by whoever
makes it known. Every instruction is executed once: the time is linear in their number, one to two microseconds each.
"""

import math
from collections import deque

from megatron.pipeline.costs import Costs
from megatron.pipeline.instruction import MOVES, Instruction, Kind
from megatron.pipeline.moves import awaited_moves, counterpart, pair_of
from megatron.pipeline.program import Program
from megatron.pipeline.timeline import Span, Timeline

__all__ = ["Costs", "SimulationError", "Span", "Timeline", "simulate"]


class SimulationError(ValueError):
    """A program cannot be executed to its end."""


def simulate(program: Program, costs: Costs | None = None, *, synchronous_moves: bool = False) -> Timeline:
    """Execute `program` on `costs` (default: the paper's, a forward takes 1 and a backward 2, everything else
        nothing). `synchronous_moves`: for comparison, computations do not overlap with moves (`moves.MoveOrder`).

    Returns:
        The timeline, from 0, with the spans of every instruction of the program.

    Raises:
        ValueError: a cost is out of range.
        SimulationError: an instruction of a kind that is not known here, ends of a channel that do not pair up, or a
            deadlock; run `check`, which says more. Times that overflow.
    """
    return _Simulation(program, costs or Costs(), synchronous_moves=synchronous_moves).run()


_FORWARD, _BACKWARD, _ALONE, _SEND, _RECV, _MOVE, _STEP, _REDUCE = range(8)
_ACTION = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _BACKWARD,
    Kind.BACKWARD_WEIGHT: _ALONE,
    Kind.RECOMPUTE: _ALONE,
    Kind.SEND_F: _SEND,
    Kind.RECV_F: _RECV,
    Kind.SEND_B: _SEND,
    Kind.RECV_B: _RECV,
    Kind.EVICT: _MOVE,
    Kind.ACCEPT: _MOVE,
    Kind.RETURN: _MOVE,
    Kind.LOAD: _MOVE,
    Kind.STEP: _STEP,
    Kind.REDUCE_GRAD: _REDUCE,
    Kind.REDUCE_EMBED: _REDUCE,
    Kind.REDUCE_NORM: _REDUCE,
}
_TRANSFERS = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
_UNKNOWN = -1.0  # a time that is not known yet; times are never negative


class _Channel:
    """One directed edge for one kind of traffic: pairs the k-th send with the k-th receive."""

    __slots__ = ("arrivals", "free_at", "latency", "occupation", "receiver", "receives", "sender", "sends")

    def __init__(self, occupation: float, latency: float, arrivals: list[float], sender: int, receiver: int) -> None:
        self.occupation, self.latency = occupation, latency
        self.arrivals = arrivals  # of the receiving stage, per microbatch
        self.sender, self.receiver = sender, receiver  # ranks
        self.free_at = 0.0
        # waiting for their other end: when posted, position in the row, microbatch
        self.sends: deque[tuple[float, int, int]] = deque()
        self.receives: deque[tuple[float, int, int]] = deque()


class _Moves:
    """The moves of a rank, in order: those that it has requested, and when each one was complete."""

    __slots__ = ("awaited", "ends", "requested")

    def __init__(self) -> None:
        self.requested: list[tuple[float, int]] = []  # when, position in the row
        self.ends: list[float] = []
        self.awaited = 0  # how many have to be complete before the rank goes on; 0: it does not wait


class _Queue:
    """Reductions that a rank runs one after another."""

    __slots__ = ("free_at", "posted", "rank", "reached")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.posted: deque[tuple[float, int]] = deque()  # when posted, position in the row
        self.reached = False  # whether the first of them has joined its collective
        self.free_at = 0.0


class _Reduction:
    """One collective: starts when its last member has reached it."""

    __slots__ = ("duration", "members", "start")

    def __init__(self) -> None:
        self.members: list[tuple[_Queue, int]] = []  # the queue and the position of those who have reached it
        self.start = 0.0
        self.duration = 0.0


class _Simulation:
    def __init__(self, program: Program, costs: Costs, *, synchronous_moves: bool) -> None:
        self.program = program
        self.rows = program.rows
        num_stages, num_ranks = len(program.rank_of_stage), len(program.rows)
        self.seconds = costs.seconds(num_stages)
        for kind in (Kind.STEP, Kind.REDUCE_GRAD):  # a rank's, for all its stages; it stands at the lowest
            times = self.seconds[kind]
            self.seconds[kind] = [
                math.fsum(times[each] for each in program.stages_of(rank)) for rank in program.rank_of_stage
            ]
        self.clock = [0.0] * num_ranks
        self.position = [0] * num_ranks
        self.starts = [[_UNKNOWN] * len(row) for row in program.rows]
        self.ends = [[_UNKNOWN] * len(row) for row in program.rows]
        self.runnable = list(range(num_ranks - 1, -1, -1))
        # tensors: when the input of each (stage, microbatch) arrives, and the gradient of its output
        self.first_microbatch = program.first_microbatch
        self.num_microbatches = sum(program.batches)
        self.inputs = [[_UNKNOWN] * self.num_microbatches for _ in range(num_stages)]
        self.gradients = [[_UNKNOWN] * self.num_microbatches for _ in range(num_stages)]
        self.inputs[0] = [0.0] * self.num_microbatches
        self.gradients[-1] = [0.0] * self.num_microbatches
        self.awaits: list[tuple[list[float], int] | None] = [None] * num_ranks
        self._make_channels(costs)
        # moves of saved activations; a row without moves waits for none
        self.moves = [_Moves() for _ in range(num_ranks)]
        moves = [any(each.kind in MOVES for each in row) for row in self.rows]
        self.awaited_moves = [
            awaited_moves(row, synchronous=synchronous_moves) if any_move else {}
            for row, any_move in zip(self.rows, moves, strict=True)
        ]
        # reductions
        self.chains = [_Queue(rank) for rank in range(num_ranks)]
        self.reports = [_Queue(rank) for rank in range(num_ranks)]
        self.stepped: list[set[int | None]] = [set() for _ in range(num_ranks)]
        self.reductions: dict[tuple[Kind, int | None], _Reduction] = {}
        self.pending: list[dict[int | None, int]] = [{} for _ in range(num_ranks)]  # version -> reductions not complete
        self.reduced_at: list[dict[int | None, float]] = [{} for _ in range(num_ranks)]
        self.awaits_version = [False] * num_ranks
        self.num_members = self._count_members()

    def _make_channels(self, costs: Costs) -> None:
        """Channels between stages; without transfers, or within a rank, the computation itself delivers."""
        ranks, num_stages = self.program.rank_of_stage, len(self.program.rank_of_stage)
        occupation_f, occupation_b, latency = costs.edges(num_stages)
        transfers = any(instruction.kind in _TRANSFERS for row in self.rows for instruction in row)
        self.channels: dict[Kind, list[_Channel | None]] = {kind: [None] * num_stages for kind in _TRANSFERS}
        self.delivers: dict[Kind, list[_Channel | None]] = {
            kind: [None] * num_stages for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
        }
        for edge in range(num_stages - 1):
            low, high, crosses = ranks[edge], ranks[edge + 1], ranks[edge] != ranks[edge + 1]
            up = _Channel(occupation_f[edge] * crosses, latency[edge] * crosses, self.inputs[edge + 1], low, high)
            down = _Channel(occupation_b[edge] * crosses, latency[edge] * crosses, self.gradients[edge], high, low)
            if transfers and crosses:
                self.channels[Kind.SEND_F][edge] = self.channels[Kind.RECV_F][edge + 1] = up
                self.channels[Kind.SEND_B][edge + 1] = self.channels[Kind.RECV_B][edge] = down
            else:
                self.delivers[Kind.FORWARD][edge] = up
                self.delivers[Kind.BACKWARD][edge + 1] = self.delivers[Kind.BACKWARD_INPUT][edge + 1] = down

    def _count_members(self) -> dict[tuple[Kind, int | None], int]:
        counts: dict[tuple[Kind, int | None], int] = {}
        for row in self.rows:
            for instruction in row:
                if instruction.kind is Kind.REDUCE_NORM or instruction.kind is Kind.REDUCE_EMBED:
                    key = (instruction.kind, instruction.version)
                    counts[key] = counts.get(key, 0) + 1
        return counts

    def run(self) -> Timeline:
        while self.runnable:
            self._run_rank(self.runnable.pop())
        self._report_unfinished()
        if not all(map(math.isfinite, self.clock)):
            raise SimulationError("the times of the program are more than a number can hold; give smaller costs")
        program = self.program
        return Timeline(
            program.rows, tuple(self.starts), tuple(self.ends), tuple(program.rank_of_stage), tuple(program.batches),
            program.first_batch, program.first_microbatch, "simulated",
        )  # fmt: skip

    def _run_rank(self, rank: int) -> None:
        """Execute a rank's row until it waits for a time that is not known, or ends."""
        row, starts, ends, now = self.rows[rank], self.starts[rank], self.ends[rank], self.clock[rank]
        first, limit, seconds = self.first_microbatch, self.num_microbatches, self.seconds
        for position in range(self.position[rank], len(row)):
            instruction = row[position]
            kind, stage = instruction.kind, instruction.stage
            action = _ACTION.get(kind)
            if action is None:
                raise self._error(rank, position, f"the simulator does not know {kind.value}")
            if action < _STEP:
                microbatch = instruction.microbatch - first
                if not 0 <= microbatch < limit:
                    raise self._error(rank, position, "there is no such microbatch")
                if action <= _ALONE:
                    needed = self.awaited_moves[rank].get(position, 0)
                    if needed:
                        if len(self.moves[rank].ends) < needed:
                            self.moves[rank].awaited = needed
                            break
                        now = max(now, self.moves[rank].ends[needed - 1])
                    if action < _ALONE:
                        needs = self.inputs[stage] if action == _FORWARD else self.gradients[stage]
                        arrival = needs[microbatch]
                        if arrival == _UNKNOWN:
                            self.awaits[rank] = (needs, microbatch)
                            break
                        if arrival > now:
                            now = arrival
                    starts[position] = now
                    now += seconds[kind][stage]
                    ends[position] = now
                    if action < _ALONE:
                        channel = self.delivers[kind][stage]
                        if channel is not None:
                            self._transfer(channel, now, microbatch)
                    continue
                if action == _MOVE:
                    self.moves[rank].requested.append((now, position))
                    self._move(rank, self._partner(rank, position, instruction))
                    continue
                channel = self.channels[kind][stage]
                if channel is None:
                    raise self._error(rank, position, "no channel leads there")
                own, other = (channel.sends, channel.receives) if action == _SEND else (channel.receives, channel.sends)
                if other:
                    posted, place, counterpart = other.popleft()
                    if counterpart != microbatch:
                        reason = f"the other end of the channel has microbatch {counterpart + first} next"
                        raise self._error(rank, position, reason)
                    start, arrival = self._transfer(channel, max(posted, now), microbatch)
                    there = channel.receiver if other is channel.receives else channel.sender
                    starts[position] = self.starts[there][place] = start
                    ends[position] = self.ends[there][place] = arrival
                else:
                    own.append((now, position, microbatch))
            elif action == _STEP:
                if self.pending[rank].get(instruction.version):
                    self.awaits_version[rank] = True
                    break
                now = max(now, self.reduced_at[rank].get(instruction.version, 0.0))
                starts[position] = now
                now += seconds[kind][stage]
                ends[position] = now
                self.stepped[rank].add(instruction.version)
            else:
                queue = (self.reports if instruction.version in self.stepped[rank] else self.chains)[rank]
                self.pending[rank][instruction.version] = self.pending[rank].get(instruction.version, 0) + 1
                queue.posted.append((now, position))
                self._advance(queue)
        else:
            position = len(row)
        self.position[rank], self.clock[rank] = position, now

    def _transfer(self, channel: _Channel, ready: float, microbatch: int) -> tuple[float, float]:
        """Start and arrival of a transfer that both ends have posted by `ready`; who waits for the tensor can go on."""
        start = max(ready, channel.free_at)
        channel.free_at = start + channel.occupation
        arrival = channel.free_at + channel.latency
        channel.arrivals[microbatch] = arrival
        waiting = self.awaits[channel.receiver]
        if waiting is not None and waiting[0] is channel.arrivals and waiting[1] == microbatch:
            self.awaits[channel.receiver] = None
            self.runnable.append(channel.receiver)
        return start, arrival

    def _partner(self, rank: int, position: int, move: Instruction) -> int:
        ranks = self.program.rank_of_stage
        partner = ranks[pair_of(move.stage, len(ranks))]
        if partner == rank:
            raise self._error(rank, position, "its pair stage lives on the same rank")
        return partner

    def _move(self, rank: int, partner: int) -> None:
        """Carry out the next move of two ranks if both have requested it; who waits for it can go on."""
        pair = (rank, partner)
        nth = len(self.moves[rank].ends)
        if any(len(self.moves[each].requested) == nth for each in pair):
            return
        places = [self.moves[each].requested[nth][1] for each in pair]
        move, other = (self.rows[each][place] for each, place in zip(pair, places, strict=True))
        wanted = counterpart(move, len(self.program.rank_of_stage))
        if (other.kind, other.stage, other.microbatch) != (wanted.kind, wanted.stage, wanted.microbatch):
            raise self._error(rank, places[0], f"move {nth} of rank {partner} is {other}, not {wanted}")
        named = move if move.kind in (Kind.EVICT, Kind.LOAD) else other
        posted = [self._posted(each, nth) for each in pair]
        end = max(posted) + self.seconds[named.kind][named.stage]
        for each, place, start in zip(pair, places, posted, strict=True):
            moves = self.moves[each]
            self.starts[each][place], self.ends[each][place] = start, end
            moves.ends.append(end)
            if 0 < moves.awaited <= len(moves.ends):
                moves.awaited = 0
                self.runnable.append(each)

    def _posted(self, rank: int, nth: int) -> float:
        """When a rank's queue comes to a move: it is requested, and the one before it is complete."""
        moves = self.moves[rank]
        return max(moves.requested[nth][0], moves.ends[nth - 1] if nth else 0.0)

    def _advance(self, queue: _Queue) -> None:
        """Let the first reduction of a queue join its collective, which completes with its last member.

        Its completion lets the next reductions of all its members' queues join theirs, and so on.
        """
        agenda = [queue]
        while agenda:
            queue = agenda.pop()
            if not queue.posted or queue.reached:
                continue
            posted, position = queue.posted[0]
            instruction = self.rows[queue.rank][position]
            key = (instruction.kind, instruction.version)
            num_members = self.num_members.get(key, 1)
            reduction = self.reductions.setdefault(key, _Reduction()) if num_members > 1 else _Reduction()
            reduction.members.append((queue, position))
            reduction.start = max(reduction.start, posted, queue.free_at)
            reduction.duration = max(reduction.duration, self.seconds[instruction.kind][instruction.stage])
            queue.reached = True
            if len(reduction.members) == num_members:
                self.reductions.pop(key, None)
                self._complete(reduction)
                agenda += [member for member, _ in reduction.members]

    def _complete(self, reduction: _Reduction) -> None:
        end = reduction.start + reduction.duration
        for queue, position in reduction.members:
            queue.posted.popleft()
            queue.reached, queue.free_at = False, end
            rank = queue.rank
            version = self.rows[rank][position].version
            self.starts[rank][position], self.ends[rank][position] = reduction.start, end
            self.reduced_at[rank][version] = end
            self.pending[rank][version] -= 1
            if self.awaits_version[rank] and not self.pending[rank][version]:
                self.awaits_version[rank] = False
                self.runnable.append(rank)

    def _report_unfinished(self) -> None:
        """Raise if a rank has not reached the end of its row, or a transfer or reduction has lost a member."""
        for rank, row in enumerate(self.rows):
            position = self.position[rank]
            if position < len(row):
                what = "the reductions of its version" if row[position].kind is Kind.STEP else "its input or gradient"
                what = "the moves that it waits for" if self.moves[rank].awaited else what
                raise self._error(rank, position, f"a deadlock: {what} can never come")
        for rank, ends in enumerate(self.ends):
            if _UNKNOWN in ends:
                raise self._error(rank, ends.index(_UNKNOWN), "the other members never post it")

    def _error(self, rank: int, position: int, reason: str) -> SimulationError:
        return SimulationError(f"rank {rank}, position {position}, {self.rows[rank][position]}: {reason}")
