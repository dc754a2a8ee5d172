"""What `elastic.py` runs: the arms of PipeTransformer's Figure 9, and of each the pipelines that it goes through.

A run has intervals; behind each of them a few more layers freeze, by the bound of the paper's rule. A stretch of
intervals with as many frozen layers has one pipeline: of those that fit into memory the one that takes least for the
whole stretch, transition included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.elastic.freeze_rule import ByGradients
from megatron.elastic.pipelines import Layers, Pipeline, pipelines


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
        cache_from: the cache is on from so many frozen layers.
        epochs: of an interval; in the first at a new depth each sample is missing.
        batches: of an interval.
        on_host: what is cached needs no weights on the device.
        limit: bytes of a rank.
        rebuild, move: of a transition: engine and groups, and the state where layers change their ranks.
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

    def static(self) -> Pipeline:
        """The pipeline that a run begins with.

        Raises:
            ValueError: it cannot be, or does not fit.
        """
        found = self.of_ranks(self.num_stages, 0, replicates=False)
        if not found:
            raise ValueError(
                f"{self.num_microbatches} microbatches of {len(self.layers.forward)} layers do not run on "
                f"{self.num_stages} stages under {self.preset}; give fewer stages, or more of these"
            )
        return found[0]

    def of_ranks(self, num_ranks: int, num_frozen: int, *, replicates: bool, **choices) -> list[Pipeline]:
        """The pipeline of so many ranks, where there is one; without replicas the other ranks are idle."""
        return pipelines(
            self.layers, num_frozen, world=self.num_stages if replicates else num_ranks, ranks=[num_ranks],
            num_microbatches=self.num_microbatches, preset=self.preset, most_bytes=self.limit, **choices,
        )  # fmt: skip


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
    pipeline: Pipeline
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


def plan(arm: Arm, setting: Setting) -> list[Phase]:
    """What an arm goes through. Raises ValueError where a stretch has no pipeline that fits."""
    now = setting.static()
    if not arm.freezes:
        return [Phase(setting.layers, now, 0, len(setting.depths))]
    phases, begin, num_stored = [], 0, 0
    for num_frozen, members in groupby(setting.depths):
        intervals = len(list(members))
        if not num_frozen:
            phases.append(Phase(setting.layers, now, begin, intervals))
        else:
            chosen = min(
                _fitting(_candidates(arm, setting, num_frozen, num_stored, now), setting.limit, num_frozen),
                key=lambda each: (_seconds_of(each, setting, intervals, now), each[0].num_ranks),
            )
            phases += _phases(chosen, setting, begin, intervals, now)
            now = chosen[1]
            num_stored = num_frozen if now.cached else num_stored
        begin += intervals
    return phases


Pair = tuple[Pipeline, Pipeline]
"""One pipeline in the first epoch at a depth, and behind it; the same twice where there is no cache."""


def _candidates(arm: Arm, setting: Setting, num_frozen: int, num_stored: int, now: Pipeline) -> Iterator[Pair]:
    if arm.caches and num_frozen >= setting.cache_from:
        cached = list(_cached(arm, setting, num_frozen, num_stored))
        if any(max(each.num_bytes for each in pair) <= setting.limit * (1 + 1e-9) for pair in cached):
            yield from cached
            return
    if not now.cached:  # what there is, as it is
        choices = {"replicates": now.num_replicas > 1, "layers_of_rank": now.layers_of_rank}
        yield from ((each, each) for each in setting.of_ranks(now.num_ranks, num_frozen, **choices))
    if arm.recuts:
        for num_ranks in range(1, setting.num_stages + 1):
            if setting.num_stages % num_ranks == 0:
                found = setting.of_ranks(num_ranks, num_frozen, replicates=arm.replicates)
                yield from ((each, each) for each in found)


def _cached(arm: Arm, setting: Setting, num_frozen: int, num_stored: int) -> Iterator[Pair]:
    """Cut for the first epoch, and for those behind it."""
    choices = {"replicates": arm.replicates, "cached": True, "on_host": setting.on_host}
    for num_ranks in range(1, setting.num_stages + 1):
        if setting.num_stages % num_ranks:
            continue
        for balanced_for in {num_stored, num_frozen}:
            for like in setting.of_ranks(num_ranks, num_frozen, num_stored=balanced_for, **choices):
                cut = {"layers_of_rank": like.layers_of_rank}
                first, behind = (
                    setting.of_ranks(num_ranks, num_frozen, num_stored=each, **choices, **cut)[0]
                    for each in (num_stored, num_frozen)
                )
                yield first, behind


def _fitting(found: Iterator[Pair], limit: float, num_frozen: int) -> list[Pair]:
    found = list(found)
    fitting = [pair for pair in found if max(each.num_bytes for each in pair) <= limit * (1 + 1e-9)]
    if not fitting:
        raise ValueError(
            f"with {num_frozen} layers frozen no pipeline fits into {limit:g} of a rank; give more memory, or fewer "
            "layers"
        )
    return fitting


def _seconds_of(pair: Pair, setting: Setting, intervals: int, now: Pipeline) -> float:
    return sum(seconds_of(each, setting) for each in _phases(pair, setting, 0, intervals, now))


def _phases(pair: Pair, setting: Setting, begin: int, intervals: int, now: Pipeline) -> list[Phase]:
    first, behind = pair
    same_places = not first.cached and not now.cached and first.layers_of_rank == now.layers_of_rank
    moves = 0.0 if same_places else setting.move
    transition = {"transition": setting.rebuild + moves, "moves": moves}
    if first == behind:
        return [Phase(setting.layers, first, begin, intervals, **transition)]
    of_first = 1 / setting.epochs
    phases = [Phase(setting.layers, first, begin, of_first, **transition)]
    if intervals > of_first:
        # It stands where the next interval begins, if the first epoch is one.
        phases.append(Phase(setting.layers, behind, begin + int(of_first), intervals - of_first))
    return phases


def seconds_of(phase: Phase, setting: Setting, seconds: float | None = None, transition: float | None = None) -> float:
    """Of all batches for which a phase stands, and of the transition before it; simulated, or of the given seconds of
    a batch and of the transition.
    """
    seconds = phase.pipeline.seconds if seconds is None else seconds
    return setting.batches * phase.intervals * seconds + (phase.transition if transition is None else transition)


def seconds_of_arm(phases: Sequence[Phase], setting: Setting) -> float:
    """Simulated."""
    return sum(seconds_of(each, setting) for each in phases)
