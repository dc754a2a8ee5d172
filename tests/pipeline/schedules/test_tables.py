"""What is registered wrongly is refused in one sentence, and a name that gets another meaning has no old answers."""

from collections.abc import Iterator
from unittest import mock

import pytest

from megatron.pipeline.program.weight_policies import POLICIES, WeightPolicy
from megatron.pipeline.schedules import ORDERS, PLACEMENTS, PRESETS, Preset, Schedule
from megatron.pipeline.schedules.one_f_one_b import GPipe, OneForwardOneBackward
from megatron.planner.memory.schedule_demand import schedule_demand
from megatron.planner.search.space import fewest_ranks, offer, offered, preset_of


class Boundless(OneForwardOneBackward):
    def max_in_flight(self, stage: int) -> None:
        return None


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Whatever a test registers is gone behind it."""
    with mock.patch.dict(ORDERS), mock.patch.dict(PRESETS), mock.patch.dict(PLACEMENTS), mock.patch.dict(POLICIES):
        yield


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda p, v: (0,) * (p * v), "puts the 8 stages on 1 rank, and the pipeline has 4"),
        (lambda p, v: tuple(range(p * v)), "puts the 8 stages on 8 ranks, and the pipeline has 4"),
        (lambda p, v: (0, 2, 3, 1, 3, 2, 2), "places 7 stages, and the pipeline has 8"),
        (lambda p, v: (), "places 0 stages, and the pipeline has 8"),
        (lambda p, v: (0, 1, 2, 4, 4, 2, 1, 0), "leaves a rank without a stage"),
    ],
)
def test_a_placement_uses_the_pipelines_ranks(place, message: str):
    """Fewer, more or other ranks are refused where the schedule is made, and not in the midst of a run."""
    PLACEMENTS["wrong"] = place
    PRESETS["wrong"] = Preset("interleaved", "flush", placement="wrong")
    with pytest.raises(ValueError, match=message):
        Schedule.preset("wrong", num_stages=8, num_virtual_stages=2)


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        (Preset("1f1b", "flush", placement="nowhere"), "no placement 'nowhere'; choose from round-robin, v"),
        (Preset("2f2b", "flush"), "no order '2f2b'; choose from gpipe, 1f1b, interleaved"),
        (Preset("1f1b", "5bw"), "no weight policy '5bw'; choose from flush, 2bw, stash"),
    ],
)
def test_a_preset_of_unknown_parts(preset: Preset, message: str):
    """The schedule says which part; a search says in which preset."""
    PRESETS["mine"] = preset
    with pytest.raises(ValueError, match=message):
        Schedule.preset("mine", num_stages=4)
    with pytest.raises(ValueError, match=f"schedule mine: there is {message}"):
        offered()


def test_a_name_that_ends_like_a_balanced_one():
    """It is the preset of that name."""
    PRESETS["mine+balance"] = Preset("1f1b", "2bw", balance=True)
    assert preset_of("mine+balance") == ("mine+balance", False)
    assert offer("mine+balance") is PRESETS["mine+balance"] is offered()["mine+balance"]


@pytest.mark.parametrize("delay", [-1, 1.5, True, "2"])
def test_a_delay_is_a_number_of_batches(delay):
    """Whole, and not negative."""
    with pytest.raises(ValueError, match="cannot have a delay"):
        WeightPolicy("mine", delay)


def test_a_policy_has_one_name():
    """A text names it by its own name, so the table has to, too."""
    POLICIES["alias"] = WeightPolicy("other", 2)
    with pytest.raises(ValueError, match="alias is registered with the name other"):
        Schedule(order="1f1b", weights="alias", num_stages=2)


def test_stashing_needs_a_bound():
    """How many versions a stage keeps follows from what is in flight there."""
    ORDERS["boundless"] = Boundless
    with pytest.raises(ValueError, match="boundless does not say how many microbatches are in flight"):
        Schedule(order="boundless", weights="stash", num_stages=2)


def test_moves_want_a_batch_that_holds_what_is_in_flight():
    """With weights several batches old smaller batches do, but not for moves, which are planned batch by batch."""
    weights = WeightPolicy("3bw", delay=2)
    Schedule(order="1f1b", weights=weights, num_stages=6).validate(3)
    with pytest.raises(ValueError, match="needs batches of at least 6 microbatches, as many as are in flight, not 5"):
        Schedule(order="1f1b", weights=weights, num_stages=6, balance=True).validate(5)


def test_a_name_with_another_meaning_is_another_schedule():
    """Nothing that was computed for the old meaning is given for the new one."""
    ORDERS["mine"], PLACEMENTS["mine"] = OneForwardOneBackward, lambda p, v: tuple(range(p))[::-1]
    PRESETS["mine"] = Preset("mine", "flush", placement="mine")
    before = Schedule(order="mine", weights="flush", num_stages=4)
    assert schedule_demand(before, 12).saved_on_rank == (4, 3, 2, 1)
    assert fewest_ranks(PRESETS["mine"]) is None
    ORDERS["mine"] = GPipe
    after = Schedule(order="mine", weights="flush", num_stages=4)
    assert after != before and schedule_demand(after, 12).saved_on_rank == (12,) * 4
    ORDERS["mine"], PLACEMENTS["mine"] = OneForwardOneBackward, PLACEMENTS["round-robin"]
    assert fewest_ranks(PRESETS["mine"]) == 4
