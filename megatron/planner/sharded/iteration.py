"""The time of an iteration whose weights are split over replicas, from shapes and a data sheet."""

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.sharding import Sharding
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.memory.parameters import FP8_COPY_BYTES, layer_parameters, matrix_parameters, stage_parameters
from megatron.planner.sharded.batch import Seconds, ShardedCosts, batch_seconds
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.iteration import IterationTime
from megatron.planner.time.model import CostModel
from megatron.planner.time.ring import Ring

_MATRICES = 4  # of a layer: queries, keys and values in one, the projection, and those of the MLP
_MATRICES_OF_ROOT = 2


def sharded_time(cost_model: CostModel, configuration: Configuration, *, is_slowed: bool = False) -> IterationTime:
    """`is_slowed`: its GPUs are short of memory (`Verdict.slowed`). Raises ValueError where the cost model knows no
    gathers of weights."""
    costs = sharded_costs(cost_model, configuration, is_slowed=is_slowed)
    m = configuration.num_microbatches
    seconds, busy = batch_seconds(costs, m), m * costs.busy + costs.step
    return IterationTime(seconds=seconds, bubble=max(0.0, 1 - busy / seconds))


def sharded_costs(cost_model: CostModel, configuration: Configuration, *, is_slowed: bool = False) -> ShardedCosts:
    """What the tasks of a microbatch take. Raises as `sharded_time`."""
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
    if software.fp8 and state.fp8_weights:  # shards are cast, once a batch; what is gathered is transposed
        in_forward, in_step = copies, casts * model.num_layers / sharding.shards
        in_backward = times * (copies + cost_model.moved(FP8_COPY_BYTES * matrices)) * regathers
    else:  # what is gathered is cast: for each use, for each forward, or once a batch
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
    """Seconds of collectives. `matrices`: how many there are in what is gathered or reduced."""

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
        """For which the host cuts what a layer gathers into parts, while the device waits."""
        return _MATRICES * self._shards.size * self._launch if self._runtime.by_parts else 0.0

    def _ring(self, ring: Ring, num_bytes: float, matrices: int) -> float:
        return ring.seconds(num_bytes, collectives=matrices if self._runtime.by_matrix else 1)
