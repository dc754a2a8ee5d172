"""Fits the constants to a profile: measured times of single stages in place of whole iterations.

A profile knows its own model only. Constants that are fitted to it carry over to other shapes on the same kind of
processor, as far as its stages differ enough in microbatch, tensor ranks and recomputation to tell the constants apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import Software
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.memory.architecture import Architecture
from megatron.planner.published.fit import ConstantsFit, fit_runs
from megatron.planner.time.constants import FITTED, START, Constants
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.profiled import software_of

_POSITIONS = {"only": 0, "first": 0, "middle": 1, "last": 2}


class _Spread(Protocol):
    median: float


class _Stage(Protocol):
    place: str
    num_layers: int
    tensor: int
    micro_batch_size: int
    recompute: RecomputeScope
    working: int
    forward: _Spread
    backward: _Spread


class StageProfile(Protocol):
    """What of a profile (`megatron.planner.time.profile.Profile`) is fitted."""

    flags: Sequence[str]
    model: Architecture
    dtype: str
    transformer_impl: str
    sequence_parallel: bool
    shares_processor: bool
    stages: Sequence[_Stage]


def fit_profile(profile: StageProfile, gpu: str, start: Constants = START) -> ConstantsFit:
    """Fit to a profile that was taken on `gpu`, a name in `DEVICES` or `cpu`.

    The share of tensor ranks is fitted where the profile has stages with several; what a short memory costs is not.

    Raises ValueError for fewer stages than constants.
    """
    runs = {}
    software = software_of(profile)
    for stage in profile.stages:
        if not profile.shares_processor or stage.working == stage.tensor:  # alone on its processor
            scope = RecomputeScope(stage.recompute).value
            name = f"{_place(stage)}, {stage.num_layers} layers, t={stage.tensor}, mb={stage.micro_batch_size}, {scope}"
            runs[name] = _StageRun(profile, stage, gpu, software).time_errors
    several = any(stage.tensor > 1 for stage in profile.stages)
    absent = {"pressed_efficiency"} if several else {"pressed_efficiency", "tensor_efficiency"}
    return fit_runs(runs, start, free=[name for name in FITTED if name not in absent])


class _StageRun:
    def __init__(self, profile: StageProfile, stage: _Stage, gpu: str, software: Software) -> None:
        self._stage, self._index = stage, _POSITIONS[_place(stage)]
        pipeline = 1 if _place(stage) == "only" else 3
        self._layers = (stage.num_layers,) * pipeline
        self._configuration = Configuration(
            tensor=stage.tensor, pipeline=pipeline, micro_batch_size=stage.micro_batch_size,
            global_batch_size=stage.micro_batch_size, recompute=RecomputeScope(stage.recompute),
            sequence_parallel=profile.sequence_parallel and stage.tensor > 1,
        )  # fmt: skip
        cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=stage.tensor * pipeline)
        model = replace(profile.model, num_layers=sum(self._layers))
        self._first_principles = FirstPrinciples(model, cluster, software, START)

    def time_errors(self, constants: Constants) -> dict[str, float]:
        costs = self._first_principles.calibrated(constants).costs(self._configuration, self._layers)
        return {
            "forward": costs.forward[self._index] / self._stage.forward.median - 1,
            "backward": costs.backward[self._index] / self._stage.backward.median - 1,
        }


def _place(stage: _Stage) -> str:
    return getattr(stage.place, "value", stage.place)
