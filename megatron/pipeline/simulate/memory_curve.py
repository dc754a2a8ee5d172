"""The memory that each rank of a timeline holds at every moment, and its parts.

The checker proves peaks in microbatches and versions, for any timing. This module multiplies such counts by bytes and
follows them along a simulated or measured timeline, which shows when memory is short and which part fills it:

- activations: of each microbatch from the start of its forward (or of its LOAD, ACCEPT or RELOAD) to the end of its
  backward, or of its weight half if it is split (or of its EVICT, RETURN or OFFLOAD);
- deferred: if the size that the weight half of a split backward needs is given, this size replaces the activations from
  the end of the input half on;
- weights: a buffer for each version that the weight policy keeps. A STEP, or a PREDICT under a policy that predicts,
  writes its version into a free buffer, or takes another buffer. Buffers are kept, as in the runtime. The true weights
  beside predicted ones are the optimizer's masters; without masters, one more version belongs to the optimizer's state;
- gradients: a buffer for each batch from its first backward to the end of its STEP; these buffers are kept, too. One
  more buffer exists from the start of a HOLD to the end of its PREDICT, and a copy of the gradients of tied embeddings
  from the posting of their REDUCE_PARTIAL_EMBED to the end of the PREDICT;
- transfers: received tensors from the posting of the receive to the start of the computation that uses them, and sent
  tensors until their arrival;
- optimizer: the state, which exists from the beginning.

With weights on the host, only the device's memory counts: weights of each stage from the start of a FETCH to its FREE,
gradients of each stage from its first backward of a batch to the end of its STORE_GRAD, and no optimizer state.
"""

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron.pipeline.program.instruction import BEGINS_BACKWARD, BUSY, COMPUTATIONS, ENDS_BACKWARD, WORDS, Kind
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.simulate.costs import PerStage, spread
from megatron.pipeline.simulate.timeline import Timeline

PARTS = ("optimizer", "weights", "gradients", "activations", "deferred", "transfers")
_Event = tuple[float, float]  # time, change in bytes


@dataclass(frozen=True, kw_only=True)
class MemorySizes:
    """Sizes in bytes; one number for all stages (or edges), or a sequence with one for each.

    Attributes:
        activations: the saved activations of one microbatch at a stage.
        deferred: the tensors that a stage holds of one microbatch between the halves of a split backward; None: its
            activations.
        weights: one version of a stage's weights.
        gradients: one buffer of a stage's gradients.
        tied_gradients: the part of this buffer for tied embeddings, at the first and the last stage.
        optimizer: a stage's optimizer state.
        transfers: an activation or its gradient, per edge (as in `Costs`).
    """

    activations: PerStage = 0.0
    deferred: PerStage | None = None
    weights: PerStage = 0.0
    gradients: PerStage = 0.0
    tied_gradients: PerStage = 0.0
    optimizer: PerStage = 0.0
    transfers: PerStage = 0.0


@dataclass(frozen=True)
class MemoryCurve:
    """The bytes that a rank holds over time: `parts[name][i]` from `times[i]` on, for each name in `PARTS`.

    Times ascend. `deferred` is present only if its size is given.
    """

    times: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    @property
    def peak(self) -> float:
        """The largest number of bytes that are held at once."""
        return max(self.total)

    @property
    def at_peak(self) -> tuple[float, dict[str, float]]:
        """The first time of the peak, and the bytes of each part at that time."""
        total = self.total
        index = total.index(max(total))
        return self.times[index], {name: values[index] for name, values in self.parts.items()}


def memory_curves(timeline: Timeline, sizes: MemorySizes, weights: WeightPolicy) -> tuple[MemoryCurve, ...]:
    """The memory curve of each rank, from the start of the timeline. `weights`: the policy of the executed program.

    Raises:
        ValueError: for sizes of another length, and for negative or non-finite sizes.
    """
    num_stages = timeline.num_stages
    counts = dict.fromkeys((*PARTS, "tied_gradients"), num_stages) | {"transfers": len(timeline.graph.edges)}
    given = {name: value for name in counts if (value := getattr(sizes, name)) is not None}
    by_stage = {name: spread(name, value, counts[name]) for name, value in given.items()}
    start = timeline.start  # computed once, since it reads all spans
    return tuple(_RankEvents(timeline, start, rank, by_stage, weights).curve() for rank in range(timeline.num_ranks))


class _RankEvents:
    """The events of one rank that take and free memory."""

    def __init__(
        self, timeline: Timeline, start: float, rank: int, sizes: dict[str, list[float]], weights: WeightPolicy
    ) -> None:
        self.timeline, self.start, self.sizes, self.rule = timeline, start, sizes, weights
        self.stages = timeline.stages_of(rank)
        self.spans = list(zip(timeline.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True))

    def curve(self) -> MemoryCurve:
        if any(each.kind is Kind.FETCH for each, _, _ in self.spans):
            staying = {"optimizer": [(self.start, 0.0)], "weights": self._resident(), "gradients": self._passing()}
        else:
            staying = {
                "optimizer": [(self.start, self._of_rank("optimizer")), *self._kept_state()],
                "weights": self._one_version() if self.rule.refreshes else self._kept("weights", self._versions()),
                "gradients": [*self._kept("gradients", self._open_batches()), *self._held_gradients()],
            }
        events = staying | {
            "activations": list(self._activations()),
            "deferred": list(self._deferred()) if "deferred" in self.sizes else [],
            "transfers": list(self._transfers()),
        }
        times = sorted({time for part in events.values() for time, _ in part})
        parts = {}
        for name in PARTS:
            if name == "deferred" and name not in self.sizes:
                continue
            changes = dict.fromkeys(times, 0.0)  # at the same time, freed memory makes room for new memory
            for time, change in events[name]:
                changes[time] += change
            parts[name] = tuple(accumulate(changes.values()))
        return MemoryCurve(tuple(times), parts)

    def _of_rank(self, name: str) -> float:
        return sum(self.sizes[name][stage] for stage in self.stages)

    def _kept(self, name: str, needed: Iterator[tuple[float, int]]) -> list[_Event]:
        """The events of buffers that are added when more are needed, and then kept. `needed`: (time, number)."""
        events, count = [], 0
        for time, number in needed:
            if number > count:
                events.append((time, (number - count) * self._of_rank(name)))
                count = number
        return events

    def _kept_state(self) -> list[_Event]:
        """The event of the copy of weights and optimizer state that optimistic steps keep, from the first step on."""
        if not any(each.kind is Kind.VALIDATE for each, _, _ in self.spans):
            return []
        first = next(start for each, start, _ in self.spans if each.kind is Kind.STEP)
        return [(first, self._of_rank("optimizer") + self._of_rank("weights"))]

    def _one_version(self) -> list[_Event]:
        """The weights of stages with one version each; a stage with a forward ahead of its version has an extra set."""
        ahead = {each.stage for each, _, _ in self.spans if each.ahead}
        sizes = self.sizes["weights"]
        return [(self.start, sum(sizes[stage] * (1 + (stage in ahead)) for stage in self.stages))]

    def _versions(self) -> Iterator[tuple[float, int]]:
        """Yield (time, number of buffers needed) at the start and whenever a version is made."""
        entered = self.rule.entry_versions(self.timeline.first_batch)
        yield self.start, len(entered)
        last_use = dict.fromkeys(entered, -math.inf)
        for each, _, end in self.spans:
            if each.kind in COMPUTATIONS and each.version is not None:
                last_use[each.version] = end
        known, older = deque(sorted(last_use)), []
        for each, time, _ in self.spans:
            if each.kind is self.rule.maker:
                while known and known[0] < each.version:
                    older.append(known.popleft())
                if self.rule.updates_alone:
                    older = [version for version in older if last_use[version] > time]
                    yield time, 1 + len(older)
                else:
                    most = self.rule.max_live_versions(self.stages[0], len(self.sizes["weights"]))
                    yield time, min(1 + len(older), most)

    def _open_batches(self) -> Iterator[tuple[float, int]]:
        """Yield (time, number of batches with gradients that await their STEP or VALIDATE) as each batch joins them."""
        borders, first = self.timeline.batch_borders(), self.timeline.first_batch
        begins: dict[int, float] = {}
        ends = {each.version - 1: end for each, _, end in self.spans if each.kind.row.frees_gradients}
        for each, start, _ in self.spans:
            if each.kind in BEGINS_BACKWARD:
                begins.setdefault(first + bisect_right(borders, each.microbatch) - 1, start)
        if not ends:  # a program that does not update
            begins = dict([min(begins.items(), key=lambda each: each[1])]) if begins else {}
        over = sorted(ends[batch] for batch in begins if batch in ends)
        for begun, start in enumerate(sorted(begins.values()), start=1):
            yield start, begun - bisect_right(over, start)

    def _held_gradients(self) -> Iterator[_Event]:
        """Yield the events of gradient copies, which exist until the end of the PREDICT that reads them."""
        held, now = 0.0, self.start
        for each, start, end in self.spans:
            word, is_busy = each.kind.row, each.kind in BUSY
            if word.is_prediction:
                yield end, -held
                held = 0.0
            elif word.keeps:
                size = self._of_rank(word.keeps)
                yield start if is_busy else now, size  # otherwise the time at which it is posted
                held += size
            if is_busy:
                now = end

    def _resident(self) -> list[_Event]:
        """The events of weights that come to the device and leave it."""
        sizes = self.sizes["weights"]
        come = [(start, sizes[each.stage]) for each, start, _ in self.spans if each.kind is Kind.FETCH]
        return come + [(end, -sizes[each.stage]) for each, _, end in self.spans if each.kind is Kind.FREE]

    def _passing(self) -> list[_Event]:
        """The events of the gradients of stages, whose buffers are free again when they are on the host."""
        sizes, events = self.sizes["gradients"], []
        begun: set[int] = set()
        for each, start, end in self.spans:
            if each.kind in ENDS_BACKWARD and each.stage not in begun:
                begun.add(each.stage)
                events.append((start, sizes[each.stage]))
            elif each.kind is Kind.STORE_GRAD:
                begun.discard(each.stage)
                events.append((end, -sizes[each.stage]))
        return events

    def _activations(self) -> Iterator[_Event]:
        """Yield the events of activations; if the deferred size is given, I frees the activations, and not W."""
        sizes, defers = self.sizes["activations"], "deferred" in self.sizes
        for each, start, end in self.spans:
            word = WORDS[each.kind]
            saved = -max(word.deferred, 0) if word.deferred and defers else word.saved
            if saved and not self.timeline.graph.is_forward_only(each.stage):
                stage = self.timeline.pairs.of_stage(each.stage) if word.of_pair else each.stage
                yield start if saved > 0 else end, saved * sizes[stage]

    def _deferred(self) -> Iterator[_Event]:
        for each, _, end in self.spans:
            if change := WORDS[each.kind].deferred:
                yield end, change * self.sizes["deferred"][each.stage]

    def _transfers(self) -> Iterator[_Event]:
        sizes, posted, now = self.sizes["transfers"], Counter(), self.start
        graph = self.timeline.graph
        for each, start, end in self.spans:
            word, key = WORDS[each.kind], (each.stage, each.microbatch)
            if word.sends or word.receives:
                size = sizes[graph.edge_between(each.stage, graph.peer_of(each))]
                yield now, size
                if word.sends:
                    yield max(now, end), -size
                else:
                    posted[word.receives, key] += size
            elif word.needs and (size := posted.pop((word.needs, key), None)) is not None:
                yield start, -size
            if each.kind in BUSY:
                now = end
