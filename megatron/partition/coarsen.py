"""Step 1 of Mixed-pipe (section 4.1.1): the coarsening of many nodes to L stages without a circle among the stages.

There are four methods, because none is best for every graph: by type, around centres, by heavy edges, and contiguous
pieces of the order of computation. Each returns the stage of every unit; stages are numbered in an order of
computation.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby

import networkx
import numpy

from megatron.partition.graph import without_circles
from megatron.partition.units import Units

Stages = list[int]
"""The stage of each unit."""


class Contraction:
    """Groups of units that merge along edges, with an order of computation of the groups that is kept up to date
    (section 4.1.1's "dynamic topological sort")."""

    def __init__(self, units: Units) -> None:
        self.order = list(range(len(units)))  # groups, each named by one of its units
        self.position = list(range(len(units)))
        self.members = {unit: [unit] for unit in range(len(units))}
        self.time, self.memory = list(units.time), list(units.memory)
        self.limit = max(units.limits)
        self.following: dict[int, dict[int, int]] = {unit: {} for unit in range(len(units))}
        self.preceding: dict[int, dict[int, int]] = {unit: {} for unit in range(len(units))}
        for tensor in units.tensors:
            for unit in tensor.consumers:
                size = self.following[tensor.source].get(unit, 0) + tensor.num_bytes
                self.following[tensor.source][unit] = self.preceding[unit][tensor.source] = size

    def __len__(self) -> int:
        return len(self.members)

    def neighbours(self, group: int) -> dict[int, int]:
        """Neighbouring group -> bytes of the tensors between it and `group`."""
        return self.preceding[group] | self.following[group]

    def merge(self, one: int, other: int) -> bool:
        """Merge the neighbour `other` into `one`. Returns False, without a change, if this would make a circle or need
        too much memory."""
        if self.memory[one] + self.memory[other] > self.limit:
            return False
        first, last = (one, other) if other in self.following[one] else (other, one)
        start, end = self.position[first], self.position[last]
        between = self.order[start + 1 : end]
        ahead = {last}  # groups between the two that lead to `last` and so must come before both
        for group in reversed(between):
            if not ahead.isdisjoint(self.following[group]):
                ahead.add(group)
        if any(group in ahead for group in self.following[first] if group != last):
            return False
        moved = [each for each in between if each in ahead] + [one] + [each for each in between if each not in ahead]
        self.order[start : end + 1] = moved
        for position in range(start, len(self.order)):
            self.position[self.order[position]] = position
        self._join(one, other)
        return True

    def _join(self, one: int, other: int) -> None:
        self.members[one] += self.members.pop(other)
        self.time[one] += self.time[other]
        self.memory[one] += self.memory[other]
        for mine, theirs in ((self.following, self.preceding), (self.preceding, self.following)):
            for group, size in mine.pop(other).items():
                del theirs[group][other]
                if group != one:
                    mine[one][group] = mine[one].get(group, 0) + size
                    theirs[group][one] = mine[one][group]

    def stages(self) -> Stages:
        found = [0] * sum(map(len, self.members.values()))
        for number, group in enumerate(self.order):
            for unit in self.members[group]:
                found[unit] = number
        return found


def without_trifles(units: Units) -> Stages:
    """Merge each unit without time, and each source of a tensor among the largest 1%, into its smallest neighbour."""
    groups = Contraction(units)
    sizes = [tensor.num_bytes for tensor in units.tensors]
    heavy = numpy.quantile(sizes, 0.99) if sizes else 0
    trifles = [unit for unit in range(len(units)) if units.time[unit] == 0]
    trifles += [tensor.source for tensor in units.tensors if tensor.num_bytes > heavy]
    mean = sum(units.time) / max(1, len(units))
    for unit in trifles:
        if unit in groups.members:
            for each in sorted(groups.neighbours(unit), key=groups.time.__getitem__):
                times = groups.time[each], groups.time[unit]
                if sum(times) <= 2 * mean + max(times) and groups.merge(each, unit):
                    break
    return groups.stages()


def pieces(units: Units, count: int) -> Stages:
    """Cut the order of computation into `count` contiguous pieces of about the same time."""
    return _pieces(range(len(units)), units.time, count)


def by_type(units: Units, count: int) -> Stages:
    """Split each run of consecutive same-type blocks into the same number of pieces, as far as it has enough blocks."""
    return _by_type(units, count, evenly=True)


def by_type_and_time(units: Units, count: int) -> Stages:
    """Split each run of consecutive same-type blocks into pieces in proportion to its execution time."""
    return _by_type(units, count, evenly=False)


def _by_type(units: Units, count: int, *, evenly: bool) -> Stages:
    blocks = _blocks(units)
    coarse, kinds = units.merged(blocks), [""] * (1 + max(blocks))
    heaviest = [-1] * len(kinds)
    nodes = {node.id: node for node in units.graph.nodes}
    for unit, block in enumerate(blocks):
        if units.time[unit] > heaviest[block]:
            heaviest[block] = units.time[unit]
            node = nodes[units.nodes[unit][0]]
            kinds[block] = f"{node.block} {_unnumbered(_block_path(node.scope))}"
    # Blocks of one type have equal names and times within a factor of 1.5, which separates encoder and decoder blocks.
    runs: list[list[int]] = []
    for _, run in groupby(range(len(coarse)), key=kinds.__getitem__):
        for each in run:
            last = runs[-1] if runs else None
            alike = last and kinds[last[-1]] == kinds[each]
            if alike and max(coarse.time[last[-1]], coarse.time[each]) <= 1.5 * min(
                coarse.time[last[-1]], coarse.time[each]
            ):
                last.append(each)
            else:
                runs.append([each])
    runs = _joined(runs, [sum(coarse.time[each] for each in run) for run in runs], count)
    shares = _shares(runs, coarse.time, count, evenly=evenly)
    stage_of_block, first = [0] * len(coarse), 0
    for run, share in zip(runs, shares, strict=True):
        for each, stage in zip(run, _pieces(run, coarse.time, share), strict=True):
            stage_of_block[each] = first + stage
        first += share
    return [stage_of_block[block] for block in blocks]


def _joined(runs: list[list[int]], times: list[int], count: int) -> list[list[int]]:
    """Join each run of less than half a stage's time (embeddings, norms, the loss) to the run before it, or to the
    following run if it is the first."""
    least = sum(times) / count / 2
    joined: list[list[int]] = []
    waiting: list[int] = []
    for run, time in zip(runs, times, strict=True):
        if time >= least:
            joined.append(waiting + run)
            waiting = []
        elif joined:
            joined[-1] += run
        else:
            waiting += run
    return joined or [waiting]


def _shares(runs: list[list[int]], time: Sequence[int], count: int, *, evenly: bool) -> list[int]:
    """The number of stages of each run: one, and each further stage goes to the run with the largest due per stage."""
    due = [1.0 if evenly else float(sum(time[each] for each in run)) for run in runs]
    shares = [1] * len(runs)
    while sum(shares) < count:
        growing = [each for each, run in enumerate(runs) if shares[each] < len(run)]
        if not growing:
            break
        shares[max(growing, key=lambda each: (due[each] / shares[each], -each))] += 1
    return shares


def _blocks(units: Units) -> list[int]:
    """The block of each unit: units whose scopes agree up to the first numbered part form a block. Blocks on a circle
    are merged."""
    nodes, special = {node.id: node for node in units.graph.nodes}, units.graph.special_block
    graph, last = networkx.DiGraph(), {}
    graph.add_nodes_from(range(len(units)))
    graph.add_edges_from((tensor.source, unit) for tensor in units.tensors for unit in tensor.consumers)
    for unit, ids in enumerate(units.nodes):
        node = nodes[ids[0]]
        match = re.match(rf"(.*?{re.escape(special)}\[\d+\])", node.scope) if special else None
        name = match.group(1) if match else _block_path(node.scope) if node.block else None
        if name:
            if name in last:
                graph.add_edges_from([(last[name], unit), (unit, last[name])])
            last[name] = unit
    return without_circles(graph)


def _block_path(scope: str) -> str:
    """The scope up to its first numbered part, such as `T5/T5Block[3]` or, in a captured graph,
    `T5/encoder/block/3`."""
    return re.match(r"[^\]]*?/\d+(?=/)|[^\]]*\]?", scope).group(0)


def _unnumbered(scope: str) -> str:
    return re.sub(r"\d+", "", scope)


def _pieces(run: Sequence[int], time: Sequence[int], count: int) -> Stages:
    """The piece of each item of `run`, from 0. Each cut is as near as possible to an equal share of the time, and no
    piece is empty."""
    run = list(run)
    count = min(count, len(run))
    total = numpy.cumsum([0, *(time[each] for each in run)])
    stages, begin = [], 0
    for piece in range(count):
        if piece == count - 1:
            end = len(run)
        else:
            wanted = total[-1] * (piece + 1) / count
            end = int(numpy.argmin(numpy.abs(total - wanted)))
            end = min(max(end, begin + 1), len(run) - (count - 1 - piece))
        stages += [piece] * (end - begin)
        begin = end
    return stages


def around_centres(units: Units, count: int) -> Stages:
    """Let `count` centres, evenly spread over the work, absorb neighbours in turn, the centre with the least time
    first."""
    groups, rising = Contraction(units), numpy.cumsum(units.time)
    wanted = [rising[-1] * (2 * number + 1) / (2 * count) for number in range(count)]
    centres = sorted({int(min(numpy.searchsorted(rising, each), len(units) - 1)) for each in wanted})
    growing = set(centres)
    while growing:
        centre = min(growing, key=lambda each: (groups.time[each], each))
        near = [each for each in groups.neighbours(centre) if each not in centres]
        if not any(groups.merge(centre, each) for each in sorted(near, key=lambda each: (groups.time[each], each))):
            growing.discard(centre)
    return _down_to(groups, count)


def by_heavy_edges(units: Units, count: int) -> Stages:
    """Merge the group with the least time into the neighbour with which it has most traffic, until `count` are left."""
    groups = Contraction(units)
    for unit in [unit for unit in range(len(units)) if units.time[unit] == 0]:
        any(groups.merge(each, unit) for each in sorted(groups.neighbours(unit), key=groups.time.__getitem__))
    return _down_to(groups, count, most_bytes=True)


def _down_to(groups: Contraction, count: int, *, most_bytes: bool = False) -> Stages:
    """Merge the group with the least time into a neighbour, as long as there are more than `count` groups and one can
    merge."""
    stuck: set[int] = set()
    while len(groups) > count and len(stuck) < len(groups):
        light = min((each for each in groups.members if each not in stuck), key=lambda each: (groups.time[each], each))
        near = groups.neighbours(light)

        def preference(each: int, near: dict[int, int] = near) -> tuple[int, int]:
            return (-near[each] if most_bytes else 0, groups.time[each])

        if any(groups.merge(each, light) for each in sorted(near, key=preference)):
            stuck.clear()
        else:
            stuck.add(light)
    return groups.stages()


COARSENINGS: dict[str, Callable[[Units, int], Stages]] = {
    "type": by_type,
    "type and time": by_type_and_time,
    "centres": around_centres,
    "heavy edges": by_heavy_edges,
    "pieces": pieces,
}
"""(units, L) -> the stage of each unit. There may be more than L stages if memory or circles forbid a merge."""
