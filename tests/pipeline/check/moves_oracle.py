"""A second opinion on moves of saved activations, written without the checker: try every timing.

The checker reasons about prefixes of a rank's moves. The oracle lets time pass in every way there is. Of one pair of
ranks any computation or move may last arbitrarily long, and any may end next; the other ranks are never late, for the
pair itself can be as late as it likes. In each state that can be reached, what both ranks hold is counted, and a
computation that begins has to find its activations. What nobody can leave and is not the end is a deadlock.

The rules are those of the docstring of `program.lane_order`; what computes, sends and updates what is the business
of the other oracle.
"""

from collections.abc import Iterator

from megatron.pipeline.program.instruction import COMPUTATIONS, MOVES, Instruction, Kind
from megatron.pipeline.program.program import Program

_State = tuple[
    tuple[int, ...], tuple[bool, ...], int
]  # positions, who of the pair computes, complete moves of the pair
_NEEDS_ACTIVATIONS = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)
_BRINGS = (Kind.LOAD, Kind.ACCEPT)


class Wrong(Exception):
    """Something that a timing leads to and must not happen."""


def most_held(program: Program, rank: int) -> tuple[int, int]:
    """The most microbatches that a rank, and the one that it is paired with, hold in any state of any timing.

    Raises:
        Wrong: a deadlock, ends of a move that differ, or activations that are not where they are needed.
    """
    return _Pair(program, rank).explore()


class _Pair:
    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rows = program, program.rows
        self.last, self.num_frozen = program.num_stages - 1, program.graph.num_frozen
        trained = next(stage for stage in program.stages_of(rank) if not self._is_frozen(stage))
        self.ranks = (rank, program.rank_of_stage[self._pair_of(trained)])
        self.moves = [[i for i, each in enumerate(self.rows[rank]) if each.kind in MOVES] for rank in self.ranks]
        self.place = {each: i for row in self.rows for i, each in enumerate(row)}  # no instruction stands twice
        self._require_counterparts()
        self.peaks = [0, 0]

    def _is_frozen(self, stage: int) -> bool:
        return stage < self.num_frozen

    def _pair_of(self, stage: int) -> int:
        """As many stages before the end as it is behind the frozen ones."""
        return self.last - (stage - self.num_frozen)

    def explore(self) -> tuple[int, int]:
        first = self._settled([0] * len(self.rows), (False, False), 0)
        seen, agenda = {first}, [first]
        while agenda:
            state = agenda.pop()
            self._count(state)
            successors = list(self._successors(state))
            if not successors and list(state[0]) != [len(row) for row in self.rows]:
                raise Wrong("a deadlock")
            new = [each for each in successors if each not in seen]
            seen.update(new)
            agenda += new
        return self.peaks[0], self.peaks[1]

    # --- what may happen next

    def _successors(self, state: _State) -> Iterator[_State]:
        positions, computing, num_complete = state
        if all(num_complete < self._num_requested(side, state) for side in (0, 1)):
            yield self._settled(positions, computing, num_complete + 1)
        for side, rank in enumerate(self.ranks):
            after = list(positions)
            if computing[side]:
                after[rank] += 1
                yield self._settled(after, _replaced(computing, side, False), num_complete)
            elif self._may_begin(rank, state):
                self._require_activations(side, state)
                yield positions, _replaced(computing, side, True), num_complete

    def _settled(
        self, positions: list[int] | tuple[int, ...], computing: tuple[bool, ...], num_complete: int
    ) -> _State:
        """What takes no time of the pair's: all that only posts, and everything on other ranks."""
        positions, goes_on = list(positions), True
        while goes_on:
            goes_on = False
            for rank, row in enumerate(self.rows):
                while positions[rank] < len(row):
                    state = tuple(positions), computing, num_complete
                    kind = row[positions[rank]].kind
                    if kind in COMPUTATIONS and (rank in self.ranks or not self._may_begin(rank, state)):
                        break
                    if kind is Kind.STEP and not self._is_reduced(row[positions[rank]], positions):
                        break
                    positions[rank] += 1
                    goes_on = True
        return tuple(positions), computing, num_complete

    def _may_begin(self, rank: int, state: _State) -> bool:
        positions, position, row = state[0], state[0][rank], self.rows[rank]
        if position == len(row) or row[position].kind not in COMPUTATIONS:
            return False
        return self._has_tensor(row[position], positions) and self._moves_are_complete(rank, state)

    def _has_tensor(self, needs: Instruction, positions: tuple[int, ...]) -> bool:
        ranks, forward = self.program.rank_of_stage, needs.kind is Kind.FORWARD
        stage = needs.stage + (-1 if forward else 1)
        if needs.kind not in (Kind.FORWARD, Kind.BACKWARD) or not 0 <= stage < len(ranks):
            return True
        made = self.place[Instruction(needs.kind, stage, needs.microbatch, needs.version)]
        return made < positions[ranks[stage]]

    def _moves_are_complete(self, rank: int, state: _State) -> bool:
        if rank not in self.ranks or self._is_frozen(self.rows[rank][state[0][rank]].stage):
            return True
        side, row, position = self.ranks.index(rank), self.rows[rank], state[0][rank]
        needed = row[position]
        before = [i for i in range(position) if row[i].kind in COMPUTATIONS and not self._is_frozen(row[i].stage)]
        for nth, place in enumerate(self.moves[side]):
            move = row[place]
            same = (move.stage, move.microbatch) == (needed.stage, needed.microbatch)
            loads = move.kind is Kind.LOAD and same and needed.kind in _NEEDS_ACTIVATIONS and place < position
            makes_room = move.kind is Kind.EVICT and needed.kind is Kind.FORWARD and before and place < before[-1]
            if (loads or makes_room) and nth >= state[2]:
                return False
        return True

    def _is_reduced(self, step: Instruction, positions: list[int]) -> bool:
        own = self.program.rank_of_stage[step.stage]
        if all(map(self._is_frozen, self.program.stages_of(own))):
            return True  # it has nothing to wait for
        norms = {rank: i for rank, row in enumerate(self.rows) for i, each in enumerate(row)
                 if each.kind is Kind.REDUCE_NORM and each.version == step.version}  # fmt: skip
        return all(positions[rank] > place for rank, place in norms.items())

    # --- what is held

    def _count(self, state: _State) -> None:
        positions, computing, num_complete = state
        for side, rank in enumerate(self.ranks):
            held = 0
            for each in self.rows[rank][: positions[rank] + computing[side]]:
                held += each.kind is Kind.FORWARD and not self._is_frozen(each.stage)
            for each in self.rows[rank][: positions[rank]]:
                held -= each.kind is Kind.BACKWARD
            for nth, place in enumerate(self.moves[side][: self._num_requested(side, state)]):
                if self.rows[rank][place].kind in _BRINGS:
                    held += nth <= num_complete  # it is posted when the one before it is complete
                else:
                    held -= nth < num_complete
            self.peaks[side] = max(self.peaks[side], held)

    def _num_requested(self, side: int, state: _State) -> int:
        return sum(place < state[0][self.ranks[side]] for place in self.moves[side])

    def _require_activations(self, side: int, state: _State) -> None:
        row, position = self.rows[self.ranks[side]], state[0][self.ranks[side]]
        what = row[position]
        if what.kind not in _NEEDS_ACTIVATIONS:
            return
        away = 0
        for nth, place in enumerate(self.moves[side]):
            move = row[place]
            if place < position and (move.stage, move.microbatch) == (what.stage, what.microbatch):
                away += (move.kind is Kind.EVICT) - (move.kind is Kind.LOAD and nth < state[2])
        if away:
            raise Wrong(f"{what} without its activations")

    def _require_counterparts(self) -> None:
        other_end = {Kind.EVICT: Kind.ACCEPT, Kind.ACCEPT: Kind.EVICT, Kind.LOAD: Kind.RETURN, Kind.RETURN: Kind.LOAD}
        own, others = ([self.rows[r][i] for i in places] for r, places in zip(self.ranks, self.moves, strict=True))
        if [(other_end[each.kind], self._pair_of(each.stage), each.microbatch) for each in own] != [
            (each.kind, each.stage, each.microbatch) for each in others
        ]:
            raise Wrong("the ends of the moves differ")
        for row in (own, others):
            for each in row:
                ends = [other.kind for other in row if (other.stage, other.microbatch) == (each.stage, each.microbatch)]
                if ends not in ([Kind.EVICT, Kind.LOAD], [Kind.ACCEPT, Kind.RETURN]):
                    raise Wrong(f"{each} does not move once there and once back")
                if each.kind is Kind.EVICT and self._place_of_forward(each) > self.place[each]:
                    raise Wrong(f"{each} before its forward")

    def _place_of_forward(self, move: Instruction) -> int:
        row = self.rows[self.program.rank_of_stage[move.stage]]
        what = Kind.FORWARD, move.stage, move.microbatch
        return next(i for i, each in enumerate(row) if (each.kind, each.stage, each.microbatch) == what)


def _replaced(values: tuple[bool, ...], index: int, value: bool) -> tuple[bool, ...]:
    return tuple(value if each == index else old for each, old in enumerate(values))
