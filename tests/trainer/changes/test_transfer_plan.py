"""Plans for random cuts, carried out in one process; what is missing; messages."""

from itertools import pairwise
from math import prod
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.trainer.changes import transfer_plan as planning
from megatron.trainer.changes.state_exchange import pieces_of, share_memory, within
from megatron.trainer.changes.transfer_plan import (
    ALIGNMENT,
    TensorPart,
    direct_messages,
    packed_messages,
    plan_moves,
)
from megatron.trainer.checkpoint.boxes import Box
from megatron.trainer.checkpoint.optimizer_state import ElementRange


@st.composite
def cuts(draw, shape, ranks):
    """For each rank the boxes of one cut of a tensor along all axes, each on one rank at least."""
    edges = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    found = [Box((), ())]
    for marks in edges:
        found = [Box((*box.start, first), (*box.stop, last)) for box in found for first, last in pairwise(marks)]
    held = [[] for _ in range(ranks)]
    for box in found:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(box)
    return held


def sharded(key, whole, box, *, prepended, ranges, draw):
    """What a rank holds of `box`: a sharded tensor, or some ranges of its flattened elements."""
    shape = box.shape[prepended:]
    data = whole[box.within(Box.at((0,) * whole.dim(), whole.shape))].reshape(shape).clone()
    tensor = ShardedTensor(key, data, data.dtype, shape, tuple(whole.shape), box.start, None, 0, prepended)
    if not ranges:
        return [tensor]
    marks = sorted({0, data.numel(), *draw(st.sets(st.integers(0, data.numel()), max_size=3))})
    return [
        ElementRange(key, data.flatten()[first:last].clone(), first, ((0, tensor),)) for first, last in pairwise(marks)
    ]


@given(st.data())
@settings(max_examples=40)
def test_any_cut_becomes_any_other(data):
    """Random tensors, cut at random on random ranks with replicas, as boxes or as ranges of elements: after the plan's
    moves, cut into messages and packed anew, every rank has exactly what it wants."""
    ranks = data.draw(st.integers(1, 4))
    held, wanted = [[] for _ in range(ranks)], [[] for _ in range(ranks)]
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
        whole = torch.randn(shape)
        for side in (held, wanted):
            prepended = data.draw(st.integers(0, 1)) if shape and side is held and shape[0] == 1 else 0
            ranges = data.draw(st.booleans())
            for rank, boxes in enumerate(data.draw(cuts(shape, ranks))):
                for box in boxes:
                    options = {"prepended": prepended, "ranges": ranges, "draw": data.draw}
                    side[rank] += sharded(f"tensor{number}", whole, box, **options)
    held, wanted = [pieces_of(values) for values in held], [pieces_of(values) for values in wanted]
    expected = [[piece.data.clone() for piece in pieces] for pieces in wanted]
    for piece in (piece for pieces in wanted for piece in pieces):
        piece.data.fill_(torch.nan)
    plan = plan_moves(*[[[piece.part() for piece in pieces] for pieces in side] for side in (held, wanted)])
    assert not plan.missing
    most = data.draw(st.integers(4, 200))
    with mock.patch.object(planning, "DIRECT_BYTES", data.draw(st.sampled_from([0, 50, 1 << 16]))):
        direct, packed_ones = direct_messages(plan.moves, most), packed_messages(plan.moves, most)
    for (move,), _, num_bytes in direct:
        source, target = held[move.source][move.held], wanted[move.target][move.wanted]
        run = target.view(move.box).view(-1)  # fails where it is none
        run.copy_(source.view(move.box).view(-1))
        assert num_bytes == run.numel() * 4 <= most
    for message in packed_ones:
        assert message.num_bytes <= most and all(place % ALIGNMENT == 0 for place in message.places)
        packed = torch.zeros(message.num_bytes, dtype=torch.uint8)
        for move, place in zip(message.moves, message.places, strict=True):
            source = held[move.source][move.held].view(move.box)
            within(packed, place, source).copy_(source)
        for move, place in zip(message.moves, message.places, strict=True):
            target = wanted[move.target][move.wanted].view(move.box)
            target.copy_(within(packed, place, target))
    for pieces, tensors in zip(wanted, expected, strict=True):
        assert all(torch.equal(piece.data, tensor) for piece, tensor in zip(pieces, tensors, strict=True))
    assert sum(move.num_bytes for move in plan.moves) == sum(4 * prod(t.shape) for ts in expected for t in ts)


def test_own_first_then_in_turns():
    """What a rank has it takes from itself; what several others have, they send in turns."""
    box = Box((0,), (10,))
    held = [[TensorPart(f"{number}", box, 4) for number in range(6)] for _ in range(3)] + [[]]
    wanted = [held[0], [], [], held[0]]
    plan = plan_moves(held, wanted)
    assert {move.source for move in plan.moves if move.target == 0} == {0}
    sources = [move.source for move in plan.moves if move.target == 3]
    assert sorted(sources) == [0, 0, 1, 1, 2, 2]


def test_what_nobody_holds_is_missing():
    """A part that only a piece is held of, and one that nobody has; the others are planned."""
    held = [[TensorPart("a", Box((0, 0), (2, 4)), 4)], [TensorPart("b", Box((), ()), 8)]]
    wanted = [
        [TensorPart("b", Box((), ()), 8)],
        [TensorPart("a", Box((1, 0), (3, 4)), 4), TensorPart("c", Box((0,), (1,)), 1)],
    ]
    plan = plan_moves(held, wanted)
    assert plan.missing == [(1, 0), (1, 1)]
    assert [(move.source, move.target) for move in plan.moves] == [(1, 0), (0, 1)]


def test_too_short_messages_are_refused():
    """A message that holds no element is an error, and no endless loop."""
    moves = plan_moves([[TensorPart("a", Box((0,), (2,)), 8)]], [[TensorPart("a", Box((0,), (2,)), 8)]]).moves
    with pytest.raises(ValueError, match=r"messages of 7 bytes hold no element of 8"):
        packed_messages(moves, 7)


def test_shared_memory_is_found():
    """Tensors that lie over each other, and neighbours in one storage that do not."""
    storage = torch.zeros(10)
    assert share_memory([storage[2:4]], [storage[3:6]]) and share_memory([storage], [storage[4:5]])
    assert not share_memory([storage[:3], storage[6:]], [storage[3:6]])
    assert not share_memory([storage[:3], storage[:5]], [torch.zeros(4)])
    assert share_memory([storage[:9], storage[:1]], [storage[5:6]])
