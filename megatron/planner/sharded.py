"""Weights, gradients and optimizer state split over replicas (FSDP, ZeRO-2 and 3): time and memory without a pipeline.

Other systems train this way; this project's trainer does not. Times come from shapes and a data sheet. A GPU has two
lanes, each of which runs its tasks in order: one computes, the other gathers and reduces. A task starts when the
previous task of its lane and all tasks that it waits for are done. Tasks are listed in the order in which the software
issues them:

    root             embedding, final norm and head together, gathered before the first layer and kept to the end
    forward          a layer is gathered while the one before it is computed, and released after its forward
    backward         the same from the last layer on; then its gradients are summed and scattered while the layer before
                     it is computed, one layer at a time
    the end          the gradients of the root are reduced, and no computation hides this

With stage 2, weights are gathered for the first forward of a batch, or of each microbatch, and kept; gradients go as
above. Matrix products share the processor with a collective that runs beside them: they lose `contention` of its time,
or of their own time if that is less. A microbatch is issued behind the one before. From the third on, each microbatch
takes as long as the third, so a batch of many is extrapolated from batches of two and three.

The memory of a GPU:

    shards           one replica's part of: masters and moments in FP32, gradients in the type in which they are
                     reduced, and the weights that the software keeps in the type of products
    gathered         embedding, norm and head, and two layers: the one that is computed and the next one, which is there
                     twice if weights are copied out of a buffer; with stage 2 all weights, one layer twice likewise,
                     and their copies in FP8
    gradients        of embedding and head, and of two layers: one that is computed, in the type of products, and one
                     that is reduced
    activations      of one microbatch, as without a pipeline

Software that gathers each matrix by itself has the largest matrix in place of a layer, and as many live parameters as
DeepSpeed allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron.planner.job.configuration import Configuration, Sharding
from megatron.planner.job.software import ShardingRuntime, Software
from megatron.planner.memory.activations import Activations
from megatron.planner.memory.architecture import FP32, Architecture
from megatron.planner.memory.memory import MemoryParts, RankMemory
from megatron.planner.memory.parameters import (
    FP8_COPY_BYTES,
    largest_parameter,
    layer_parameters,
    matrix_parameters,
    stage_parameters,
)
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.iteration import CostModel, IterationTime
from megatron.planner.time.links import Ring


class GpuLane(Enum):
    COMPUTE = "compute"
    NETWORK = "network"


@dataclass(frozen=True)
class Task:
    """A task of a lane. `after`: the indices of the tasks that it waits for, which come before it in the list."""

    lane: GpuLane
    name: str
    seconds: float
    after: tuple[int, ...] = ()


def ends(tasks: Sequence[Task]) -> list[float]:
    """The second at which each task ends, if the first starts at 0."""
    found: list[float] = []
    free = dict.fromkeys(GpuLane, 0.0)
    for task in tasks:
        start = free[task.lane]
        for other in task.after:
            start = max(start, found[other])
        free[task.lane] = start + task.seconds
        found.append(free[task.lane])
    return found


_FEW = 3


class Seconds(NamedTuple):
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class ShardedCosts:
    """Seconds of one microbatch.

    Attributes:
        embedding, layer, head: computation of the embedding, a layer and the head.
        gather: the gather of a layer's weights for its forward. `gather_again`: the gather for its backward, which
            happens `times_again` times.
        reduce: the reduction of a layer's gradients.
        host: the work of the host before each gather and reduction of a layer, while the device waits.
        root_gather, root_reduce: gather and reduction of embedding and head together.
        num_layers: layers, all alike.
        contention: as in `Constants`.
        regathers: weights are released after a forward (stage 3); else they are kept for the backward.
        keeps_batch: weights that are kept for the backward are also kept for the following microbatches.
        keeps_last: the last layer is not released, since it is needed again at once.
        step: the step of the optimizer, once a batch, with the casts of weights that stay gathered.
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
        """Seconds of forward and backward of a microbatch, without collectives."""
        ways = zip(self.embedding, self.layer, self.head, strict=True)
        return Seconds(*(first + self.num_layers * middle + last for first, middle, last in ways))

    @property
    def busy(self) -> float:
        """Seconds of forward and backward together."""
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
    """Lists the tasks of a batch. Layers are counted from 1 on."""

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
            if following:  # its memory is free when the previous layer is done
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
            reduced.append(self._add(GpuLane.NETWORK, f"reduce layer {layer}", costs.reduce + costs.host, (previous,)))
        previous = self._compute("backward embedding", costs.embedding.backward, costs.reduce, previous)
        self._add(GpuLane.NETWORK, "reduce root", costs.root_reduce, (previous,))

    def _compute(self, name: str, seconds: float, beside: float, *after: int | None, waits: float = 0.0) -> int:
        """Add a computation. `beside`: seconds of the collectives that run meanwhile. `waits`: seconds of the host's
        work before it."""
        lost = self.costs.contention * min(beside, seconds)
        places = tuple(each for each in after if each is not None)
        return self._add(GpuLane.COMPUTE, name, seconds + lost + waits, places)

    def _gather(self, what: str, seconds: float, after: tuple[int, ...], *, times: int = 1) -> int:
        return self._add(GpuLane.NETWORK, f"gather {what}", times * (seconds + self.costs.host), after)

    def _add(self, lane: GpuLane, name: str, seconds: float, after: tuple[int, ...]) -> int:
        self.found.append(Task(lane, name, seconds, after))
        return len(self.found) - 1


_MATRICES = 4  # of a layer: queries, keys and values in one, the projection, and those of the MLP
_MATRICES_OF_ROOT = 2


def sharded_time(cost_model: CostModel, configuration: Configuration, *, is_slowed: bool = False) -> IterationTime:
    """The time of an iteration whose weights are split over replicas (FSDP, ZeRO).

    `is_slowed`: GPUs are short of memory (`Verdict.slowed`). Raises ValueError unless the cost model predicts from
    first principles: a profile has no times of gathers of weights.
    """
    costs = sharded_costs(cost_model, configuration, is_slowed=is_slowed)
    m = configuration.num_microbatches
    seconds, busy = batch_seconds(costs, m), m * costs.busy + costs.step
    return IterationTime(seconds=seconds, bubble=max(0.0, 1 - busy / seconds))


def sharded_costs(cost_model: CostModel, configuration: Configuration, *, is_slowed: bool = False) -> ShardedCosts:
    """The seconds of the tasks of a microbatch. Raises as `sharded_time`."""
    if not isinstance(cost_model, FirstPrinciples):
        raise ValueError(
            "a profile holds no gathers of weights, which split weights need; predict from first principles"
        )
    sharding, software, model = configuration.sharding, cost_model.software, cost_model.model
    assert sharding is not None
    runtime, element = software.sharding, software.element_bytes
    of_layer = layer_parameters(model, configuration.tensor)
    (total,) = stage_parameters(model, configuration.tensor, (model.num_layers,))
    root, own = total - model.num_layers * of_layer, total / sharding.shards
    network = _Network(cost_model, configuration, sharding)
    kept = cost_model.pressed_efficiency if is_slowed else 1.0
    embedding, layer, head = (Seconds(*(way / kept for way in each)) for each in cost_model.pieces(configuration))
    times = 2 if runtime.gathers_to_recompute and configuration.recompute is RecomputeScope.LAYER else 1
    regathers = sharding.stage == 3
    copies = cost_model.moved(2 * element * of_layer) if runtime.copies and regathers else 0.0
    state, matrices = software.training_state(configuration), matrix_parameters(model, configuration.tensor, 1)
    casts = cost_model.moved((element + FP8_COPY_BYTES) * matrices) if software.fp8 else 0.0
    if software.fp8 and state.fp8_weights:  # shards are cast once a batch; gathered weights are transposed
        in_forward, in_step = copies, casts * model.num_layers / sharding.shards
        in_backward = times * (copies + cost_model.moved(FP8_COPY_BYTES * matrices)) * regathers
    else:  # gathered weights are cast: for each use, for each forward, or once a batch
        in_forward = copies + casts * (regathers or not runtime.keeps_batch)
        in_backward = times * (copies + casts) * regathers
        in_step = casts * model.num_layers * (not regathers and runtime.keeps_batch)
    written = element if runtime.keeps_shards else 0
    return ShardedCosts(
        embedding=embedding,
        layer=Seconds(layer.forward + in_forward, layer.backward + in_backward),
        head=head,
        gather=network.gather(state.gathered(of_layer, matrices if software.fp8 else 0), _MATRICES),
        times_again=times,
        reduce=network.reduce(of_layer * software.gradient_bytes, _MATRICES),
        host=network.host_seconds,
        root_gather=network.gather(root * element, _MATRICES_OF_ROOT),
        root_reduce=network.reduce(root * software.gradient_bytes, _MATRICES_OF_ROOT),
        num_layers=model.num_layers,
        contention=cost_model.constants.contention,
        regathers=regathers,
        keeps_batch=runtime.keeps_batch,
        keeps_last=runtime.keeps_last,
        # Adam reads and writes master and moments; the norm and the step read gradients; the step writes weights.
        step=in_step + cost_model.moved(own * (6 * 4 + 2 * software.gradient_bytes + written)),
    )


class _Network:
    """Seconds of collectives. `matrices`: the number of matrices that are gathered or reduced."""

    def __init__(self, cost_model: FirstPrinciples, configuration: Configuration, sharding: Sharding) -> None:
        shards, data = sharding.shards, configuration.data
        self._runtime, self._launch = cost_model.software.sharding, cost_model.constants.launch
        self._shards: Ring = cost_model.ring(configuration, range(shards))
        self._copies: Ring = cost_model.ring(configuration, range(0, data, shards))

    def gather(self, num_bytes: float, matrices: int) -> float:
        return self._ring(self._shards, num_bytes, matrices)

    def reduce(self, num_bytes: float, matrices: int) -> float:
        """Sum and scatter over the shards; then over the copies of each shard, and spread the sum there."""
        over_copies = self._ring(self._copies, num_bytes / self._shards.size, matrices)
        return self.gather(num_bytes, matrices) + 2 * over_copies

    @property
    def host_seconds(self) -> float:
        """Seconds in which the host cuts the buffer of a gather into parts, while the device waits."""
        return _MATRICES * self._shards.size * self._launch if self._runtime.by_parts else 0.0

    def _ring(self, ring: Ring, num_bytes: float, matrices: int) -> float:
        return ring.seconds(num_bytes, collectives=matrices if self._runtime.by_matrix else 1)


_MOMENTS = 2
_MOST_LIVE = 1_000_000_000
_REDUCED_TOGETHER = 500_000_000
"""DeepSpeed's `stage3_max_live_parameters` and `reduce_bucket_size`, by default; a larger parameter is alone."""


def sharded_memory(shape: Architecture, software: Software, configuration: Configuration) -> tuple[RankMemory, ...]:
    """The memory of one GPU, as a tuple with one entry: all GPUs need the same."""
    sharding, runtime = configuration.sharding, software.sharding
    assert sharding is not None
    setting = software.activation_setting(configuration)
    activations, tensor, layers = Activations(shape, setting), configuration.tensor, shape.num_layers
    (total,) = stage_parameters(shape, tensor, (layers,))
    of_layer = layer_parameters(shape, tensor)
    root, own, ends = total - layers * of_layer, total / sharding.shards, {"is_first": True, "is_last": True}
    element, gradient = software.element_bytes, software.gradient_bytes
    copies = FP32 if gradient < FP32 else 0  # of gradients: the optimizer steps with FP32 copies
    matrices = matrix_parameters(shape, tensor, layers) if software.fp8 else 0
    state = software.training_state(configuration)
    kept = state.gathered(total, matrices) / sharding.shards if runtime.keeps_shards and element < FP32 else 0.0
    stays = sharding.stage == 2
    casts = state.fp8_copies(matrices) if stays else 0.0
    gathered = _gathered(shape, tensor, root, of_layer, runtime, stays=stays)
    saved = activations.saved(layers, **ends)
    parts = MemoryParts(
        weights=kept + element * gathered + casts,
        gradients=gradient * own + _unsharded(shape, tensor, root, of_layer, runtime, element, gradient),
        optimizer=FP32 * (1 + _MOMENTS) * own,
        step=copies * own,
        activations=saved,
        workspace=activations.workspace(layers, **ends),
        transfers=0.0,
    )
    return (
        RankMemory(
            rank=0, stages=(0,), layers=(layers,), num_parameters=total, saved_microbatches=1,
            bytes_per_microbatch=saved, parts=parts,
        ),
    )  # fmt: skip


def _gathered(
    shape: Architecture, tensor: int, root: int, of_layer: int, runtime: ShardingRuntime, *, stays: bool
) -> float:
    """The number of parameters that are gathered at once: all, if they stay gathered. If they are copied out of a
    buffer, one unit counts twice."""
    total, unit = root + shape.num_layers * of_layer, of_layer
    live = root + min(2, shape.num_layers) * of_layer
    if runtime.by_matrix:
        unit = largest_parameter(shape, tensor, is_first=True, is_last=True)
        live = min(total, max(unit, _MOST_LIVE))
    return (total if stays else live) + runtime.copies * unit


def _unsharded(
    shape: Architecture, tensor: int, root: int, of_layer: int, runtime: ShardingRuntime, element: int, gradient: int
) -> float:
    """Bytes of gradients that are not scattered yet, and of a gradient that is copied to be scattered."""
    if runtime.by_matrix:
        largest = largest_parameter(shape, tensor, is_first=True, is_last=True)
        reduced = min(root + shape.num_layers * of_layer, max(largest, _REDUCED_TOGETHER))
        return gradient * (reduced + runtime.copies * largest)
    return element * root + (element + gradient) * of_layer
