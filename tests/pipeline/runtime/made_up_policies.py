"""Weight policies that are in no table of the project: batches that use weights two and three batches old."""

from contextlib import contextmanager
from unittest import mock

from megatron.pipeline.program.weight_policies import POLICIES, WeightPolicy
from megatron.pipeline.schedules import PRESETS, Preset

DELAYS = {"3bw": 2, "4bw": 3}


@contextmanager
def registered():
    """In this block the tables have these policies, each with 1F1B as a preset of its name."""
    policies = {name: WeightPolicy(name, delay=delay) for name, delay in DELAYS.items()}
    presets = {name: Preset("1f1b", name) for name in DELAYS}
    with mock.patch.dict(POLICIES, policies), mock.patch.dict(PRESETS, presets):
        yield
