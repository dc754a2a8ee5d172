"""Step 3 of Mixed-pipe (section 4.1.3): the refinement of a partition by moving units between stages.

A step is kept only if `Score.better_than` holds: memory above the limits never grows, the objective never grows, and
each step lowers one of the two, or the unevenness of the devices, by more than rounding. There are finitely many
partitions, so refinement ends. Stages stay in an order of computation (`PartitionState`), so no circle arises.
"""

import math
import random
import time
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from operator import itemgetter

from megatron.partition.units import PartitionState, Score

CHAIN = 16
"""The number of steps of a chain (`_chain`)."""

MOST_SWAPS = 300
"""The most swaps that are priced in a round. The swaps with the best estimated times are priced first."""


class PriceBudget:
    """The number of partitions that a search may price, which does not depend on the machine's speed.

    Args:
        prices: the number.
        of: the budget of all searches together, which is also charged for each price.
        ends_at: the time limit, as a value of `time.monotonic`, if the user limits seconds.
    """

    def __init__(self, prices: float, *, of: "PriceBudget | None" = None, ends_at: float = math.inf) -> None:
        self._left, self._of, self._ends_at = prices, of, ends_at

    @property
    def left(self) -> float:
        return self._left

    @left.setter
    def left(self, prices: float) -> None:
        if self._of is not None:
            self._of.left -= self._left - prices
        self._left = prices

    @property
    def spent(self) -> bool:
        is_late = self._ends_at < math.inf and time.monotonic() >= self._ends_at
        return self._left <= 0 or is_late or (self._of is not None and self._of.spent)


def refine(state: PartitionState, budget: PriceBudget, *, enough: float = 0.0) -> Score:
    """Improve `state` in place until a local optimum, the end of the budget, or an objective of `enough`
    picoseconds."""
    score = state.score()
    while not budget.spent and (score.excess or score.worst > enough):
        for step in (_move, _slide, _swap_devices, _pass_on, _swap, _chain):
            better = step(state, score, budget)
            if better is not None:
                score = better
                break
        else:
            break
    return score


def _busiest(state: PartitionState) -> int:
    """The device with the most memory above its limit, or else the device with the longest time."""
    over = [used - limit for used, limit in zip(state.memory, state.units.limits, strict=True)]
    if max(over) > 0:
        return over.index(max(over))
    times = state.device_times()
    return times.index(max(times))


def _units_of(state: PartitionState, device: int) -> list[int]:
    return [unit for stage in _stages_on(state, device) for unit in sorted(state.members[stage])]


def _stages_on(state: PartitionState, device: int) -> list[int]:
    return [stage for stage, holds in enumerate(state.device_of) if holds == device]


Steps = list[tuple[int, int, int]]
"""Moves of units, each as (unit, stage before, stage after)."""

Tries = Iterator[tuple[Score, Steps]]
"""Steps that were made, priced and taken back, with the score after them."""


def _tried(state: PartitionState, budget: PriceBudget, moves: Iterable[tuple[int, int]]) -> Tries:
    """Try each of `moves`, (unit, stage), by itself."""
    for unit, stage in moves:
        back = state.stage_of[unit]
        state.move(unit, stage)
        found = state.score()
        state.move(unit, back)
        budget.left -= 1
        yield found, [(unit, back, stage)]


def _best(state: PartitionState, score: Score, tries: Tries) -> Score | None:
    """Make the steps with the best score; None if no score is better than `score`."""
    chosen: Steps = []
    for found, steps in tries:
        if found.better_than(score):
            score, chosen = found, steps
    _make(state, chosen)
    return score if chosen else None


def _make(state: PartitionState, steps: Steps) -> None:
    for unit, _, stage in steps:
        state.move(unit, stage)


def _undo(state: PartitionState, steps: Steps) -> None:
    for unit, back, _ in reversed(steps):
        state.move(unit, back)


def _move(state: PartitionState, score: Score, budget: PriceBudget) -> Score | None:
    """Make the best move of one unit off the busiest device, or of a reader onto one of its stages, if that stage sends
    for longer than the device computes."""
    return _best(state, score, _tried(state, budget, _moves_off(state, _busiest(state))))


def _moves_off(state: PartitionState, device: int) -> Iterator[tuple[int, int]]:
    for unit in _units_of(state, device):
        for stage in state.window(unit):
            if state.device_of[stage] != device and state.may_move(unit, stage):
                yield unit, stage
    if max(state.sent) == 0:
        return
    compute = state.time[device] / state.units.speeds[device]
    for stage, num_bytes in enumerate(state.sent):
        if state.device_of[stage] == device and num_bytes * state.units.picoseconds_per_byte > compute:
            for unit in sorted(state.members[stage]):
                for reader in state.units.consumers[unit]:
                    if state.stage_of[reader] != stage and state.may_move(reader, stage):
                        yield reader, stage


def _slide(state: PartitionState, score: Score, budget: PriceBudget) -> Score | None:
    """Move the first or the last units of a stage of the busiest device, one after another, to a stage of another
    device, or units of that stage to this one. The best state on the way is kept."""
    device = _busiest(state)
    for stage in _stages_on(state, device):
        for other in sorted(range(len(state.device_of)), key=lambda each: abs(each - stage)):
            if state.device_of[other] == device:
                continue
            for source, target in ((stage, other), (other, stage)):
                found = _slide_between(state, score, budget, source, target)
                if found is not None:
                    return found
    return None


def _slide_between(state: PartitionState, score: Score, budget: PriceBudget, source: int, target: int) -> Score | None:
    moved: list[int] = []
    best, length = score, 0
    for unit in sorted(state.members[source], reverse=target > source):
        if not state.may_move(unit, target):
            continue
        state.move(unit, target)
        moved.append(unit)
        found = state.score()
        budget.left -= 1
        if found.better_than(best):
            best, length = found, len(moved)
        elif length == 0 and len(moved) > 1 and found.worst > 2 * score.worst:
            break
    for unit in reversed(moved[length:]):
        state.move(unit, source)
    return best if length else None


def _swap_devices(state: PartitionState, score: Score, budget: PriceBudget) -> Score | None:
    """Make the best exchange of devices between a stage of the busiest device and a stage of another device."""
    device, holds = _busiest(state), list(state.device_of)
    best: tuple[Score, list[int]] = (score, holds)
    for one, mine in enumerate(holds):
        if mine != device or not state.may_change_device(one):
            continue
        for other, theirs in enumerate(holds):
            if theirs == device or not state.may_change_device(other):
                continue
            tried = list(holds)
            tried[one], tried[other] = theirs, mine
            if _promises(state, one, other, score):
                state.set_devices(tried)
                found = state.score()
                budget.left -= 10  # `set_devices` computes all sums anew
                if found.better_than(best[0]):
                    best = (found, tried)
                state.set_devices(holds)
    if best[1] is holds:
        return None
    state.set_devices(best[1])
    return best[0]


def _promises(state: PartitionState, one: int, other: int, score: Score) -> bool:
    """Whether an exchange of the devices of stages `one` and `other` may improve the score, by compute times alone."""
    if score.excess:
        return True
    units = state.units
    mine, theirs = state.device_of[one], state.device_of[other]
    more = sum(units.time[u] for u in state.members[other]) - sum(units.time[u] for u in state.members[one])
    after = max((state.time[mine] + more) / units.speeds[mine], (state.time[theirs] - more) / units.speeds[theirs])
    return after <= score.worst


def _swap(state: PartitionState, score: Score, budget: PriceBudget) -> Score | None:
    """Exchange a unit of the busiest device with a unit of another device. Pairs that balance the two devices best are
    tried first."""
    device, units = _busiest(state), state.units
    choices = []
    for unit in _units_of(state, device):
        for stage in state.window(unit):
            other = state.device_of[stage]
            if other == device or not state.may_move(unit, stage):
                continue
            for each in state.members[stage]:
                more = units.time[each] - units.time[unit]
                after = max(
                    (state.time[device] + more) / units.speeds[device], (state.time[other] - more) / units.speeds[other]
                )
                if score.excess or after < score.worst:
                    choices.append((after, unit, stage, each))
    choices.sort()
    for _, unit, stage, each in choices[:MOST_SWAPS]:
        back = state.stage_of[unit]
        if state.stage_of[each] != stage or not state.may_move(unit, stage):
            continue
        state.move(unit, stage)
        for target in state.window(each):
            if state.device_of[target] != device or not state.may_move(each, target):
                continue
            state.move(each, target)
            found = state.score()
            budget.left -= 1
            if found.better_than(score):
                return found
            state.move(each, stage)
        state.move(unit, back)
    return None


def _passes(state: PartitionState, stage: int, direction: int) -> Iterator[Steps]:
    """Pass work from stage to stage in one direction. Each stage passes on about as much time as it received.

    Yields all steps so far after each stage. In a chain of layers no other step moves work from one end to the other.
    """
    steps: Steps = []
    given, target = 0, stage + direction
    fresh: set[int] = set()
    while 0 <= target < len(state.device_of):
        moved, arrived = 0, set()
        for unit in sorted(state.members[target - direction] - fresh, reverse=direction > 0):
            time = state.units.time[unit]
            if moved and abs(moved + time - given) >= abs(moved - given):
                break
            if not state.may_move(unit, target):
                break
            steps.append((unit, target - direction, target))
            state.move(unit, target)
            arrived.add(unit)
            moved += time
            if not given and moved:
                break
        if not moved:  # all units that moved take no time
            while steps and steps[-1][0] in arrived:
                unit, back, _ = steps.pop()
                state.move(unit, back)
            return
        given, fresh = given or moved, arrived
        yield steps
        target += direction


def _passed(state: PartitionState, budget: PriceBudget, locked: Set[int] = frozenset()) -> Tries:
    """Try each pass of work (`_passes`) that begins at a stage of the busiest device, up to the first locked unit."""
    for stage in _stages_on(state, _busiest(state)):
        for direction in (-1, 1):
            steps: Steps = []
            for steps in _passes(state, stage, direction):
                if not locked.isdisjoint(unit for unit, _, _ in steps):
                    break
                found = state.score()
                budget.left -= 1
                yield found, list(steps)
            _undo(state, steps)


def _pass_on(state: PartitionState, score: Score, budget: PriceBudget) -> Score | None:
    """Make the best pass of work that begins at a stage of the busiest device."""
    return _best(state, score, _passed(state, budget))


def _chain(state: PartitionState, score: Score, budget: PriceBudget) -> Score | None:
    """Make several steps in a row, each the best step off the device that is then the busiest, even if it is worse.

    No unit moves twice. The best state on the way is kept if it is better than the start. So one long unit can be
    exchanged for several short units, over several devices.
    """
    done: Steps = []
    locked: set[int] = set()
    best, length = score, 0
    for _ in range(CHAIN):
        if budget.spent:
            break
        moves = [move for move in _moves_off(state, _busiest(state)) if move[0] not in locked]
        tries = chain(_tried(state, budget, moves), _passed(state, budget, locked))
        least_bad = min(tries, key=itemgetter(0), default=None)
        if least_bad is None:
            break
        found, steps = least_bad
        _make(state, steps)
        done += steps
        locked.update(unit for unit, _, _ in steps)
        if found.better_than(best):
            best, length = found, len(done)
    _undo(state, done[length:])
    return best if length else None


def kick(state: PartitionState, rng: random.Random) -> None:
    """Disturb a partition at random: exchange the devices of two stages, or move units to a stage up to two places
    away."""
    num_stages = len(state.device_of)
    for _ in range(rng.randint(1, 3)):
        one, other = rng.randrange(num_stages), rng.randrange(num_stages)
        if rng.random() < 0.4:
            if state.may_change_device(one) and state.may_change_device(other):
                holds = list(state.device_of)
                holds[one], holds[other] = holds[other], holds[one]
                state.set_devices(holds)
            continue
        other = one + rng.choice([-2, -1, 1, 2])
        if not 0 <= other < num_stages or not state.members[one]:
            continue
        wanted = rng.randint(1, max(1, len(state.members[one]) // 2))
        for unit in sorted(state.members[one], reverse=other > one):
            if wanted and state.may_move(unit, other):
                state.move(unit, other)
                wanted -= 1
