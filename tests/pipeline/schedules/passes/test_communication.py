"""Transfers: complete, in order, ahead of their use, and free of deadlock."""

from itertools import pairwise

import pytest
from hypothesis import given

from megatron.pipeline.program.instruction import BEGINS_BACKWARD, Instruction, Kind
from megatron.pipeline.schedules.passes.communication import add_communication
from tests.draws import draws
from tests.pipeline.schedules.passes.written import extent, segments, texts
from tests.pipeline.strategies import Run, kinds_of, runs


def test_a_transfer_runs_while_the_receiver_computes():
    """SEND right after what makes the tensor; RECV before the computation that precedes the one that needs it."""
    first, second = add_communication(
        [segments("0F0 0F1 0B0 0F2 0B1 0B2"), segments("1F0 1B0 1F1 1B1 1F2 1B2")],
        extent("flush", num_stages=2, batches=(3,)),
    )
    assert texts(first) == ["0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2"]
    assert texts(second) == ["1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2"]


def test_receives_stand_as_far_ahead_as_is_asked():
    """Two computations ahead of the one that needs the tensor, or where the segment begins."""
    _, second = add_communication(
        [segments("0F0 0F1 0B0 0F2 0B1 0B2"), segments("1F0 1B0 1F1 1B1 1F2 1B2")],
        extent("flush", num_stages=2, batches=(3,)),
        receives_ahead=2,
    )
    assert texts(second) == ["1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2"]


def test_receives_stay_in_their_segment():
    """What the first computation of a segment needs is posted where the segment begins, and no earlier."""
    _, second = add_communication([segments("0F0", "0F1"), segments("1F0", "1F1")], extent("flush", num_stages=2))
    assert texts(second) == ["1RECV_F0 1F0", "1RECV_F1 1F1"]


def test_what_a_rank_goes_on_with_is_received_over_the_border():
    """Only what begun batches need is received there: so a segment is the same whether another one follows or not."""
    turns = [[(Kind.BACKWARD, 0, 2)], [(Kind.FORWARD, 1, 1), (Kind.BACKWARD, 1, 1)]]
    two, three = (
        add_communication(rows, extent("flush", num_stages=2, batches=(1,) * (len(rows[0]) - 1)), turns)
        for rows in (
            [segments("0F0", "0F1", "0B0 0B1"), segments("", "1F0 1B0", "1F1 1B1")],
            [segments("0F0", "0F1", "0F2 0B0", "0B1 0B2"), segments("", "1F0 1B0", "1F1 1B1", "1F2 1B2")],
        )
    )
    assert [segments[:2] for segments in two] == [segments[:2] for segments in three]
    assert texts(three[0]) == [
        "0F0 0SEND_F0",
        "0RECV_B0 0F1 0SEND_F1",
        "0F2 0SEND_F2 0RECV_B1 0B0",
        "0RECV_B2 0B1 0B2",
    ]
    assert texts(three[1]) == [
        "",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0",
        "1F1 1RECV_F2 1B1 1SEND_B1",
        "1F2 1B2 1SEND_B2",
    ]
    assert texts(two[0])[2] == "0RECV_B1 0B0 0B1" and texts(two[1])[2] == "1F1 1B1 1SEND_B1"


def test_a_recompute_is_part_of_its_backward():
    """A receive is posted before the recompute that stands with the computation it is posted before."""
    _, middle, _ = add_communication(
        [segments("0F0 0F1 0B0"), segments("1F0 1R0 1B0 1F1"), segments("2F0 2B0 2F1")],
        extent("flush", num_stages=3, batches=(2,)),
    )
    assert texts(middle) == ["1RECV_F0 1RECV_B0 1F0 1SEND_F0 1RECV_F1 1R0 1B0 1SEND_B0 1F1 1SEND_F1"]


def test_stages_of_one_rank_exchange_nothing():
    """Tensors between stages that live on the same rank need no transfer; over a wrap-around they do."""
    program = extent("flush", num_stages=3, rank_of_stage=(0, 1, 1), batches=(1,))
    first, second = add_communication([segments("0F0 0B0"), segments("1F0 2F0 2B0 1B0")], program)
    assert texts(first) == ["0RECV_B0 0F0 0SEND_F0 0B0"]
    assert texts(second) == ["1RECV_F0 1F0 2F0 2B0 1B0 1SEND_B0"]


def test_both_halves_of_a_backward():
    """The input half makes the gradient that is sent, and needs the one that is received."""
    first, second = add_communication(
        [segments("0F0 0I0 0W0"), segments("1F0 1I0 1W0")], extent("flush", num_stages=2, batches=(1,))
    )
    assert texts(first) == ["0RECV_B0 0F0 0SEND_F0 0I0 0W0"]
    assert texts(second) == ["1RECV_F0 1F0 1I0 1SEND_B0 1W0"]


def test_a_tensor_that_nothing_needs_is_an_error():
    """An order that leaves out a computation cannot be lowered."""
    with pytest.raises(ValueError, match="0F0 makes a tensor for stage 1, where nothing needs it"):
        add_communication([segments("0F0"), segments("1B0")], extent("flush", num_stages=2, batches=(1,)))


# --- over built programs


_NEEDS = {Kind.FORWARD: Kind.RECV_F, Kind.BACKWARD: Kind.RECV_B, Kind.BACKWARD_INPUT: Kind.RECV_B}


@draws(60)
@given(runs(max_stages=5))
def test_one_computation_runs_between_a_receive_and_its_use(run: Run):
    """Within a segment each receive is posted one computation ahead; the segment's first one, where it begins."""
    stream = run.schedule.stream(first_batch=run.first_batch, first_microbatch=run.first_microbatch)
    for piece in [*map(stream.start_batch, run.batches), stream.drain()]:
        for row in piece:
            computations = kinds_of(row, *_NEEDS)
            for index, each in enumerate(computations):
                receive = Instruction(_NEEDS[each.kind], each.stage, each.microbatch)
                if receive in row:
                    between = row[row.index(receive) : row.index(each)]
                    assert kinds_of(between, *_NEEDS) == computations[max(0, index - 1) : index]


@draws(60)
@given(runs(max_stages=5))
def test_a_send_follows_what_makes_its_tensor(run: Run):
    """No tensor waits for anything before it is sent."""
    for row in run.build().rows:
        for before, each in pairwise(row):
            if each.kind in (Kind.SEND_F, Kind.SEND_B):
                makers = {Kind.FORWARD} if each.kind is Kind.SEND_F else BEGINS_BACKWARD
                assert before.kind in makers and before.microbatch == each.microbatch
