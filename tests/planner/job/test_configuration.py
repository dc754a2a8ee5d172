"""The schedule that a configuration names."""

from unittest import mock

from megatron.pipeline.schedules import PRESETS, Preset
from megatron.planner import Configuration
from megatron.planner.job import configuration as module


def asked(**changes: object) -> Configuration:
    given = {"tensor": 1, "pipeline": 4, "data": 2, "micro_batch_size": 1, "global_batch_size": 16}
    return Configuration(**given | changes)


def test_a_schedule_is_made_once():
    """Also for configurations that differ in what it does not know."""
    module._schedule.cache_clear()
    first = asked().pipeline_schedule(tied_embeddings=True)
    assert asked(tensor=2, micro_batch_size=2).pipeline_schedule(tied_embeddings=True) is first
    assert module._schedule.cache_info().misses == 1
    assert asked().pipeline_schedule(tied_embeddings=False) != first
    assert asked(schedule="2bw").pipeline_schedule(tied_embeddings=True) != first
    assert asked(data=1).pipeline_schedule(tied_embeddings=True) != first


def test_a_name_that_comes_to_mean_something_else():
    before = asked().pipeline_schedule(tied_embeddings=False)
    with mock.patch.dict(PRESETS, {"flush": Preset("gpipe", "flush")}):
        assert asked().pipeline_schedule(tied_embeddings=False).order == "gpipe"
    assert asked().pipeline_schedule(tied_embeddings=False) == before
