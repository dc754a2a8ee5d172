"""The prediction of a measured run, and its errors."""

from dataclasses import dataclass

from megatron.pipeline.simulate.costs import Costs
from megatron.planner.job.estimate import Estimate
from megatron.planner.planner import Planner
from megatron.planner.published.entries import Entry
from megatron.planner.sharded.iteration import sharded_costs, sharded_time
from megatron.planner.time.calibration import START, Constants
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.iteration import priced


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one entry.

    Attributes:
        forward, backward: seconds of one microbatch at a stage between the first and the last.
    """

    entry: Entry
    estimate: Estimate
    forward: float
    backward: float

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured time, less 1, for each measured time."""
        return _errors(self.entry, self.estimate.seconds, self.forward, self.backward)

    @property
    def peak_error(self) -> float | None:
        """Predicted over printed memory of the fullest GPU, less 1; None: it was not printed."""
        if self.entry.peak_gib is None:
            return None
        return self.estimate.memory_gib / self.entry.peak_gib - 1

    @property
    def published_errors(self) -> dict[str, float]:
        """Predicted over published value, less 1, for the published times or MFU."""
        if not self.entry.published_mfu:
            return self.errors
        return {"mfu": self.entry.seconds / self.estimate.seconds - 1}


class Question:
    """An entry, ready to be predicted with many constants: all that does not depend on them is computed once.

    Raises ValueError if the configuration cannot run.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._first_principles = FirstPrinciples(entry.model, entry.cluster, entry.software, START)
        self._planner = Planner(entry.model, entry.cluster, self._first_principles, entry.software)
        self._layers = self._planner.layers(entry.configuration)
        self._is_sharded = entry.configuration.sharding is not None
        self._schedule = entry.configuration.pipeline_schedule(tied_embeddings=entry.model.tied_embeddings)
        memory = self._planner.memory(entry.configuration, self._layers, proved=False)
        self._verdict = self._planner.judge(entry.configuration, memory)

    @property
    def is_slowed(self) -> bool:
        """Whether the allocator slows a rank down."""
        return bool(self._verdict.slowed)

    def predict(self, constants: Constants, *, simulate: bool = False) -> Prediction:
        forward, backward = self._middle(constants)
        planner = self._planner_with(constants)
        return Prediction(
            entry=self.entry,
            estimate=planner.estimate(self.entry.configuration, simulate=simulate),
            forward=forward,
            backward=backward,
        )

    def time_errors(self, constants: Constants) -> dict[str, float]:
        """The errors of `predict`, without the rest of the prediction."""
        configuration = self.entry.configuration
        if self._is_sharded:
            cost_model = self._first_principles.calibrated(constants)
            seconds = sharded_time(cost_model, configuration, is_slowed=self.is_slowed).seconds
            return _errors(self.entry, seconds, *self._middle(constants))
        costs = self._costs(constants)
        return _errors(self.entry, priced(costs, configuration, self._schedule).seconds, *_middle(costs))

    def _middle(self, constants: Constants) -> tuple[float, float]:
        """Seconds of forward and backward of a microbatch: of a stage, or of the whole model if weights are split."""
        if not self._is_sharded:
            return _middle(self._costs(constants))
        costs = sharded_costs(
            self._first_principles.calibrated(constants), self.entry.configuration, is_slowed=self.is_slowed
        )
        return costs.computed.forward, costs.computed.backward

    def _costs(self, constants: Constants) -> Costs:
        planner = self._planner_with(constants)
        return planner.costs(self.entry.configuration, self._schedule, self._layers, self._verdict)

    def _planner_with(self, constants: Constants) -> Planner:
        calibrated = self._first_principles.calibrated(constants)
        return Planner(self.entry.model, self.entry.cluster, calibrated, self.entry.software)


def predict(entry: Entry, constants: Constants, *, simulate: bool = False) -> Prediction:
    """The prediction of an entry. Raises ValueError if the configuration cannot run."""
    return Question(entry).predict(constants, simulate=simulate)


def _middle(costs: Costs) -> tuple[float, float]:
    """Seconds of forward and backward of a stage between the first and the last, or else of the last."""
    stage = min(1, len(costs.forward) - 1)
    return costs.forward[stage], costs.backward[stage]


def _errors(entry: Entry, seconds: float, forward: float, backward: float) -> dict[str, float]:
    pairs = {
        "iteration": (seconds, entry.seconds),
        "forward": (forward, entry.forward),
        "backward": (backward, entry.backward),
    }
    return {name: predicted / measured - 1 for name, (predicted, measured) in pairs.items() if measured is not None}
