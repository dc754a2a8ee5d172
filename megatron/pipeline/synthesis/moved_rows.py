"""Rows with moves: a pass puts moves into words such that each rank keeps its limit, and another count proves it.

- A forward without room sends away the microbatch that is needed last (Belady's rule), some computations ahead.
- A microbatch that is away comes back some computations before it is needed, as soon as there is room for it; or, if
  the rank stays full, in exchange for another one.
- A microbatch that waits for its W cannot leave. If it takes the room, its W is pulled forward.

Several numbers of computations ahead are tried, since the best depends on the time of a copy. The pass counts in the
unit of the limits, so it treats stages of several sizes, halves and recomputes alike. Its answer is not trusted:
`most_held` counts the memory that a row holds at the worst timing, as the checker counts microbatches, and words that
exceed a limit are dropped. The simulator times the others, with copies on their lanes and moves in their queues.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from megatron.pipeline.check.memory import HeldMicrobatches
from megatron.pipeline.program.instruction import (
    BEGINS_BACKWARD,
    COMPUTATIONS,
    MOVES,
    SWAPS,
    USES_SAVED,
    Instruction,
    Kind,
    Row,
)
from megatron.pipeline.program.lane_order import MoveOrder, Pairs, awaited_in_lanes
from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate import simulate
from megatron.pipeline.synthesis.moves import PAIR, Way, may_move, moved_size, pair_ranks
from megatron.pipeline.synthesis.problem import ROUNDING, Problem, Words

_Saved = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Lead:
    """How early microbatches move, in computations of the rank.

    Attributes:
        out: the most computations between a move away and the computation that needs its room.
        back: the most computations between a move back and the computation that needs the microbatch.
        at_once: a microbatch that is next needed more than so many computations after its forward moves away directly
            behind the forward; 0: none does.
    """

    out: int
    back: int
    at_once: int = 0


@dataclass(frozen=True)
class MovedProgram:
    """Words with moves in their rows.

    Attributes:
        way: where the moves lead.
        words: the computations of each rank.
        program: computations and moves.
        seconds: the simulated time, without transfers in the rows.
        ahead: how far ahead the moves are.
        begun_with: the name of the words from which these were made.
    """

    way: Way
    words: Words
    program: Program
    seconds: float
    ahead: Lead
    begun_with: str

    @property
    def cost(self) -> tuple[float, int]:
        """The key by which programs are compared: rounded seconds, then the number of moves."""
        return float(f"{self.seconds:.9g}"), sum(map(len, self.program.rows))


class Mover:
    """Puts moves of one way into words of one problem. Rows are cached, since most words differ in only one."""

    def __init__(self, problem: Problem, way: Way) -> None:
        self.problem, self.way = problem, way
        self._pairs, self._others = Pairs(problem.rank_of_stage), pair_ranks(problem) if way is PAIR else None
        self._rows: dict[tuple[Row, Lead], Row | None] = {}
        self._held: dict[Row, float] = {}

    def keeping(self, problem: Problem) -> "Mover":
        """Return a mover for another choice of kept microbatches. It shares the cached rows; a row shows its choice."""
        other = copy(self)
        other.problem = problem
        if self._others is not None:
            other._held = {}  # the size of accepted activations depends on the choice at the other rank's stage
        return other

    def moved(self, words: Words, ahead: Lead, name: str) -> MovedProgram | None:
        """Return words with moves; None where no moves keep the limits."""
        problem, rows = self.problem, []
        plain = problem.program(words)
        for rank, row in enumerate(plain.rows):
            if (row, ahead) not in self._rows:
                self._rows[row, ahead] = self._row(rank, row, words[rank], ahead)
            if (made := self._rows[row, ahead]) is None:
                return None
            rows.append(made)
        words = [word_of(problem, row) for row in rows]
        if self._others is not None:  # the other ends of moves stand at the beginning of the row of the other rank
            ends = [tuple(self._pairs.counterpart(each) for each in row if each.kind in MOVES) for row in rows]
            if any(ends[rank] and ends[other] for rank, other in enumerate(self._others) if rank != other):
                return None  # a pair moves in one direction
            rows = [ends[other] + row for other, row in zip(self._others, rows, strict=True)]
        for rank, row in enumerate(rows):
            if row not in self._held:
                self._held[row] = held_by(problem, row)
            if self._held[row] > problem.limit_of(rank) * (1 + ROUNDING):
                return None
        program = plain.with_rows(tuple(rows))
        return MovedProgram(self.way, words, program, simulate(program, problem.costs).makespan, ahead, name)

    def _row(self, rank: int, row: Row, word: Sequence[int], ahead: Lead) -> Row | None:
        most = self.problem.limit_of(rank) * (1 + ROUNDING)
        if self.problem.most_held(rank, word) <= most:
            return row
        return _Row(self.problem, self.way, row, most, ahead).moves()


def word_of(problem: Problem, row: Row) -> list[int]:
    """Return the word of a row. A kept microbatch, too, gets an R: before the next R, I or B of its stage."""
    word, num_recomputes = [], dict.fromkeys(problem.recomputed, 0)
    for each in row:
        if each.kind in USES_SAVED and each.stage in problem.recomputed:
            lacking = each.microbatch + 1 - num_recomputes[each.stage] - (each.kind is Kind.RECOMPUTE)
            word += [problem.number_of[Kind.RECOMPUTE, each.stage]] * max(0, lacking)
            num_recomputes[each.stage] = max(num_recomputes[each.stage], each.microbatch + 1)
        if each.kind in COMPUTATIONS:
            word.append(problem.number_of[each.kind, each.stage])
    return word


def most_held(problem: Problem, program: Program) -> tuple[float, ...]:
    """Return the most that each rank of a proved program may hold, in the unit of the limits, whatever the timing."""
    return tuple(held_by(problem, row) for row in program.rows)


def held_by(problem: Problem, row: Row) -> float:
    """Return the most memory that a row may hold at any time, whatever the timing."""
    pairs, order, held = Pairs(problem.rank_of_stage), MoveOrder(), HeldMicrobatches()
    lanes = awaited_in_lanes(row, problem.rank_of_stage) if any(each.kind in SWAPS for each in row) else {}
    peak, num_moves, number_at = 0.0, 0, []
    for position, each in enumerate(row):
        complete = max((number_at[other] for other in lanes.get(position, ())), default=order.awaited(each))
        if each.kind in COMPUTATIONS:
            held.complete(complete)
            queue = problem.number_of[each.kind, each.stage]
            held.own += problem.takes_at[queue][each.microbatch]
            peak = max(peak, held.most)
            held.own -= problem.gives[queue]
        elif each.kind in MOVES | SWAPS:
            stage = pairs.of_stage(each.stage) if each.kind.row.of_pair else each.stage
            held.request(each.kind.row.saved * moved_size(problem, stage), num_moves)
            num_moves += 1
            peak = max(peak, held.most)
        number_at.append(num_moves)
    return peak


class _Row:
    """The row of one rank, while moves are put into it.

    Args:
        problem: sizes.
        way: the words of the moves.
        row: the computations.
        most: the most that the rank may hold.
        ahead: how far ahead a microbatch leaves and comes back.
    """

    def __init__(self, problem: Problem, way: Way, row: Row, most: float, ahead: Lead) -> None:
        self._problem, self._way, self._row, self._most, self._ahead = problem, way, list(row), most, ahead
        self._sizes = [moved_size(problem, stage) for stage in range(problem.num_stages)]
        self._held, self._num_forwards = 0.0, [0] * problem.num_stages
        self._can_leave: set[_Saved] = set()
        self._away: set[_Saved] = set()
        self._made: list[Instruction] = []
        self._note_places()

    def moves(self) -> Row | None:
        """Return the row with moves; None where a microbatch finds no room."""
        place = 0
        while place < len(self._row):
            for at, has_room in ((place, self._bring_back), (place + 1, self._make_room)):
                if not has_room(place):
                    if not self._pull_weights(at):
                        return None
                    break
            else:
                self._compute(place)
                place += 1
        return tuple(self._made)

    def _note_places(self) -> None:
        queues = [self._problem.number_of[each.kind, each.stage] for each in self._row]
        numbered = zip(queues, self._row, strict=True)
        self._takes = [self._problem.takes_at[queue][each.microbatch] for queue, each in numbered]
        self._gives = [self._problem.gives[queue] for queue in queues]
        self._needed_at: dict[_Saved, int] = {}
        for place, each in enumerate(self._row):
            if each.kind in USES_SAVED:
                self._needed_at.setdefault((each.stage, each.microbatch), place)

    def _compute(self, place: int) -> None:
        each = self._row[place]
        self._made.append(each)
        self._held += self._takes[place] - self._gives[place]
        if each.kind is Kind.FORWARD and may_move(self._problem, each.stage, each.microbatch):
            self._num_forwards[each.stage] += 1
            self._can_leave.add((each.stage, each.microbatch))
            distance = self._needed_at[each.stage, each.microbatch] - place
            if 0 < self._ahead.at_once < distance and self._num_forwards[each.stage] > 1:
                self._leave((each.stage, each.microbatch))
        elif each.kind in USES_SAVED:
            self._can_leave.discard((each.stage, each.microbatch))

    def _pull_weights(self, place: int) -> bool:
        """Pull the next W, which makes room, to a place. Returns whether there is one whose I stands before it."""
        begun = {(each.stage, each.microbatch) for each in self._row[:place] if each.kind in BEGINS_BACKWARD}
        for at in range(place + 1, len(self._row)):
            each = self._row[at]
            if each.kind is Kind.BACKWARD_WEIGHT and (each.stage, each.microbatch) in begun:
                self._row.insert(place, self._row.pop(at))
                self._note_places()
                return True
        return False

    def _bring_back(self, place: int) -> bool:
        """Bring back microbatches that the next computations need. Returns whether this computation has its own."""
        for item in sorted(self._away, key=self._needed_at.__getitem__):
            needed_at = self._needed_at[item]
            if needed_at > place + self._ahead.back:
                break
            size = self._sizes[item[0]]
            lacks = self._most_until(place, needed_at) + size - self._most
            if lacks > 0 and (needed_at > place + 1 or not self._send_away(place, lacks, needed_at)):
                if needed_at == place:
                    return False
                continue
            self._away.discard(item)
            self._held += size
            self._made.append(Instruction(self._way.back, *item))
        return True

    def _needs_room(self, kind: Kind) -> bool:
        return kind is Kind.FORWARD or (kind is Kind.RECOMPUTE and bool(self._problem.kept))

    def _make_room(self, place: int) -> bool:
        """Make room for coming forwards, and for recomputes if microbatches are kept.

        Returns whether the next computation has room.
        """
        for other in range(place + 1, min(place + self._ahead.out, len(self._row) - 1) + 1):
            if self._needs_room(self._row[other].kind):
                lacks = self._most_until(place, other) - self._most
                if lacks > 0 and not self._send_away(place, lacks, other) and other == place + 1:
                    return False
        return True

    def _most_until(self, place: int, last: int) -> float:
        """The most that is held from a place to the start of a later computation, without further moves."""
        held = most = self._held
        for at in range(place, last + 1):
            held += self._takes[at]
            most = max(most, held)
            held -= self._gives[at]
        return most

    def _send_away(self, place: int, lacks: float, until: int) -> bool:
        """Send away the microbatches that are needed last, all after `until`. Returns whether enough can leave."""
        chosen = []
        for item in sorted(self._can_leave, key=self._needed_at.__getitem__, reverse=True):
            if lacks <= 0 or self._needed_at[item] <= until:
                break
            if self._num_forwards[item[0]] > 1:  # the second forward shows which tensors microbatches share
                chosen.append(item)
                lacks -= self._sizes[item[0]]
        if lacks > 0:
            return False
        for item in chosen:
            self._leave(item)
        return True

    def _leave(self, item: _Saved) -> None:
        self._can_leave.discard(item)
        self._away.add(item)
        self._held -= self._sizes[item[0]]
        self._made.append(Instruction(self._way.out, *item))
