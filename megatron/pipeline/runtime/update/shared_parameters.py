"""When a shared parameter moves: once for each version of its weights, and its gradient once for each batch.

Problem: a parameter that several stages use, such as an embedding that is also the head, lives in the stage that steps
it, its owner; the others get its value over an edge, and their gradients go back. With every microbatch that would be
the whole matrix, twice (131 MB for T5-3B), although its value changes only when the owner steps.

Solution: it goes along with the first microbatch whose forward at the owner uses that value, and the others take what
they got last. Each user adds up the gradients of a batch's microbatches, and they go back with the last. Which
microbatches these are follows from the weight policy, the owner's depth and the sizes of the batches, as the versions
themselves do (`weights`), so both ends know it and nothing has to be said. Forwards and backwards of a stage are in
the order of their microbatches. What moves is what the owner's forward uses. Where that is ahead of its version, by a
prediction or a provisional step, it is another value wherever it is another step; so with provisional ones it moves
up to min(m, k + 1) times for a batch of m microbatches and an owner of depth k.
"""

from __future__ import annotations

from collections import deque

from megatron.pipeline.program.edges import StageGraph
from megatron.pipeline.program.weight_policies import Ahead, WeightPolicy
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Microbatch


class SharedParameters:
    """Which microbatches take shared parameters, or their gradients, along."""

    def __init__(self, graph: StageGraph, weights: WeightPolicy) -> None:
        self._graph, self._weights = graph, weights
        deepest = max(map(graph.depth, range(graph.num_stages)))
        # Since the last drain (batch, its microbatches): those in flight, and as many that fixed their versions.
        self._batches: deque[tuple[int, range]] = deque(maxlen=2 * deepest + 2)

    def begin_batch(self, batch: int, microbatches: range) -> None:
        """The next batch of the run."""
        self._batches.append((batch, microbatches))

    def settle(self) -> None:
        """Nothing is in flight any more."""
        self._batches.clear()

    def moves_value(self, owner: int, microbatch: Microbatch) -> bool:
        """Whether this microbatch is the first with the weights that its forward has at stage `owner`."""
        if microbatch.batch == EVALUATION_BATCH:
            return microbatch.position == 0
        index = microbatch.index
        return index == self._batches[0][1].start or self._weights_of(owner, index) != self._weights_of(
            owner, index - 1
        )

    def moves_gradient(self, microbatch: Microbatch) -> bool:
        """Whether this microbatch is the last of its batch."""
        return microbatch.position == microbatch.num_microbatches - 1

    def _weights_of(self, stage: int, index: int) -> tuple[int, int]:
        """(version, how far ahead of it) of a microbatch's forward; see `weights`."""
        batch = self._batch_of(index)
        behind = max(index - self._graph.depth(stage), self._batches[0][1].start)
        version = self._weights.version_of(batch, newest=self._batch_of(behind))
        if batch == version or self._weights.ahead is None:
            return version, 0
        if self._weights.ahead is Ahead.PREDICTION:
            return version, batch - version
        return version, behind - next(microbatches.start for each, microbatches in self._batches if each == version)

    def _batch_of(self, index: int) -> int:
        return next(batch for batch, microbatches in reversed(self._batches) if index >= microbatches.start)
