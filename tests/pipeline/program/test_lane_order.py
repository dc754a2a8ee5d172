"""What waits for what where weights live on the host, word by word."""

import pytest

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.lane_order import LaneOrder, Residency, awaited_in_lanes
from megatron.pipeline.schedules import Schedule


def waits(row: str, num_stages: int = 4) -> dict[str, list[str]]:
    """For each word of a row that waits for others, these; a word that stands twice has a mark behind it."""
    words = row.split()
    instructions = [Instruction.parse(word.rstrip("'")) for word in words]
    awaited = awaited_in_lanes(instructions, [0] * num_stages)
    return {words[position]: [words[each] for each in needed] for position, needed in awaited.items()}


def test_computations_wait_for_their_weights():
    """For the last fetch of their stage, and for no other."""
    assert waits("0FETCH@0 1FETCH@0 0F0@0 0FREE@0 1F0@0 0FETCH@0' 0R0@0") == {
        "0F0@0": ["0FETCH@0"],
        "1F0@0": ["1FETCH@0"],
        "0R0@0": ["0FETCH@0'"],
    }


def test_a_version_waits_for_what_makes_it():
    """The fetch for its own update alone, the update for its gradients, and these for their reduction."""
    row = "0REDUCE_GRAD@1 0STORE_GRAD@1 1STORE_GRAD@1 0UPDATE@1 1UPDATE@1 0FETCH@1 2FETCH@1"
    assert waits(row) == {
        "0STORE_GRAD@1": ["0REDUCE_GRAD@1"],
        "0UPDATE@1": ["0STORE_GRAD@1"],
        "1UPDATE@1": ["1STORE_GRAD@1"],
        "0FETCH@1": ["0UPDATE@1"],
    }
    assert waits("0UPDATE@1 0FETCH@2") == {}  # another version


def test_tied_embeddings_wait_for_both_ends():
    """Their sum for the gradients of the ends that the rank has, and the updates of these for it."""
    row = "3STORE_GRAD@1 1STORE_GRAD@1 0STORE_GRAD@1 0REDUCE_EMBED@1 0UPDATE@1 1UPDATE@1 3UPDATE@1"
    assert waits(row) == {
        "0REDUCE_EMBED@1": ["0STORE_GRAD@1", "3STORE_GRAD@1"],
        "0UPDATE@1": ["0STORE_GRAD@1", "0REDUCE_EMBED@1"],
        "1UPDATE@1": ["1STORE_GRAD@1"],
        "3UPDATE@1": ["3STORE_GRAD@1", "0REDUCE_EMBED@1"],
    }


def test_a_third_stage_waits_for_a_gradient_buffer():
    """Its first backward, until the first of two has been stored; a stage keeps its buffer over its backwards."""
    row = "3B0 3B1 3STORE_GRAD@1 2B0 2B1 2STORE_GRAD@1 1B0 1B1 1STORE_GRAD@1 0W0"
    assert waits(row) == {"1B0": ["3STORE_GRAD@1"], "0W0": ["2STORE_GRAD@1"]}


def test_a_buffer_that_is_begun_and_not_stored_counts():
    """Then all that is under way has to be stored."""
    assert waits("3B0 3STORE_GRAD@1 2B0 1B0") == {"1B0": ["3STORE_GRAD@1"]}


def test_an_input_waits_for_its_way_out_and_back():
    """Each RELOAD for its own OFFLOAD, the recompute for its RELOAD, and nothing after it."""
    row = "1F0 1OFFLOAD0 1F1 1OFFLOAD1 1RELOAD1 1RELOAD0 1R0 1B0 1R1 1I1 1W1"
    assert waits(row) == {
        "1RELOAD1": ["1OFFLOAD1"],
        "1RELOAD0": ["1OFFLOAD0"],
        "1R0": ["1RELOAD0"],
        "1R1": ["1RELOAD1"],
    }


def test_a_forward_waits_for_inputs_that_had_the_time_of_a_computation():
    """For the last one before the computation before it, once: those before stand in the same lane."""
    row = "1F0 1OFFLOAD0 1F1 1OFFLOAD1 2F0 2F1 2B0 2F2"
    assert waits(row) == {"2F0": ["1OFFLOAD0"], "2F1": ["1OFFLOAD1"]}


def test_a_long_run_is_told_bit_by_bit():
    """What is kept is of the stages, so a row can go on without an end."""
    order = LaneOrder(1)
    for version in range(1000):
        numbers = range(4 * version, 4 * version + 4)
        words = (f"0FETCH@{version}", f"0B{version}@{version}", f"0STORE_GRAD@{version + 1}", f"0UPDATE@{version + 1}")
        awaited = [order.awaited(Instruction.parse(word)) for word in words]
        made = (numbers[0] - 1,) if version else ()
        old = (numbers[0] - 6,) if version > 1 else ()  # the STORE_GRAD before the last
        assert awaited == [made, (numbers[0], *old), (), (numbers[2],)]
    assert len(order._last) == 3


def test_residency_as_text():
    """Written and read back; what it cannot be is refused."""
    assert str(Residency(3, "eager")) == "3 eager" and Residency.parse("3 eager") == Residency(3, "eager")
    assert Residency.parse(str(Residency())) == Residency(2, "deferred")
    assert str(Residency(2, "eager", "host")) == "2 eager host"
    assert Residency.parse("2 eager host") == Residency(2, "eager", "host")
    assert Residency.parse("2 eager device") == Residency.parse("2 eager") == Residency(2, "eager", "device")
    with pytest.raises(ValueError, match="choose device or host"):
        Residency.parse("2 eager disk")
    for text, message in (("0 eager", "leave none to compute with"), ("2 now", "choose eager or deferred"),
                          ("two", "such as 2 eager"), ("2", "such as 2 eager")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Residency.parse(text)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_what_is_kept_of_a_row_is_enough(stash: str):
    """Whatever a word waits for was among those that might still be awaited, and these are few however long the row."""
    schedule = Schedule.preset("l2l", num_stages=4, num_virtual_stages=4, tied_embeddings=True, data_parallel=True,
                               residency=Residency(stash=stash))  # fmt: skip
    (row,) = schedule.build((2,) * 6).rows
    order = LaneOrder(4)
    for number, instruction in enumerate(row):
        kept = set(order.still_awaited())
        assert set(order.awaited(instruction)) <= kept and len(kept) <= 4 * 4 + 2 + 4 * (stash == "host")
        assert number not in kept
