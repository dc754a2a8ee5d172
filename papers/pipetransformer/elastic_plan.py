"""What `elastic.py` runs: the arms of PipeTransformer's Figure 9, and of each the pipelines that it goes through.

A run has intervals; behind each of them a few more layers freeze, by the bound of the paper's rule. A stretch of
intervals with as many frozen layers has one pipeline. Of all ways through the stretches, each pipeline of which fits
into memory, an arm takes the one that takes least altogether, transitions included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from megatron.elastic.freeze_rule import ByGradients
from megatron.elastic.pipelines import Layers, PipelineOption, pipelines, seconds_of_prefix

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Arm:
    """Which parts are on: layers freeze, they are cut anew, ranks set free become replicas, the prefix is cached.

    `paper`: the speed-up over the static pipeline that the paper has (Figure 9), where it has one.
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
"""Ranks of a pipeline, and replicas."""
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
    """What all arms share. Times are in seconds, memory in trained layers.

    Attributes:
        layers: what they cost.
        num_stages: ranks, and stages of the static pipeline.
        num_microbatches: of a batch, over all replicas.
        depths: frozen layers in each interval.
        cache_from: there may be a cache from so many frozen layers on.
        epochs: of an interval; in the first at a new depth each sample is missing.
        batches: of an interval.
        on_host: what is cached needs no weights on the device.
        limit: bytes of a rank.
        rebuild: of a transition, engine and groups.
        move, move_layer: of a transition in which layers change their ranks, the state: for each trained layer that the
            rank gets that gets most, and at least.
        is_forced: the cache is on wherever it may be and a pipeline with it fits, whether that pays or not.
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
        """The pipeline that a run begins with.

        Raises:
            ValueError: it cannot be, or does not fit.
        """
        found = self.of_shape((self.num_stages, 1), 0)
        if found is None:
            raise ValueError(
                f"{self.num_microbatches} microbatches of {len(self.layers.forward)} layers do not run on "
                f"{self.num_stages} stages under {self.preset}; give fewer stages, or more of these"
            )
        return found

    def shapes(self, *, replicates: bool) -> list[Shape]:
        """The shapes with ranks and microbatches for them; ranks that are left over are idle."""
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
        """The pipeline of a shape, if there is one. `num_stored`: layers of which a cache has the output, if there is
        one; `layers_of_rank`: its cut, where that is given.
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
        """Seconds of a batch that the pipeline of a shape takes however it is cut: the mean of its ranks, or what only
        one of them can do.
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
        """Seconds to send ranks what they do not have, over links that all carry at once; what is frozen is its weights
        alone. Nothing moves where none gets anything: a prefix stays where it is when its cache is turned on or off.
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
    """Batches of one kind on one pipeline.

    Attributes:
        interval: the first in which they are.
        intervals: for how many they stand; a first epoch is a part of one.
        transition: seconds before it.
        moves: of these, for the state.
    """

    layers: Layers
    pipeline: PipelineOption
    interval: int
    intervals: float
    transition: float = 0.0
    moves: float = 0.0


def depths(num_layers: int, alpha: float, num_intervals: int) -> tuple[int, ...]:
    """Frozen layers in each interval where gradients alone would freeze all but the last: the bound decides.

    Raises:
        ValueError: alpha is not between 0 and 1.
    """
    rule, found = ByGradients(num_layers, alpha), [0]
    for _ in range(num_intervals - 1):
        found.append(rule.decide([1.0] * (num_layers - 1) + [0.0]))
    return tuple(found)


def places(pipeline: PipelineOption) -> tuple[int, ...]:
    """How many layers each rank of a pipeline has, a cached prefix on the first one included."""
    first, *others = pipeline.layers_of_rank
    return (first + (pipeline.num_frozen if pipeline.cached else 0), *others)


def _held(pipeline: PipelineOption) -> list[range]:
    """The layers of each rank of all replicas."""
    return [range(*ends) for ends in pairwise(accumulate(places(pipeline), initial=0))] * pipeline.num_replicas


@lru_cache(maxsize=1024)
def plan(arm: Arm, setting: Setting) -> tuple[Phase, ...]:
    """What an arm goes through; never longer than the same arm with fewer parts.

    By dynamic programming over the stretches. Behind each of them a way is given up that comes to no less than a plan
    that is known, than another way to the same place, or than any other that then moves everything; each with as much
    in the cache. So this is exact over the whole run for two cuts of each shape: the most even one, and the one that is
    there.

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
    """Plans that are this arm's, too; where a cache is forced, other arms' are not."""
    for other in () if setting.is_forced else ARMS:
        if other.freezes and other != arm and arm.has_parts_of(other):
            with suppress(ValueError):
                yield plan(other, setting)


@dataclass(frozen=True)
class _Way:
    """What an arm may have gone through so far; `num_stored`: layers of which the cache has the output by then."""

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
        """The same with one more phase."""
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
    """Ways to the end of a stretch. `rest`: seconds that those behind it take at least, by the shape in it; what comes
    to `most` with that is of no use.
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
        """Whatever its cut is."""
        return (seconds + self.rest[shape]) * _ROUNDING < self.most and not any(
            other.num_stored >= num_stored and other.seconds + self.setting.most_move() <= seconds
            for other in self.ways
        )

    def kept(self) -> list[_Way]:
        """The ways to keep of all that were added."""
        kept = _Found(self.setting, self.most, self.rest)
        for way in sorted(self.ways, key=lambda each: each.seconds):
            kept.add(way)
        return kept.ways


Parts = tuple[tuple[int | None, float], ...]
"""The parts of a stretch: layers whose output the cache has (None: there is no cache), for how many intervals."""


def _parts(setting: Setting, num_frozen: int, intervals: int, num_stored: int) -> Parts:
    """The parts of intervals: with a cache, the first epoch and those after it."""
    of_first = 1 / setting.epochs
    behind = ((num_frozen, intervals - of_first),) if intervals > of_first else ()
    return ((num_stored, of_first), *behind)


def _go_on(found: _Found, ways: Sequence[_Way], arm: Arm, num_frozen: int, intervals: int) -> None:
    """Through a stretch on each way, with a cache where there may be one, and without."""
    shapes = _shapes(arm, found.setting)
    if _may_cache(arm, found.setting, num_frozen):
        for way in ways:
            num_stored = _worth_reading(way.num_stored, found.setting.layers)
            _go_on_from(found, way, shapes, num_frozen, _parts(found.setting, num_frozen, intervals, num_stored))
    if not (found.ways and found.setting.is_forced):
        for way in ways:
            _go_on_from(found, way, shapes, num_frozen, ((None, intervals),))


def _go_on_from(found: _Found, way: _Way, shapes: Sequence[Shape], num_frozen: int, parts: Parts) -> None:
    """Go on with what there is, as it is, and with each shape, those first that may take least."""
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
    """A pipeline for each part, all with one cut, if they fit: as given, or the most even one of some part."""
    like = [setting.of_shape(shape, num_frozen, each) for each, _ in parts] if cut is None else []
    for layers_of_rank in [cut] if cut else dict.fromkeys(each.layers_of_rank for each in like if each):
        found = [setting.of_shape(shape, num_frozen, each, layers_of_rank) for each, _ in parts]
        fitting = [each for each in found if each is not None and setting.fits(each)]
        if len(fitting) == len(parts):
            yield fitting


def _kept_cut(now: PipelineOption, num_frozen: int, *, cached: bool) -> tuple[int, ...] | None:
    """Nothing moves: what is cached has to be on the first rank, which has to have one layer more."""
    first, *others = places(now)
    if not cached:
        return (first, *others)
    return (first - num_frozen, *others) if first > num_frozen else None


def _worth_reading(num_stored: int, layers: Layers) -> int:
    """How many of the layers whose output the cache has are read from it: none, if computing them is sooner."""
    return num_stored if layers.read <= sum(layers.forward[:num_stored]) else 0


def _may_cache(arm: Arm, setting: Setting, num_frozen: int) -> bool:
    return arm.caches and num_frozen >= setting.cache_from


def _shapes(arm: Arm, setting: Setting) -> list[Shape]:
    return setting.shapes(replicates=arm.replicates) if arm.recuts else []


def _at_least(arm: Arm, setting: Setting, stretches: Sequence[tuple[int, int]]) -> dict[Shape, float]:
    """Seconds of stretches (frozen layers, intervals) by the shape before them: it stays, or something moves once."""
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
    """Seconds of all batches that a phase stands for and of the transition before it; simulated, or by given seconds of
    a batch and of the transition.
    """
    seconds = phase.pipeline.seconds if seconds is None else seconds
    return setting.batches * phase.intervals * seconds + (phase.transition if transition is None else transition)


def seconds_of_arm(phases: Sequence[Phase], setting: Setting) -> float:
    """Simulated."""
    return sum(seconds_of(each, setting) for each in phases)
