"""Costs from the shapes of tensors and a data sheet, with few calibrated constants."""

from collections.abc import Sequence
from functools import lru_cache

from megatron.pipeline.costs import Costs
from megatron.placement.mapping import inverse, pair_adjacent, standard
from megatron.planner.activations import Activations
from megatron.planner.architecture import Architecture
from megatron.planner.cluster import Cluster
from megatron.planner.configuration import Configuration
from megatron.planner.parameters import stage_parameters
from megatron.planner.software import MEGATRON_CORE, Software
from megatron.planner.timing.constants import DEFAULT, Constants
from megatron.planner.timing.work import LayerWork, Work

_GIGA, _TERA = 1e9, 1e12


class FirstPrinciples:
    """A `CostModel`. See `work` for what is counted and `Constants` for what is fitted."""

    def __init__(
        self,
        model: Architecture,
        cluster: Cluster,
        software: Software = MEGATRON_CORE,
        constants: Constants = DEFAULT,
    ) -> None:
        self.model, self.cluster, self.software, self.constants = model, cluster, software, constants

    def costs(self, configuration: Configuration, layers: Sequence[int]) -> Costs:
        work = LayerWork(
            self.model, self.software, tensor=configuration.tensor, micro_batch_size=configuration.micro_batch_size,
            sequence_parallel=configuration.sequence_parallel,
        )  # fmt: skip
        link = self._tensor_link(configuration)
        layer_forward = self._seconds(work.forward(), link)
        layer_backward = self._seconds(work.backward() + work.recomputed(configuration.recompute), link)
        forward = [count * layer_forward for count in layers]
        backward = [count * layer_backward for count in layers]
        for stage, ends in ((0, work.embedding()), (len(layers) - 1, work.head())):
            forward[stage] += self._seconds(ends[0], link)
            backward[stage] += self._seconds(ends[1], link)
        boundary = self._boundary(configuration)
        rates = self._edge_rates(configuration)
        if not self.software.overlaps_transfers:
            for edge, rate in enumerate(rates):
                for stage in (edge, edge + 1):
                    forward[stage] += boundary / rate / 2
                    backward[stage] += boundary / rate / 2
        step, reduce = self._updates(configuration, layers)
        return Costs(
            forward=forward, backward=backward, step=step, reduce_grad=reduce, bandwidth=rates,
            forward_bytes=boundary if self.software.overlaps_transfers else 0.0,
            evict=self._moves(configuration, layers),
        )  # fmt: skip

    # --- seconds

    def _seconds(self, work: Work, tensor_link: float) -> float:
        constants, device = self.constants, self.cluster.device
        products = work.operations / (device.peak_teraflops * _TERA * constants.product_efficiency)
        products += work.calls * constants.product_overhead
        traffic = work.traffic / (device.memory_bandwidth * _GIGA * constants.memory_efficiency)
        hidden = work.overlapped / tensor_link
        device_seconds = max(products, hidden) + traffic + work.exchanged / tensor_link
        return max(device_seconds, (work.kernels + work.calls + work.collectives) * constants.launch)

    def _tensor_link(self, configuration: Configuration) -> float:
        """Bytes per second of one rank to the other tensor ranks."""
        if configuration.tensor <= min(node.gpus for node in self.cluster.topology.nodes):
            return self.cluster.device.link_bandwidth * _GIGA * self.constants.tensor_efficiency
        return self._network_share

    @property
    def _network_share(self) -> float:
        return self.cluster.topology.network_share(0) * _GIGA * self.constants.network_efficiency

    @property
    def _node_link(self) -> float:
        return self.cluster.device.link_bandwidth * _GIGA * self.constants.tensor_efficiency

    # --- between stages

    def _boundary(self, configuration: Configuration) -> float:
        setting = self.software.activation_setting(configuration)
        num_bytes = Activations(self.model, setting).boundary
        if self.software.splits_transfers and not setting.sequence_parallel:
            num_bytes /= configuration.tensor
        return num_bytes

    def _edge_rates(self, configuration: Configuration) -> list[float]:
        nodes = _nodes_of_stages(configuration.degrees, configuration.rank_mapping, self.cluster.topology)
        p = configuration.pipeline
        return [
            self._node_link if nodes[edge % p] == nodes[(edge + 1) % p] else self._network_share
            for edge in range(configuration.num_stages - 1)
        ]

    def _moves(self, configuration: Configuration, layers: Sequence[int]) -> list[float] | float:
        if not (configuration.balance or configuration.schedule == "bpipe"):
            return 0.0
        activations = Activations(self.model, self.software.activation_setting(configuration))
        nodes = _nodes_of_stages(configuration.degrees, configuration.rank_mapping, self.cluster.topology)
        p, last = configuration.pipeline, len(layers) - 1
        return [
            activations.saved(count, is_first=stage == 0, is_last=stage == last)
            / (self._node_link if nodes[stage % p] == nodes[p - 1 - stage % p] else self._network_share)
            for stage, count in enumerate(layers)
        ]

    # --- once an iteration

    def _updates(self, configuration: Configuration, layers: Sequence[int]) -> tuple[list[float], list[float]]:
        """The optimizer's step and the reduction over replicas, by stage."""
        d, software = configuration.data, self.software
        state = software.training_state(configuration)
        within = configuration.tensor * d <= self.cluster.topology.nodes[0].gpus
        link = self._node_link if within else self._network_share
        bandwidth = self.cluster.device.memory_bandwidth * _GIGA * self.constants.memory_efficiency
        step, reduce = [], []
        for count in stage_parameters(self.model, configuration.tensor, layers):
            own = count / d if state.distributed_optimizer else count
            # Adam reads and writes master and moments; the norm and the step read gradients, the step writes weights.
            step.append((own * (6 * 4 + 2 * state.gradient_bytes + state.weight_bytes)) / bandwidth)
            gathered = state.weight_bytes if state.distributed_optimizer else state.gradient_bytes
            sent = (d - 1) / d * count * (state.gradient_bytes + gathered)
            reduce.append(0.0 if software.overlaps_gradients else sent / link)
        return step, reduce


@lru_cache(maxsize=4096)
def _nodes_of_stages(degrees: object, mapping: str, topology: object) -> tuple[int, ...]:
    """The node of the first tensor rank and replica of each stage."""
    slots = inverse((pair_adjacent if mapping == "pair-adjacent" else standard)(degrees))
    return tuple(topology.node_of_slot[slots[degrees.rank(tensor=0, data=0, stage=s)]] for s in range(degrees.pipeline))
