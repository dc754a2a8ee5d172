"""The plan of transfers of parts of tensors between ranks, computed on every rank without communication or torch.

Problem: a change of degrees shards tensors differently, and several ranks hold the same part. If every rank fetched a
part from its first holder, that rank would send everything.

Solution: all ranks know which parts each rank holds and wants, and compute the same plan. A rank copies the parts that
it holds itself. Every other part comes from the holder with the fewest bytes to send so far. The parts from one rank to
another are split into messages of bounded size. Parts that are small, or scattered at one end, are packed into one
message.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import filterfalse
from typing import NamedTuple

from megatron.trainer.checkpoint.boxes import Box, is_run, overlap, split, without

ALIGNMENT = 16  # in bytes, of the parts in a message
DIRECT_BYTES = 64 * 1024  # packing a smaller part costs less than sending it alone


class TensorPart(NamedTuple):
    """A part of a tensor that one rank holds or wants.

    `element_bytes`: bytes of an element. `in_order`: whether the elements are contiguous in the host's memory.
    """

    key: str
    box: Box
    element_bytes: int
    in_order: bool = True


class Move(NamedTuple):
    """A move of `box` from part number `held` of rank `source` to part number `wanted` of rank `target`.

    `is_run`: whether the elements are contiguous at both ends.
    """

    source: int
    held: int
    target: int
    wanted: int
    box: Box
    num_bytes: int
    is_run: bool


class MovePlan(NamedTuple):
    """The moves, including those within a rank, and the parts (rank, number) that the ranks do not hold completely."""

    moves: list[Move]
    missing: list[tuple[int, int]]


def plan_moves(held: Sequence[Sequence[TensorPart]], wanted: Sequence[Sequence[TensorPart]]) -> MovePlan:
    """Plan the moves for the parts that the ranks hold and want, both in rank order."""
    holders = _Holders(held)
    sent = [0] * len(held)
    plan = MovePlan([], [])
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
                    num_bytes = common.size * part.element_bytes
                    runs = part.in_order and held[source][index].in_order
                    runs = runs and is_run(common, box) and is_run(common, part.box)
                    move = Move(source, index, target, number, common, num_bytes, runs)
                    plan.moves.append(move)
                    if source != target:
                        sent[source] += move.num_bytes
                    still.extend(without(piece, common))
                rest = still
            if rest:
                plan.missing.append((target, number))
    return plan


class _Holders:
    """An index of the parts that ranks hold, by key and position on the first axis."""

    def __init__(self, held: Sequence[Sequence[TensorPart]]) -> None:
        found: dict[str, list[tuple[int, int, int, Box]]] = defaultdict(list)
        for rank, parts in enumerate(held):
            for index, part in enumerate(parts):
                if part.box.size:
                    found[part.key].append((part.box.start[0] if part.box.start else 0, rank, index, part.box))
        self._by_key = {key: sorted(entries) for key, entries in found.items()}
        self._longest = {
            key: max(box.shape[0] if box.shape else 1 for *_, box in entries) for key, entries in found.items()
        }

    def that_overlap(self, part: TensorPart) -> list[tuple[int, int, Box]]:
        """The (rank, number, box) of parts that may overlap `part`."""
        entries = self._by_key.get(part.key, [])
        if not entries:
            return []
        if not part.box.start:
            return [entry[1:] for entry in entries]
        first = bisect_left(entries, (part.box.start[0] - self._longest[part.key] + 1,))
        last = bisect_left(entries, (part.box.stop[0],))
        return [entry[1:] for entry in entries[first:last] if overlap(entry[3], part.box)]


class Message(NamedTuple):
    """Moves from one rank to another that are sent together. `places`: the first byte of each move in the message."""

    moves: tuple[Move, ...]
    places: tuple[int, ...]
    num_bytes: int


def direct_messages(moves: Iterable[Move], most_bytes: int) -> list[Message]:
    """The messages for large contiguous moves between a pair of ranks, each with one move of at most `most_bytes`."""
    return [
        Message((move,), (0,), move.num_bytes)
        for whole in moves
        if _is_direct(whole)
        for move in _cut(whole, most_bytes)
    ]


def packed_messages(moves: Iterable[Move], most_bytes: int) -> list[Message]:
    """The messages of at most `most_bytes` for the other moves between a pair of ranks; large moves are split.

    Raises ValueError if an element is larger than `most_bytes`.
    """
    return _packed(filterfalse(_is_direct, moves), most_bytes)


def _is_direct(move: Move) -> bool:
    return move.is_run and move.num_bytes >= DIRECT_BYTES


def _packed(moves: Iterable[Move], most_bytes: int) -> list[Message]:
    result: list[Message] = []
    taken: list[Move] = []
    places: list[int] = []
    end = 0
    for move in (part for whole in moves for part in _cut(whole, most_bytes)):
        place = -(-end // ALIGNMENT) * ALIGNMENT
        if place + move.num_bytes > most_bytes:
            result.append(Message(tuple(taken), tuple(places), end))
            taken, places, place = [], [], 0
        taken.append(move)
        places.append(place)
        end = place + move.num_bytes
    if taken:
        result.append(Message(tuple(taken), tuple(places), end))
    return result


def _cut(move: Move, most_bytes: int) -> Iterator[Move]:
    element_bytes = move.num_bytes // move.box.size
    if most_bytes < element_bytes:
        raise ValueError(f"messages of {most_bytes} bytes hold no element of {element_bytes}: allow larger ones")
    for box in split(move.box, most_bytes // element_bytes):
        yield move._replace(box=box, num_bytes=box.size * element_bytes)
