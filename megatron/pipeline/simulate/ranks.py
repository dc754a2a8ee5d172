"""The ranks of a simulation: each goes through its row until it waits for a time that is not known yet."""

import math

from megatron.pipeline.program.instruction import (
    AWAITS_REDUCTIONS,
    HOST_WORDS,
    SHARED_REDUCTIONS,
    UPDATES,
    Kind,
    Lane,
    Subject,
)
from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate.channels import SimulatedChannels
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.lanes import SimulatedLanes
from megatron.pipeline.simulate.pair_moves import PairMoves
from megatron.pipeline.simulate.reductions import SimulatedReductions
from megatron.pipeline.simulate.state import UNKNOWN, SimulationError, SimulationState
from megatron.pipeline.simulate.timeline import Timeline

_COMPUTE, _SEND, _RECEIVE, _MOVE, _STEP, _REDUCE, _CARRY = range(7)


def _action(kind: Kind) -> int:
    """What a rank does when it comes to the word."""
    word = kind.row
    if word.lane is Lane.COMPUTE:
        return _COMPUTE if word.subject is Subject.MICROBATCH else _STEP
    if word.lane is Lane.TRANSFERS:
        return _SEND if word.sends else _RECEIVE
    if word.lane is Lane.MOVES:
        return _MOVE
    return _REDUCE if word.lane is Lane.CHAIN else _CARRY


_ACTIONS = {kind: _action(kind) for kind in Kind}


class Simulation:
    """One execution of a program."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.state = SimulationState(program)
        num_stages = len(program.rank_of_stage)
        seconds = costs.seconds(num_stages)
        of_stages = HOST_WORDS | ({Kind.REDUCE_GRAD} if program.residency else set())
        if program.weights.updates_alone:
            of_stages = UPDATES
        for kind in UPDATES - SHARED_REDUCTIONS - of_stages:  # a rank's, for all its stages; it stands at the lowest
            times = seconds[kind]
            trained = [program.stages_of(rank) for rank in range(program.num_ranks)]
            trained = [[each for each in own if not program.graph.is_forward_only(each)] for own in trained]
            seconds[kind] = [math.fsum(times[each] for each in trained[rank]) for rank in program.rank_of_stage]
        self.overlap = costs.overlap
        self.num_microbatches = sum(program.batches)
        self.channels = SimulatedChannels(self.state, costs)
        self.moves = PairMoves(self.state, seconds)
        self.lanes = SimulatedLanes(self.state, seconds)
        self.reductions = SimulatedReductions(self.state, seconds, self.lanes)
        awaited = zip(self.moves.awaited, self.lanes.awaited, strict=True)
        self.held = [moves.keys() | lanes.keys() for moves, lanes in awaited]  # positions that wait for any of them
        self.clock = [0.0] * len(program.rows)
        self.position = [0] * len(program.rows)
        self.meanings = self._meanings(seconds)

    def _meanings(self, seconds: dict[Kind, list[float]]) -> dict[Kind, tuple[int, list]]:
        """What each kind does, and of each stage what it takes: one look-up for each instruction.

        A computation takes seconds, the channels that bring what it needs and those that take what it makes; a
        transfer its channels by peer; a STEP seconds.
        """
        channels, nothing = self.channels, [()] * len(self.state.program.rank_of_stage)
        meanings = {}
        for kind, action in _ACTIONS.items():
            of_stage = nothing
            if action == _COMPUTE:
                word = kind.row
                parts = (
                    seconds[kind],
                    channels.needed.get(word.needs, nothing),
                    channels.delivered.get(word.makes, nothing),
                )
                of_stage = list(zip(*parts, strict=True))
            elif action == _STEP:
                of_stage = seconds[kind]
            elif action in (_SEND, _RECEIVE):
                of_stage = channels.posted[kind]
            meanings[kind] = action, of_stage
        return meanings

    def run(self) -> Timeline:
        state, runnable = self.state, self.state.runnable
        while runnable:
            self._run_rank(runnable.pop())
        self._require_end()
        if not all(map(math.isfinite, self.clock)):
            raise SimulationError("the times of the program are more than a number can hold; give smaller costs")
        program = state.program
        return Timeline(
            program.rows, tuple(state.starts), tuple(state.ends), tuple(program.rank_of_stage), tuple(program.batches),
            program.first_batch, program.first_microbatch, "simulated", program.edges,
        )  # fmt: skip

    def _run_rank(self, rank: int) -> None:
        """Execute a rank's row until it waits for a time that is not known, or ends."""
        state, meanings, held = self.state, self.meanings, self.held[rank]
        row, starts, ends, now = state.rows[rank], state.starts[rank], state.ends[rank], self.clock[rank]
        first, limit, overlap = state.program.first_microbatch, self.num_microbatches, self.overlap
        for position in range(self.position[rank], len(row)):
            instruction = row[position]
            try:
                action, of_stage = meanings[instruction.kind]
            except KeyError:
                raise state.error(rank, position, f"the simulator does not know {instruction.kind.value}") from None
            if action < _MOVE:
                microbatch = instruction.microbatch - first
                if not 0 <= microbatch < limit:
                    raise state.error(rank, position, "there is no such microbatch")
                if action == _COMPUTE:
                    seconds, needs, makes = of_stage[instruction.stage]
                    if held and position in held:
                        until = self._held_until(rank, position)
                        if until == UNKNOWN:
                            break
                        now = max(now, until)
                    arrival = now
                    for channel in needs:
                        arrived = channel.arrivals[microbatch]
                        if arrived == UNKNOWN:
                            channel.awaited = microbatch
                            arrival = UNKNOWN
                            break
                        if arrived > arrival:
                            arrival = arrived
                    if arrival == UNKNOWN:
                        break
                    starts[position] = now = arrival
                    now += seconds
                    ends[position] = now
                    for channel in makes:
                        channel.transfer(now, microbatch)
                        if not overlap:
                            now += channel.occupation
                else:
                    channel = of_stage[instruction.stage].get(instruction.peer)
                    if channel is None:
                        raise state.error(rank, position, "no channel leads there")
                    sends = action == _SEND
                    if channel.most_unread is not None:
                        if sends:
                            allowed = channel.may_send()
                            if allowed == UNKNOWN:
                                break
                            now = max(now, allowed)
                        else:
                            channel.note_receive(now)
                    own, other = (channel.sends, channel.receives) if sends else (channel.receives, channel.sends)
                    if other:
                        posted, there, counterpart = other.popleft()
                        if counterpart != microbatch:
                            reason = f"the other end of the channel has microbatch {counterpart + first} next"
                            raise state.error(rank, position, reason)
                        start = channel.transfer(posted if posted > now else now, microbatch)
                        peer = channel.receiver if sends else channel.sender
                        starts[position] = state.starts[peer][there] = start
                        ends[position] = state.ends[peer][there] = channel.arrivals[microbatch]
                    else:
                        own.append((now, position, microbatch))
                    if sends and not overlap:
                        now += channel.occupation
            elif action == _MOVE:
                self.moves.request(rank, position, now)
            elif action == _STEP:
                reduced = self.reductions.complete_at(rank, instruction.version)
                if reduced == UNKNOWN:
                    break
                starts[position] = now = max(now, reduced)
                now += of_stage[instruction.stage]
                ends[position] = now
                if instruction.kind is Kind.STEP:
                    self.reductions.step(rank, instruction.version)
            elif action == _REDUCE:
                self.reductions.post(rank, position, now)
            else:
                self.lanes.post(rank, position, now)
        else:
            position = len(row)
        self.position[rank], self.clock[rank] = position, now

    def _held_until(self, rank: int, position: int) -> float:
        """When the moves and the words to and from the host that a computation waits for are complete; `UNKNOWN`: the
        rank is called when that is known.
        """
        moved = self.moves.complete_at(rank, self.moves.awaited[rank].get(position, 0))
        carried = self.lanes.complete_at(rank, position)
        return UNKNOWN if UNKNOWN in (moved, carried) else max(moved, carried)

    def _require_end(self) -> None:
        """Raise if a rank has not reached the end of its row, or a transfer or reduction has lost a member."""
        state = self.state
        for rank, row in enumerate(state.rows):
            position = self.position[rank]
            if position == len(row):
                continue
            what = (
                "the reductions of its version" if row[position].kind in AWAITS_REDUCTIONS else "its input or gradient"
            )
            what = "the moves that it waits for" if self.moves.is_awaited(rank) else what
            what = "the copies to and from the host that it waits for" if self.lanes.is_awaited(rank) else what
            raise state.error(rank, position, f"a deadlock: {what} can never come")
        for rank, ends in enumerate(state.ends):
            if UNKNOWN in ends:
                raise state.error(rank, ends.index(UNKNOWN), "the other members never post it")
