"""Times between those that were profiled, and refusals beyond them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.blocks import Blocks
from megatron.planner.time.profile import StagePosition
from tests.planner import profiles

NONE = RecomputeScope.NONE
BLOCKS = Blocks(profiles.profile())
PLACES = st.sampled_from(list(StagePosition))


@given(PLACES, st.integers(1, 100), st.integers(1, 4), st.integers(1, 4))
def test_a_linear_machine_is_met_exactly(place, num_layers, size, working):
    """Where times grow linearly with layers and microbatch, every size between is predicted, for any number of
    processes at work."""
    found = BLOCKS.stage(place, num_layers, tensor=1, size=size, recompute=NONE, working=working)
    expected = profiles.forward(place, num_layers, size, working)
    assert found.forward == pytest.approx(expected) and found.backward == pytest.approx(2 * expected)


@given(PLACES, st.integers(1, 100), st.sampled_from(["flush", "2bw"]))
def test_updates_grow_with_layers(place, num_layers, weights):
    expected = profiles.UPDATE * num_layers * (2 if weights == "2bw" else 1)
    assert BLOCKS.update(place, num_layers, tensor=1, weights=weights, working=2) == pytest.approx(expected)


@given(st.floats(4096, 2**32))
def test_transfers_are_latency_and_bytes(num_bytes):
    """Also beyond the largest that was timed."""
    assert BLOCKS.transfer(num_bytes) == pytest.approx(profiles.LATENCY + num_bytes / profiles.BANDWIDTH)
    assert BLOCKS.all_reduce(4, num_bytes) == pytest.approx(2 * profiles.LATENCY + num_bytes / profiles.BANDWIDTH)


def test_small_transfers_take_as_long_as_the_smallest():
    assert BLOCKS.transfer(0) == BLOCKS.transfer(4096) == profiles.LATENCY + 4096 / profiles.BANDWIDTH


def ask(blocks=BLOCKS, **changes):
    return blocks.stage(
        StagePosition.MIDDLE, 2, **({"tensor": 1, "size": 2, "recompute": NONE, "working": 2} | changes)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 8}, r"microbatches of 8 .* 1, 4; .*--micro-batch-sizes"),
        ({"working": 8}, r"8 processes .* 1, 2, 4; profile with --processes 8"),
        ({"tensor": 4}, r"no t=4.*--tensor-sizes"),
        ({"recompute": RecomputeScope.LAYER}, r"no t=1, recompute layer.*--recompute"),
    ],
)
def test_what_was_not_profiled_is_refused_with_the_flag_that_adds_it(changes, message):
    with pytest.raises(ValueError, match=message):
        ask(**changes)


def test_nothing_is_extrapolated_from_one_size():
    """One microbatch size gives that size and no other."""
    single = Blocks(profiles.profile(sizes=(2,)))
    assert ask(single).forward == pytest.approx(profiles.forward(StagePosition.MIDDLE, 2, 2, 2))
    for size in (1, 3):
        with pytest.raises(ValueError, match=f"microbatches of {size}"):
            ask(single, size=size)


def test_processors_of_their_own_are_as_fast_in_any_number():
    own = Blocks(profiles.profile(counts=(4,), shares_processor=False))
    assert ask(own, working=1) == ask(own, working=64)
    assert own.update(StagePosition.ONLY, 1, tensor=1, weights="flush", working=64) == pytest.approx(profiles.UPDATE)


def test_missing_parts_are_named():
    bare = Blocks(profiles.profile(transfers=(), all_reduces=(), updates=()))
    for call, message in (
        (lambda: bare.transfer(1), "no transfers.*--processes 2"),
        (lambda: bare.all_reduce(2, 1), "all-reduce over 2 ranks.*--processes 2"),
        (lambda: bare.update(StagePosition.ONLY, 1, tensor=1, weights="2bw", working=1), "updates with 2bw.*--weights"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
