"""The arms of PipeTransformer's Figure 9 for `elastic.py`, and the plan of each arm: the sequence of its pipelines.

A run has intervals; after each interval a few more layers freeze, by the bound of the paper's rule. A stretch of
intervals with the same number of frozen layers has one pipeline. Of all sequences whose pipelines fit into memory, an
arm uses the fastest, transitions included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from megatron.elastic.freezing import ByGradients
from megatron.elastic.pipelines import Layers, PipelineOption, pipelines, seconds_of_prefix

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Arm:
    """An arm: the parts of PipeTransformer that are on.

    Attributes:
        freezes: whether layers freeze.
        recuts: whether layers are cut anew.
        replicates: whether ranks that are set free become replicas.
        caches: whether the prefix's output may be cached.
        paper: the paper's speed-up over the static pipeline (Figure 9), or None.
    """

    name: str
    freezes: bool = True
    recuts: bool = False
    replicates: bool = False
    caches: bool = False
    paper: float | None = None

    def has_parts_of(self, other: Arm) -> bool:
        parts = ("freezes", "recuts", "replicates", "caches")
        return all(getattr(self, part) or not getattr(other, part) for part in parts)


Shape = tuple[int, int]
"""(number of ranks of a pipeline, number of replicas)."""
STATIC = Arm("static", freezes=False, paper=1.0)
ARMS = (
    STATIC,
    Arm("freeze only", paper=0.95),
    Arm("freeze + AutoPipe", recuts=True),
    Arm("freeze + AutoPipe + AutoCache", recuts=True, caches=True, paper=1.26),
    Arm("freeze + AutoPipe + AutoDP", recuts=True, replicates=True, paper=2.27),
    Arm("all", recuts=True, replicates=True, caches=True, paper=2.83),
)


@dataclass(frozen=True)
class Setting:
    """The setting that all arms share. Times are in seconds, memory in trained layers.

    Attributes:
        layers: the costs of layers.
        num_stages: number of ranks, and of stages of the static pipeline.
        num_microbatches: number of microbatches of a batch, over all replicas.
        depths: number of frozen layers in each interval.
        cache_from: the least number of frozen layers with which a cache may be used.
        epochs: number of epochs of an interval. In the first epoch at a new depth each sample is missing.
        batches: number of batches of an interval.
        preset: gpipe or flush.
        on_host: whether cached layers need no weights on the device.
        limit: memory of a rank.
        rebuild: seconds of a transition for engine and groups.
        move: the least seconds to move the state in a transition in which layers change their ranks.
        move_layer: seconds to move the state of one trained layer; the rank that gets most decides.
        is_forced: whether the cache is on wherever it may be used and a pipeline with it fits, even if it costs time.
    """

    layers: Layers
    num_stages: int
    num_microbatches: int
    depths: tuple[int, ...]
    cache_from: int
    epochs: int
    batches: int
    preset: str
    on_host: bool
    limit: float
    rebuild: float
    move: float
    move_layer: float = 0.0
    is_forced: bool = False

    def static(self) -> PipelineOption:
        """The pipeline with which a run begins.

        Raises:
            ValueError: the schedule cannot run on this number of stages.
        """
        found = self.of_shape((self.num_stages, 1), 0)
        if found is None:
            raise ValueError(
                f"{self.num_microbatches} microbatches of {len(self.layers.forward)} layers do not run on "
                f"{self.num_stages} stages under {self.preset}; give fewer stages, or more of these"
            )
        return found

    def shapes(self, *, replicates: bool) -> list[Shape]:
        """The possible shapes on the setting's ranks and microbatches; ranks that are left over are idle."""
        return [
            (num_ranks, num_replicas)
            for num_ranks in range(1, self.num_stages + 1)
            for num_replicas in range(1, (self.num_stages // num_ranks if replicates else 1) + 1)
            if self.num_microbatches % num_replicas == 0
        ]

    def of_shape(
        self, shape: Shape, num_frozen: int, num_stored: int | None = None,
        layers_of_rank: tuple[int, ...] | None = None,
    ) -> PipelineOption | None:  # fmt: skip
        """The pipeline of a shape, or None.

        `num_stored`: number of layers whose output a cache has; None: no cache. `layers_of_rank`: the cut; None: the
        most even cut.
        """
        num_ranks, num_replicas = shape
        cached = num_stored is not None
        found = pipelines(
            self.layers, num_frozen, world=num_ranks * num_replicas, ranks=[num_ranks], cached=cached,
            num_stored=num_stored, on_host=cached and self.on_host, num_microbatches=self.num_microbatches,
            preset=self.preset, most_bytes=self.limit, layers_of_rank=layers_of_rank,
        )  # fmt: skip
        return found[0] if found else None

    def at_least(self, shape: Shape, num_frozen: int, num_stored: int | None = None) -> float:
        """A lower bound of the seconds of a batch on a shape, for any cut: the mean work of its ranks, or the work that
        only one rank can do.
        """
        num_ranks, num_replicas = shape
        layers, num_microbatches = self.layers, self.num_microbatches / num_replicas
        trained = sum(layers.forward[num_frozen:]) + sum(layers.backward[num_frozen:])
        if num_stored is None:
            prefix, of_one = sum(layers.forward[:num_frozen]), 0.0
        else:
            prefix = of_one = seconds_of_prefix(layers, num_frozen, num_stored)
        reduced = (len(layers.forward) - num_frozen) * layers.reduce if num_replicas > 1 else 0.0
        mean = (num_microbatches * (prefix + trained) + reduced) / num_ranks
        return max(mean, num_microbatches * of_one)

    def fits(self, pipeline: PipelineOption) -> bool:
        return pipeline.num_bytes <= self.limit * _ROUNDING

    def most_move(self) -> float:
        return max(self.move, self.move_layer * len(self.layers.forward))

    def seconds_of_move(self, before: PipelineOption, behind: PipelineOption) -> float:
        """The seconds to send the state of new layers to ranks, over all links at the same time.

        A frozen layer's state is its weights alone. The result is 0 if no rank gets a layer: a prefix stays on its
        ranks when its cache is turned on or off.
        """
        held, layers = _held(before), self.layers
        got = [
            [each for each in own if rank >= len(held) or each not in held[rank]]
            for rank, own in enumerate(_held(behind))
        ]
        if not any(got):
            return 0.0
        frozen = layers.frozen_bytes / layers.trained_bytes
        most = max(sum(frozen if each < behind.num_frozen else 1.0 for each in own) for own in got)
        return max(self.move, self.move_layer * most)


@dataclass(frozen=True)
class Phase:
    """A phase of a run on one pipeline.

    Attributes:
        interval: the first interval of the phase.
        intervals: the number of intervals of the phase; a first epoch is a part of an interval.
        transition: seconds of the transition before the phase.
        moves: the part of these seconds for moving the state.
    """

    layers: Layers
    pipeline: PipelineOption
    interval: int
    intervals: float
    transition: float = 0.0
    moves: float = 0.0


def depths(num_layers: int, alpha: float, num_intervals: int) -> tuple[int, ...]:
    """The number of frozen layers in each interval, by the bound alone, as if gradients froze all layers but the last.

    Raises:
        ValueError: alpha is not between 0 and 1.
    """
    rule, found = ByGradients(num_layers, alpha), [0]
    for _ in range(num_intervals - 1):
        found.append(rule.decide([1.0] * (num_layers - 1) + [0.0]))
    return tuple(found)


def places(pipeline: PipelineOption) -> tuple[int, ...]:
    """The number of layers of each rank of a pipeline, including a cached prefix on the first rank."""
    first, *others = pipeline.layers_of_rank
    return (first + (pipeline.num_frozen if pipeline.cached else 0), *others)


def _held(pipeline: PipelineOption) -> list[range]:
    """The layers of each rank, for all replicas."""
    return [range(*ends) for ends in pairwise(accumulate(places(pipeline), initial=0))] * pipeline.num_replicas


@lru_cache(maxsize=1024)
def plan(arm: Arm, setting: Setting) -> tuple[Phase, ...]:
    """The phases of an arm; the plan is never slower than that of an arm with fewer parts.

    The plan is found by dynamic programming over the stretches. After each stretch a way is dropped if it cannot become
    faster than a known plan, than another way to the same state, or than any other way that then moves everything, with
    at least as much in the cache. So the plan is optimal over the whole run for two cuts of each shape: the most even
    cut, and the current one.

    Raises:
        ValueError: a stretch has no pipeline that fits.
    """
    if not arm.freezes:
        return (Phase(setting.layers, setting.static(), 0, len(setting.depths)),)
    known = min(_of_fewer_parts(arm, setting), key=lambda each: seconds_of_arm(each, setting), default=None)
    most = math.inf if known is None else seconds_of_arm(known, setting)
    (_, intervals), *stretches = [(depth, len(list(members))) for depth, members in groupby(setting.depths)]
    ways = [_Way((), 0, 0.0).on(setting, setting.static(), intervals)]
    for place, (num_frozen, intervals) in enumerate(stretches):
        found = _Found(setting, most, _at_least(arm, setting, stretches[place + 1 :]))
        _go_on(found, ways, arm, num_frozen, intervals)
        ways = found.kept()
        if not ways and known is None:
            raise ValueError(
                f"with {num_frozen} layers frozen no pipeline fits into {setting.limit:g} of a rank; give more memory, "
                "or fewer layers"
            )
    best = min(ways, key=lambda each: each.seconds, default=None)
    return known if best is None else best.phases


def _of_fewer_parts(arm: Arm, setting: Setting) -> Iterator[tuple[Phase, ...]]:
    """Yield the plans of arms with fewer parts, which are also possible for this arm; none if a cache is forced."""
    for other in () if setting.is_forced else ARMS:
        if other.freezes and other != arm and arm.has_parts_of(other):
            with suppress(ValueError):
                yield plan(other, setting)


@dataclass(frozen=True)
class _Way:
    """A possible sequence of phases so far.

    `num_stored`: number of layers whose output the cache has at its end. `seconds`: the time of all its phases.
    """

    phases: tuple[Phase, ...]
    num_stored: int
    seconds: float

    @property
    def now(self) -> PipelineOption:
        return self.phases[-1].pipeline

    @property
    def shape(self) -> Shape:
        return self.now.num_ranks, self.now.num_replicas

    def on(self, setting: Setting, pipeline: PipelineOption, intervals: float) -> _Way:
        """The way with one more phase."""
        begin = math.floor(sum(each.intervals for each in self.phases) + 1e-9)
        moves = transition = 0.0
        if self.phases and self.now.num_frozen < pipeline.num_frozen:
            moves = setting.seconds_of_move(self.now, pipeline)
            transition = setting.rebuild + moves
        phase = Phase(setting.layers, pipeline, begin, intervals, transition, moves)
        num_stored = pipeline.num_frozen if pipeline.cached else self.num_stored
        return _Way((*self.phases, phase), num_stored, self.seconds + seconds_of(phase, setting))


@dataclass
class _Found:
    """The ways to the end of a stretch.

    Attributes:
        most: the seconds of a known plan; a way that reaches them is useless.
        rest: shape in the stretch -> the least seconds of the later stretches.
        ways: the ways found so far.
    """

    setting: Setting
    most: float
    rest: dict[Shape, float]
    ways: list[_Way] = field(default_factory=list)

    def add(self, way: _Way) -> None:
        held = _held(way.now)
        if self.is_of_use(way.seconds, way.num_stored, way.shape) and not any(
            other.num_stored >= way.num_stored and other.seconds <= way.seconds and _held(other.now) == held
            for other in self.ways
        ):
            self.ways.append(way)

    def is_of_use(self, seconds: float, num_stored: int, shape: Shape) -> bool:
        """Whether a way with these properties, whatever its cut, may lead to a better plan."""
        return (seconds + self.rest[shape]) * _ROUNDING < self.most and not any(
            other.num_stored >= num_stored and other.seconds + self.setting.most_move() <= seconds
            for other in self.ways
        )

    def kept(self) -> list[_Way]:
        """The ways to keep: those that no other added way makes useless."""
        kept = _Found(self.setting, self.most, self.rest)
        for way in sorted(self.ways, key=lambda each: each.seconds):
            kept.add(way)
        return kept.ways


Parts = tuple[tuple[int | None, float], ...]
"""The parts of a stretch: (number of layers whose output the cache has, or None without a cache; intervals)."""


def _parts(setting: Setting, num_frozen: int, intervals: int, num_stored: int) -> Parts:
    """Divide a stretch with a cache into its first epoch, which fills the cache, and the later epochs."""
    of_first = 1 / setting.epochs
    behind = ((num_frozen, intervals - of_first),) if intervals > of_first else ()
    return ((num_stored, of_first), *behind)


def _go_on(found: _Found, ways: Sequence[_Way], arm: Arm, num_frozen: int, intervals: int) -> None:
    """Extend each way by a stretch, with a cache if it may be used, and without; add the results to `found`."""
    shapes = _shapes(arm, found.setting)
    if _may_cache(arm, found.setting, num_frozen):
        for way in ways:
            num_stored = _worth_reading(way.num_stored, found.setting.layers)
            _go_on_from(found, way, shapes, num_frozen, _parts(found.setting, num_frozen, intervals, num_stored))
    if not (found.ways and found.setting.is_forced):
        for way in ways:
            _go_on_from(found, way, shapes, num_frozen, ((None, intervals),))


def _go_on_from(found: _Found, way: _Way, shapes: Sequence[Shape], num_frozen: int, parts: Parts) -> None:
    """Extend a way by a stretch with its current cut, and with each shape, in the order of their lower bounds."""
    setting, cached = found.setting, parts[0][0] is not None

    def at_least(shape: Shape) -> float:
        return setting.batches * sum(length * setting.at_least(shape, num_frozen, each) for each, length in parts)

    choices: list[tuple[Shape, tuple[int, ...] | None]] = [(each, None) for each in sorted(shapes, key=at_least)]
    kept = _kept_cut(way.now, num_frozen, cached=cached)
    if kept is not None:
        choices.insert(0, (way.shape, kept))
    for shape, cut in choices:
        seconds = way.seconds + setting.rebuild + at_least(shape)
        if not found.is_of_use(seconds, num_frozen if cached else way.num_stored, shape):
            continue
        for pipelines_of_parts in _cut(setting, shape, num_frozen, parts, cut):
            longer = way
            for pipeline, (_, length) in zip(pipelines_of_parts, parts, strict=True):
                longer = longer.on(setting, pipeline, length)
            found.add(longer)


def _cut(
    setting: Setting, shape: Shape, num_frozen: int, parts: Parts, cut: tuple[int, ...] | None
) -> Iterator[list[PipelineOption]]:
    """Yield a pipeline for each part, all with one cut, if all fit: `cut`, or else the most even cut of each part."""
    like = [setting.of_shape(shape, num_frozen, each) for each, _ in parts] if cut is None else []
    for layers_of_rank in [cut] if cut else dict.fromkeys(each.layers_of_rank for each in like if each):
        found = [setting.of_shape(shape, num_frozen, each, layers_of_rank) for each, _ in parts]
        fitting = [each for each in found if each is not None and setting.fits(each)]
        if len(fitting) == len(parts):
            yield fitting


def _kept_cut(now: PipelineOption, num_frozen: int, *, cached: bool) -> tuple[int, ...] | None:
    """The cut with which no layer moves; None if there is none, since a cached prefix must lie on the first rank, which
    needs at least one more layer."""
    first, *others = places(now)
    if not cached:
        return (first, *others)
    return (first - num_frozen, *others) if first > num_frozen else None


def _worth_reading(num_stored: int, layers: Layers) -> int:
    """The number of layers whose output is read from the cache: all that it has, or 0 if computing them is faster."""
    return num_stored if layers.read <= sum(layers.forward[:num_stored]) else 0


def _may_cache(arm: Arm, setting: Setting, num_frozen: int) -> bool:
    return arm.caches and num_frozen >= setting.cache_from


def _shapes(arm: Arm, setting: Setting) -> list[Shape]:
    return setting.shapes(replicates=arm.replicates) if arm.recuts else []


def _at_least(arm: Arm, setting: Setting, stretches: Sequence[tuple[int, int]]) -> dict[Shape, float]:
    """Lower bounds of the seconds of later stretches, by the shape before them: it stays, or layers move once.

    `stretches`: (frozen layers, intervals) of each stretch.
    """
    stays = dict.fromkeys(_shapes(arm, setting) or [(setting.num_stages, 1)], 0.0)
    moves = setting.move
    for num_frozen, intervals in stretches:
        stored = [None, num_frozen] if _may_cache(arm, setting, num_frozen) else [None]
        batch = {shape: min(setting.at_least(shape, num_frozen, each) for each in stored) for shape in stays}
        stays = {
            shape: seconds + setting.rebuild + setting.batches * intervals * batch[shape]
            for shape, seconds in stays.items()
        }
        moves += setting.rebuild + setting.batches * intervals * min(batch.values())
    return {shape: min(seconds, moves) for shape, seconds in stays.items()}


def seconds_of(phase: Phase, setting: Setting, seconds: float | None = None, transition: float | None = None) -> float:
    """The seconds of all batches of a phase and of the transition before it.

    `seconds`, `transition`: measured seconds of a batch and of the transition; None: the simulated ones.
    """
    seconds = phase.pipeline.seconds if seconds is None else seconds
    return setting.batches * phase.intervals * seconds + (phase.transition if transition is None else transition)


def seconds_of_arm(phases: Sequence[Phase], setting: Setting) -> float:
    """The simulated seconds of all phases."""
    return sum(seconds_of(each, setting) for each in phases)
