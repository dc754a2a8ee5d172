"""What a rank does in a batch whose weights are split over replicas: its tasks, in the order in which they are issued.

    root             embedding, final norm and head together, gathered before the first layer and kept to the end
    forward          a layer is gathered while the one before it is computed, and released behind its forward
    backward         the same from the last layer on; then its gradients are summed and scattered while the layer before
                     it is computed, one layer at a time
    the end          the root's gradients, which nothing hides

With stage 2 weights are gathered for the first forward of a batch, or of each microbatch, and kept; gradients go as
above.

Products share the processor with a collective that runs beside them: they lose `contention` of its time, or of their
own if that is less. A microbatch is issued behind the one before, so from the second to the third on each takes as
long, and a batch of many is extrapolated from two and three.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron.planner.sharded.lanes import Lane, Task, ends

_FEW = 3


class Seconds(NamedTuple):
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class ShardedCosts:
    """Seconds of one microbatch.

    Attributes:
        embedding, layer, head: computing.
        gather: a layer's weights for its forward. `gather_again`: for its backward, `times_again` of the same.
        reduce: a layer's gradients.
        host: for each gather and reduction of a layer, what the host needs before, while the device waits.
        root_gather, root_reduce: the same of embedding and head together.
        num_layers: layers, all alike.
        contention: as in `Constants`.
        regathers: weights are released behind a forward (stage 3); else they are kept for the backward.
        keeps_batch: and then for the microbatches that follow.
        keeps_last: but for the last layer, which is needed again at once.
        step: the optimizer's, once a batch; with the casts of weights that stay gathered.
    """

    embedding: Seconds
    layer: Seconds
    head: Seconds
    gather: float
    times_again: int = 1
    reduce: float
    host: float = 0.0
    root_gather: float
    root_reduce: float
    num_layers: int
    contention: float
    regathers: bool
    keeps_batch: bool = True
    keeps_last: bool
    step: float

    @property
    def gather_again(self) -> float:
        return self.times_again * self.gather

    @property
    def computed(self) -> Seconds:
        """One microbatch, alone on its GPU."""
        ways = zip(self.embedding, self.layer, self.head, strict=True)
        return Seconds(*(first + self.num_layers * middle + last for first, middle, last in ways))

    @property
    def busy(self) -> float:
        """Of both ways."""
        return sum(self.computed)


def batch_tasks(costs: ShardedCosts, num_microbatches: int) -> list[Task]:
    """The tasks of a batch, without the step."""
    tasks = _Tasks(costs)
    for index in range(num_microbatches):
        tasks.microbatch(gathers=costs.regathers or not costs.keeps_batch or index == 0)
    return tasks.found


def batch_seconds(costs: ShardedCosts, num_microbatches: int) -> float:
    """The time of a batch, step included."""
    few = min(num_microbatches, _FEW)
    seconds = max(ends(batch_tasks(costs, few)))
    if num_microbatches > few:
        seconds += (num_microbatches - few) * (seconds - max(ends(batch_tasks(costs, few - 1))))
    return seconds + costs.step


class _Tasks:
    """Lists them. Layers are counted from 1 on."""

    def __init__(self, costs: ShardedCosts) -> None:
        self.costs, self.found = costs, []

    def microbatch(self, *, gathers: bool) -> None:
        costs, last = self.costs, self.costs.num_layers
        before = (len(self.found) - 1,) if self.found else ()
        root = self._gather("root", costs.root_gather, before) if gathers else None
        gathered = {layer: None for layer in range(1, last + 1)}
        gathered[1] = self._gather("layer 1", costs.gather, before) if gathers else None
        previous = self._compute("forward embedding", costs.embedding.forward, costs.gather * gathers, root)
        for layer in range(1, last + 1):
            following = gathers and layer < last
            if following:  # its place is free when the layer before this one is done
                gathered[layer + 1] = self._gather(f"layer {layer + 1}", costs.gather, (previous,))
            beside = costs.gather * following
            waits = costs.host * gathers
            previous = self._compute(
                f"forward {layer}", costs.layer.forward, beside, previous, gathered[layer], waits=waits
            )
        self._backward(previous, regathers=costs.regathers)

    def _backward(self, previous: int, *, regathers: bool) -> None:
        costs, last = self.costs, self.costs.num_layers
        again: dict[int, int | None] = dict.fromkeys(range(last + 1))
        if regathers and not costs.keeps_last:
            again[last] = self._gather(f"layer {last} again", costs.gather, (previous,), times=costs.times_again)
        previous = self._compute("forward head", costs.head.forward, 0.0, previous)
        previous = self._compute("backward head", costs.head.backward, 0.0, previous)
        reduced: list[int] = []
        for layer in range(last, 0, -1):
            following = regathers and layer > 1
            if following:
                again[layer - 1] = self._gather(
                    f"layer {layer - 1} again", costs.gather, (previous,), times=costs.times_again
                )
            beside = costs.gather_again * following + costs.reduce * bool(reduced)
            room = reduced[-2] if len(reduced) > 1 else None  # gradients of two layers at once
            previous = self._compute(
                f"backward {layer}", costs.layer.backward, beside, previous, again[layer], room,
                waits=costs.host * (1 + costs.times_again * regathers),
            )  # fmt: skip
            reduced.append(self._add(Lane.NETWORK, f"reduce layer {layer}", costs.reduce + costs.host, (previous,)))
        previous = self._compute("backward embedding", costs.embedding.backward, costs.reduce, previous)
        self._add(Lane.NETWORK, "reduce root", costs.root_reduce, (previous,))

    def _compute(self, name: str, seconds: float, beside: float, *after: int | None, waits: float = 0.0) -> int:
        """`beside`: seconds of the collectives that run meanwhile. `waits`: those in which the host is busy before."""
        lost = self.costs.contention * min(beside, seconds)
        places = tuple(each for each in after if each is not None)
        return self._add(Lane.COMPUTE, name, seconds + lost + waits, places)

    def _gather(self, what: str, seconds: float, after: tuple[int, ...], *, times: int = 1) -> int:
        return self._add(Lane.NETWORK, f"gather {what}", times * (seconds + self.costs.host), after)

    def _add(self, lane: Lane, name: str, seconds: float, after: tuple[int, ...]) -> int:
        self.found.append(Task(lane, name, seconds, after))
        return len(self.found) - 1
