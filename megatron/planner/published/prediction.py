"""The prediction of a measured run with its errors, and the fit of the time model's constants to measured runs.

A residual is log(predicted / measured time), and the unknowns are the logarithms of the constants: neither has a unit,
and no constant can become negative. A run that was slow for another reason, such as an allocator short of memory,
distorts the constants even under a robust loss. So after each fit the run with the largest error is left out if its
error far exceeds the usual error, until the remaining runs agree. The runs that were left out are reported.

A profile has measured times of single stages instead of whole iterations, for one model. Constants that are fitted to a
profile hold for other shapes on the same kind of processor if its stages differ enough in microbatch, tensor ranks and
recomputation to tell the constants apart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from megatron.pipeline.simulate.costs import Costs
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import Software
from megatron.planner.planner import Planner
from megatron.planner.published.entries import Entry
from megatron.planner.sharded import sharded_costs, sharded_time
from megatron.planner.time.calibration import FITTED, START, Constants
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.iteration import priced
from megatron.planner.time.profile import Profile, StagePosition, StageTime
from megatron.planner.time.profiled import software_of


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
        """Predicted over published memory of the fullest GPU, less 1; None: it was not published."""
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
    """An entry prepared for predictions with many sets of constants: all that does not depend on them is computed once.

    Raises ValueError if the configuration cannot run.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._first_principles = FirstPrinciples(entry.model, entry.cluster, entry.software, START)
        self._planner = Planner(entry.model, entry.cluster, self._first_principles, entry.software)
        self._layers = self._planner.layers(entry.configuration)
        self._is_sharded = entry.configuration.sharding is not None
        self._schedule = entry.configuration.pipeline_schedule(tied_embeddings=entry.model.shares_embedding)
        memory = self._planner.memory(entry.configuration, self._layers, proved=False)
        self._verdict = self._planner.judge(entry.configuration, memory)

    @property
    def is_slowed(self) -> bool:
        """Whether the allocator slows a rank down."""
        return bool(self._verdict.slowed)

    def predict(self, constants: Constants, *, simulate: bool = False) -> Prediction:
        forward, backward = self._middle(constants)
        estimate = self._planner_with(constants).estimate(self.entry.configuration, simulate=simulate)
        return Prediction(entry=self.entry, estimate=estimate, forward=forward, backward=backward)

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


SCALE = 0.02
_LEAST_UNEXPLAINED = 0.05
_TIMES_USUAL = 6.0
_INDICES = {StagePosition.ONLY: 0, StagePosition.FIRST: 0, StagePosition.MIDDLE: 1, StagePosition.LAST: 2}

TimeErrors = Callable[[Constants], dict[str, float]]
"""Constants -> predicted over measured time, less 1, by the name of the time: iteration, forward, backward."""


@dataclass(frozen=True, kw_only=True)
class ConstantsFit:
    """Fitted constants.

    Attributes:
        errors: by id of a run, the largest of its relative errors, with its sign.
        unexplained: ids of the runs that were left aside.
    """

    constants: Constants
    errors: dict[str, float]
    unexplained: tuple[str, ...]

    @property
    def mean_error(self) -> float:
        """The mean size of the errors of the explained runs."""
        explained = [abs(error) for name, error in self.errors.items() if name not in self.unexplained]
        return sum(explained) / len(explained)


def fit_entries(entries: Sequence[Entry], start: Constants = START) -> ConstantsFit:
    """Fit the constants to the measurements of these entries. Raises ValueError if there are fewer than constants."""
    return fit_questions(questions(entries), start)


def fit_questions(asked: Mapping[str, Question], start: Constants = START) -> ConstantsFit:
    """Fit the constants to questions by id. `pressed_efficiency` is fitted only if an allocator slows one of the
    runs."""
    is_told = any(each.is_slowed for each in asked.values())
    free = [name for name in FITTED if is_told or name != "pressed_efficiency"]
    return fit_runs({name: each.time_errors for name, each in asked.items()}, start, free=free)


def questions(entries: Sequence[Entry]) -> dict[str, Question]:
    """The questions of all entries whose time was measured and whose configuration can run, by id.

    Raises:
        ValueError: two of them have the same id.
    """
    found: dict[str, Question] = {}
    for entry in filter(is_timed, entries):
        if entry.id in found:
            raise ValueError(f"two measured runs have the id {entry.id!r}; give each its own")
        try:
            found[entry.id] = Question(entry)
        except ValueError:
            continue  # `estimate` says why
    return found


def is_timed(entry: Entry) -> bool:
    """Whether some time of the entry was measured."""
    return any(each is not None for each in (entry.seconds, entry.forward, entry.backward))


def fit_runs(runs: dict[str, TimeErrors], start: Constants = START, *, free: Sequence[str] = FITTED) -> ConstantsFit:
    """Fit the constants to runs by id, each with a function that returns its errors. Raises as `fit_entries`."""
    kept, constants = dict(runs), start
    while True:
        if len(kept) < len(free):
            raise ValueError(f"{len(kept)} measured runs cannot fix {len(free)} constants; give more")
        constants = _fit(kept, constants, free)
        errors = {name: max(run(constants).values(), key=abs) for name, run in runs.items()}
        usual = float(np.median([abs(errors[name]) for name in kept]))
        limit = max(_LEAST_UNEXPLAINED, _TIMES_USUAL * usual)
        worst = max(kept, key=lambda name: abs(errors[name]))
        if abs(errors[worst]) <= limit:
            unexplained = tuple(name for name in runs if name not in kept)
            return ConstantsFit(constants=constants, errors=errors, unexplained=unexplained)
        del kept[worst]


def _fit(runs: dict[str, TimeErrors], start: Constants, free: Sequence[str]) -> Constants:
    def constants(logarithms: np.ndarray) -> Constants:
        values = {name: math.exp(min(value, 0.0)) for name, value in zip(free, logarithms, strict=True)}
        return replace(start, **values)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        chosen = constants(logarithms)
        return np.array([math.log1p(error) for run in runs.values() for error in run(chosen).values()])

    first = np.array([math.log(max(getattr(start, name), 1e-9)) for name in free])
    # Soft L1: the loss of a run that is far off grows with its error, not with the square of the error.
    fit = least_squares(residuals, first, loss="soft_l1", f_scale=SCALE, diff_step=1e-5, ftol=1e-6)
    return constants(fit.x)


def fit_profile(profile: Profile, gpu: str, start: Constants = START) -> ConstantsFit:
    """Fit the constants to a profile taken on `gpu`, a name in `DEVICES` or `cpu`; see `fit_profiles`."""
    return fit_profiles({"": profile}, gpu, start)


def fit_profiles(
    profiles: Mapping[str, Profile], gpu: str, start: Constants = START, *, software: Software | None = None
) -> ConstantsFit:
    """Fit the time model's constants to profiles of several models, taken on `gpu`: a name in `DEVICES`, or `cpu`.

    `tensor_efficiency` is fitted only if some stages have several tensor ranks; `pressed_efficiency` is not fitted.

    Args:
        profiles: name of a model -> its profile.
        software: the training software; None: as each profile records it.

    Raises ValueError for fewer stages than constants.
    """
    runs, several = {}, False
    for model, profile in profiles.items():
        trained = software or software_of(profile)
        for stage in profile.stages:
            several = several or stage.tensor > 1
            if not profile.shares_processor or stage.working == stage.tensor:  # alone on its processor
                degrees = f"{stage.num_layers} layers, t={stage.tensor}, mb={stage.micro_batch_size}"
                name = f"{stage.place.value}, {degrees}, {stage.recompute.value}"
                runs[f"{model}: {name}" if model else name] = _stage_errors(profile, stage, gpu, trained)
    absent = {"pressed_efficiency"} if several else {"pressed_efficiency", "tensor_efficiency"}
    return fit_runs(runs, start, free=[name for name in FITTED if name not in absent])


def _stage_errors(profile: Profile, stage: StageTime, gpu: str, software: Software) -> TimeErrors:
    pipeline, index = 1 if stage.place is StagePosition.ONLY else 3, _INDICES[stage.place]
    layers = (stage.num_layers,) * pipeline
    configuration = Configuration(
        tensor=stage.tensor, pipeline=pipeline, micro_batch_size=stage.micro_batch_size,
        global_batch_size=stage.micro_batch_size, recompute=stage.recompute,
        sequence_parallel=profile.sequence_parallel and stage.tensor > 1,
    )  # fmt: skip
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=stage.tensor * pipeline)
    first_principles = FirstPrinciples(replace(profile.model, num_layers=sum(layers)), cluster, software, START)

    def errors(constants: Constants) -> dict[str, float]:
        costs = first_principles.calibrated(constants).costs(configuration, layers)
        return {
            "forward": costs.forward[index] / stage.forward.median - 1,
            "backward": costs.backward[index] / stage.backward.median - 1,
        }

    return errors
