"""The costs for the program of `--pipeline-schedule auto`: from a profile, a run's timeline, or the job itself."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megatron.pipeline.simulate.costs import Costs, measured_costs
from megatron.pipeline.simulate.timeline import Timeline
from megatron.planner import Configuration
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import Profile, load_profile
from megatron.planner.time.profiled import ProfiledCosts, shape_of
from megatron.trainer.arguments.flags.config import TrainConfig, assumed_vocabulary, padded_vocabulary
from megatron.trainer.plan import from_flags


class CostsOf(Protocol):
    """The costs of a job."""

    def __call__(self, config: TrainConfig, layers: Sequence[int]) -> Costs:
        """Return the costs of a job with `layers` layers on its stages. Raises ValueError if they do not fit."""

    def of_moves(self, config: TrainConfig, ways: Collection[str], sizes: Sequence[float]) -> dict[str, list[float]]:
        """Return the seconds of moves of saved activations, by the names of `Costs`.

        Args:
            ways: the places to which activations may move: `host`, `pair`.
            sizes: bytes of a microbatch at each stage.

        Raises:
            ValueError: there are no such times.
        """

    def with_vocabulary(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration with the number of rows of its embedding."""


def _with_assumed_vocabulary(config: TrainConfig) -> TrainConfig:
    return replace(config, padded_vocab_size=padded_vocabulary(config, assumed_vocabulary(config)))


def numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


class Assumed:
    """The costs of a job before any measurement: all layers take the same time, and nothing else takes time."""

    with_vocabulary = staticmethod(_with_assumed_vocabulary)

    def __call__(self, config: TrainConfig, layers: Sequence[int]) -> Costs:
        return Costs(forward=list(map(float, layers)), backward=[2.0 * each for each in layers])

    def of_moves(self, config: TrainConfig, ways: Collection[str], sizes: Sequence[float]) -> dict[str, list[float]]:
        raise AssertionError("a job begins without moves")


@dataclass(frozen=True)
class MeasuredHere:
    """The costs that a job has measured in its own batches.

    Attributes:
        costs: the costs of computations and transfers.
        to_host, from_host: seconds to copy one byte.
    """

    costs: Costs
    to_host: float = 0.0
    from_host: float = 0.0

    def __call__(self, config: TrainConfig, layers: Sequence[int]) -> Costs:
        return self.costs

    def of_moves(self, config: TrainConfig, ways: Collection[str], sizes: Sequence[float]) -> dict[str, list[float]]:
        found = {}
        if "host" in ways:
            found["swap_out"], found["swap_in"] = (
                [each * byte for each in sizes] for byte in (self.to_host, self.from_host)
            )
        if "pair" in ways:
            found["evict"] = [self.costs.latency + each / self.costs.bandwidth for each in sizes]
        return found

    def with_vocabulary(self, config: TrainConfig) -> TrainConfig:
        return config


@dataclass(frozen=True)
class _Measured:
    """The costs from a run's timeline."""

    path: str
    timeline: Timeline

    with_vocabulary = staticmethod(_with_assumed_vocabulary)

    def __call__(self, config: TrainConfig, layers: Sequence[int]) -> Costs:
        placement, own = tuple(self.timeline.rank_of_stage), config.schedule.rank_of_stage
        if placement != tuple(own):
            raise ValueError(
                f"--pipeline-profile {self.path} was measured with stages on the ranks {numbers(placement)}, and "
                f"the job's are on {numbers(own)}; measure a run of as many ranks, under zb-h1 or zbv"
            )
        costs = measured_costs(self.timeline)
        missing = "halves" if config.schedule.splits_backward else "whole backwards"
        if not any(costs.backward_input or () if config.schedule.splits_backward else costs.backward):
            raise ValueError(f"--pipeline-profile {self.path} has no times of {missing}; measure a run that has them")
        return costs

    def of_moves(self, config: TrainConfig, ways: Collection[str], sizes: Sequence[float]) -> dict[str, list[float]]:
        raise AssertionError("a timeline has no copies")


@dataclass(frozen=True)
class _Profiled:
    """The costs from a profile's blocks."""

    path: str
    profile: Profile

    def __call__(self, config: TrainConfig, layers: Sequence[int]) -> Costs:
        try:
            return self._costs(config).costs(_configuration(config, layers), layers)
        except ValueError as error:
            raise ValueError(f"--pipeline-profile {self.path}: {error}") from error

    def of_moves(self, config: TrainConfig, ways: Collection[str], sizes: Sequence[float]) -> dict[str, list[float]]:
        try:
            return self._costs(config).moves(_configuration(config), sizes, ways)
        except ValueError as error:
            raise ValueError(f"--pipeline-profile {self.path}: {error}") from error

    def _costs(self, config: TrainConfig) -> ProfiledCosts:
        shape = from_flags.architecture(self.with_vocabulary(config))
        return ProfiledCosts(self.profile, shape, from_flags.software(config))

    def with_vocabulary(self, config: TrainConfig) -> TrainConfig:
        rows = shape_of(self.profile, num_layers=1, tensor=config.tensor_model_parallel_size).vocabulary_size
        return replace(config, padded_vocab_size=rows)


def costs_of_file(path: str, *, moves: str = "none") -> CostsOf:
    """The costs in a profile or a timeline. Raises ValueError for an invalid file, or one without times of `moves`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ValueError(
            f"--pipeline-profile {path} cannot be read ({reason}); give a profile of tools/profile_model.py, or the "
            "measured.json of a run with --pipeline-timeline"
        ) from error
    if isinstance(content, dict) and "machine" in content:
        return _Profiled(path, load_profile(path))
    if moves != "none":
        raise ValueError(
            f"--pipeline-moves {moves} needs the times of copies, and --pipeline-profile {path} is a timeline, which "
            "has none; give a profile of tools/profile_model.py, or leave --pipeline-profile out"
        )
    return _Measured(path, Timeline.load(path))


def _configuration(config: TrainConfig, layers: Sequence[int] | None = None) -> Configuration:
    return from_flags.configuration_of(
        config, layers, recompute=_scope(config), distributed_optimizer=config.use_distributed_optimizer,
        context=config.context_parallel_size, expert=config.expert_model_parallel_size,
    )  # fmt: skip


def _scope(config: TrainConfig) -> RecomputeScope:
    modules = config.recompute_modules or ["core_attn"]
    for scope, is_it in (
        (RecomputeScope.NONE, config.recompute_granularity is None),
        (RecomputeScope.ATTENTION, config.recompute_granularity == "selective" and modules == ["core_attn"]),
        (RecomputeScope.LAYER, config.recompute_granularity == "full" and config.recompute_method == "uniform"
         and config.recompute_num_layers in (None, 1)),
    ):  # fmt: skip
        if is_it:
            return scope
    raise ValueError(
        f"a profile has no times of --recompute-granularity {config.recompute_granularity} with these modules or "
        "layers; recompute core_attn or each layer, or give the measured.json of a run"
    )
