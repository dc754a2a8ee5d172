"""Which rank sends which part of which tensor to which: the same answer on every rank, without asking. No torch.

Problem: before and after a change of degrees, tensors are cut differently, and several ranks hold the same part. If
every rank fetched from the first that has it, that one would send everything.

Solution: all ranks know what each holds and wants, and compute one plan. What a rank has itself it takes from itself;
the rest comes from the holders that have been given the fewest bytes to send so far. What one rank sends another is
packed into messages of bounded size.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.training.transition.boxes import Box, overlap, split, without

ALIGNMENT = 16  # bytes: where the parts of a message begin


class Part(NamedTuple):
    """A part of a tensor that one rank holds or wants. `element_bytes`: the size of an element."""

    key: str
    box: Box
    element_bytes: int


class Move(NamedTuple):
    """`box` of the tensor goes from the part of number `held` of rank `source` to part `wanted` of rank `target`."""

    source: int
    held: int
    target: int
    wanted: int
    box: Box
    num_bytes: int


class Plan(NamedTuple):
    """All moves, those within a rank included, and the parts (rank, number) that nobody holds in full."""

    moves: list[Move]
    missing: list[tuple[int, int]]


def plan_moves(held: Sequence[Sequence[Part]], wanted: Sequence[Sequence[Part]]) -> Plan:
    """The plan for what the ranks hold and want, in rank order."""
    holders = _Holders(held)
    sent = [0] * len(held)
    plan = Plan([], [])
    for target, parts in enumerate(wanted):
        for number, part in enumerate(parts):
            candidates = holders.that_overlap(part)
            candidates.sort(key=lambda each: (each[0] != target, sent[each[0]], (each[0] - target) % len(held), each))
            rest = [part.box] if part.box.size else []
            for source, index, box in candidates:
                if not rest:
                    break
                still = []
                for piece in rest:
                    common = overlap(piece, box)
                    if common is None:
                        still.append(piece)
                        continue
                    move = Move(source, index, target, number, common, common.size * part.element_bytes)
                    plan.moves.append(move)
                    if source != target:
                        sent[source] += move.num_bytes
                    still.extend(without(piece, common))
                rest = still
            if rest:
                plan.missing.append((target, number))
    return plan


class _Holders:
    """Who holds what of each tensor, found by place on the first axis."""

    def __init__(self, held: Sequence[Sequence[Part]]) -> None:
        found: dict[str, list[tuple[int, int, int, Box]]] = defaultdict(list)
        for rank, parts in enumerate(held):
            for index, part in enumerate(parts):
                if part.box.size:
                    found[part.key].append((part.box.start[0] if part.box.start else 0, rank, index, part.box))
        self._by_key = {key: sorted(entries) for key, entries in found.items()}
        self._longest = {
            key: max(box.shape[0] if box.shape else 1 for *_, box in entries) for key, entries in found.items()
        }

    def that_overlap(self, part: Part) -> list[tuple[int, int, Box]]:
        """(rank, number, box) of those that may hold something of `part`."""
        entries = self._by_key.get(part.key, [])
        if not entries:
            return []
        if not part.box.start:
            return [entry[1:] for entry in entries]
        first = bisect_left(entries, (part.box.start[0] - self._longest[part.key] + 1,))
        last = bisect_left(entries, (part.box.stop[0],))
        return [entry[1:] for entry in entries[first:last] if overlap(entry[3], part.box)]


class Message(NamedTuple):
    """Moves from one rank to another that travel together; `places`: at which byte each begins."""

    moves: tuple[Move, ...]
    places: tuple[int, ...]
    num_bytes: int


def messages(moves: Iterable[Move], most_bytes: int) -> list[Message]:
    """The moves between one pair of ranks, in messages of at most `most_bytes`; large ones are cut.

    Raises ValueError where `most_bytes` is too few for one element.
    """
    result: list[Message] = []
    taken: list[Move] = []
    places: list[int] = []
    end = 0
    for move in moves:
        element_bytes = move.num_bytes // move.box.size
        if most_bytes < element_bytes:
            raise ValueError(f"messages of {most_bytes} bytes hold no element of {element_bytes}: allow larger ones")
        for box in split(move.box, most_bytes // element_bytes):
            place, num_bytes = -(-end // ALIGNMENT) * ALIGNMENT, box.size * element_bytes
            if place + num_bytes > most_bytes:
                result.append(Message(tuple(taken), tuple(places), end))
                taken, places, place = [], [], 0
            taken.append(move._replace(box=box, num_bytes=num_bytes))
            places.append(place)
            end = place + num_bytes
    if taken:
        result.append(Message(tuple(taken), tuple(places), end))
    return result
