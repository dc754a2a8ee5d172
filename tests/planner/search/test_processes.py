"""A search that several processes share finds what one finds, in the same order, to the last digit."""

import importlib
from dataclasses import replace

import pytest

from megatron.planner.search import Outcome, Space, Training, search
from tests.planner.search import helper

module = importlib.import_module("megatron.planner.search.search")  # whose name is that of its function
MODEL = replace(helper.gpt3(24, 6144, 48), sequence_length=1024)
PLANNER = helper.planner(MODEL, helper.a100(8), helper.PAPER)


def outcome(*, num_processes: int, **asked: object) -> Outcome:
    space = Space(num_gpus=64, gpus_per_node=8, global_batch_size=128, tensor=(2, 8), pipeline=(4, 8))
    return search(space, lambda _: PLANNER, Training(), num_processes=num_processes, **asked)


@pytest.fixture
def shared(monkeypatch):
    """How many processes share how much, each time that something is."""
    found, given = [], module.map_forked

    def map_forked(function, items, num_processes, **others):
        found.append((len(items), num_processes))
        return given(function, items, num_processes, **others)

    monkeypatch.setattr(module, "map_forked", map_forked)
    return found


@pytest.mark.full
@pytest.mark.parametrize("asked", [{}, {"objective": "memory", "num_simulated": 3}])
def test_the_same_for_any_number_of_processes(shared, asked):
    expected = outcome(num_processes=1, **asked)
    assert {each.choice.pipeline for each in expected.kept} == {4, 8}
    num_simulated = asked.get("num_simulated", module.NUM_SIMULATED)
    assert sum(each.is_simulated for each in expected.kept) >= num_simulated
    assert shared == [(2, 1)]
    for num_processes in (2, 3):
        shared.clear()
        assert outcome(num_processes=num_processes, **asked) == expected
        assert shared == [(2, num_processes), (num_simulated, num_processes)]


def test_small_searches_stay_in_one_process(shared, monkeypatch):
    monkeypatch.setattr(module, "_MANY_GPUS", 65)
    outcome(num_processes=2, num_simulated=1)
    assert shared == [(2, 1)]


def test_a_refusal_of_the_training_program_in_any_process():
    found = outcome(num_processes=2, num_simulated=1, refuse=lambda each: f"p {each.pipeline} is refused")
    assert {each.reason for each in found.rejected if "is refused" in each.reason} == {
        "p 4 is refused",
        "p 8 is refused",
    }
    assert not found.kept
