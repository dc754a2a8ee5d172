"""The rates of links between the ranks of a job, the rates that programs reach, and the seconds of collectives.

Links. A GPU has a link to the other GPUs of its node. All GPUs of a node share the node's link to the network. A
collective over several nodes runs rings that enter and leave each node once, over all network adapters of the node. Its
rate is the node's rate, divided by the number of groups that use the link at once. A transfer between two ranks shares
the node's link with the simultaneous transfers of other ranks of the node. In an all-to-all all GPUs of a node send at
once, and each rank's data for other nodes cross the network. Fewer bytes cross if a dispatcher sends a token once to
each node, and from there once to each rank (DeepEP, HybridEP).

The numbers of replicas include the ranks that share sequences: after the tensor ranks come the context parallel ranks,
next to one another. Experts are split over ranks in the same order: etp ranks hold parts of the same experts, and ep
groups of etp ranks hold different experts. All nodes are assumed to be alike, and the ranks of the first replica stand
for all.

Rings. Each of n members sends n - 1 parts of the buffer to the next member. So a collective takes the time of (n - 1)/n
of the buffer at the slowest link, and n - 1 steps, each of which waits for the step before. With thousands of members
the steps take longer than the bytes. The latency of a step is the value with which NCCL chooses among its protocols
(src/graph/tuning.cc, `hwLatencies` of rings, summed over steps within nodes and between nodes).

Overlap, as in megatron.core's distributed data parallel. Gradients of the first pipeline rank are in buckets. A bucket
is reduced as soon as the last microbatch's backward has passed it. So the last bucket is not hidden, nor is the time by
which the reduction exceeds that backward. Other ranks have one bucket. Their backwards end earlier, and they reduce
while the first ranks still compute, as the program's order shows. Weights are gathered in the opposite order: the first
rank gathers beside its first forward, and the other ranks gather before that forward reaches them. A collective beside
matrix products takes a part of the processor from them (`Constants.contention`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron.pipeline.placement.mapping import Degrees, Mapping, inverse
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.program.lane_order import pair_of
from megatron.planner.job.devices import Device
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import FP32, ExpertDegrees
from megatron.planner.time.calibration import Constants
from megatron.planner.time.work import Work

_GIGA = 1e9


class Links:
    """The rates at which one rank sends in each kind of traffic, in bytes per second, by the data sheets.

    Args:
        degrees: the parallel degrees.
        mapping: which rank sits in which slot.
        topology: the nodes and links of the cluster.
        context: number of ranks that share sequences.
        experts: the degrees of experts (default: experts are split as other matrices).
        reached: takes the number of groups into which ranks with experts are divided, and returns the mean number of
            groups to which a token is sent, if it is sent once to each. None: a copy is sent for each expert.

    Attributes:
        tensor: rate in a collective of the tensor ranks.
        data: rate in a collective of the replicas.
        edges: by rank of a pipeline, rate to the next rank; the last rank sends to the first.
        pairs: by rank of a pipeline, rate to the rank of its pair (BPipe).
        context: rate round the ring of ranks that share sequences, or in a collective of them.
        expert: rate in an all-to-all of the ranks with different experts.
        expert_tensor: rate in a collective of ranks with parts of the same experts.
        expert_data: rate in a collective of replicas of experts.
    """

    def __init__(
        self,
        degrees: Degrees,
        mapping: Mapping,
        topology: Topology,
        *,
        context: int = 1,
        experts: ExpertDegrees | None = None,
        reached: Callable[[int], float] | None = None,
    ) -> None:
        self._topology, self._degrees, self._reached = topology, degrees, reached
        slots = inverse(mapping)
        self._nodes = [topology.node_of_slot[slot] for slot in slots]
        self._ranks_on: dict[int, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            self._ranks_on.setdefault(node, []).append(rank)
        rank, p = degrees.rank, degrees.pipeline
        self._rates: dict[tuple[int, int], float] = {}
        self.tensor = self._collective([rank(tensor=i, data=0, stage=0) for i in range(degrees.tensor)])
        self.data = self._collective([rank(tensor=0, data=i, stage=0) for i in range(degrees.data)])
        self.context = self._collective([rank(tensor=0, data=i, stage=0) for i in range(context)])
        self._share_experts(experts or ExpertDegrees(tensor=degrees.tensor))
        self.edges = [self.between(stage, (stage + 1) % p) for stage in range(p)]
        self.pairs = [self._transfer(stage, [pair_of(each, p) for each in range(p)]) for stage in range(p)]

    def between(self, source: int, target: int) -> float:
        """Return the rate from one rank of a pipeline to another, while all ranks send equally far along its ring."""
        if (source, target) not in self._rates:
            p = self._degrees.pipeline
            targets = [(rank + target - source) % p for rank in range(p)]
            self._rates[source, target] = self._transfer(source, targets)
        return self._rates[source, target]

    def among(self, replicas: range) -> float:
        """Return the rate in a collective of `replicas`, while the others run collectives in groups of that size."""
        return self._collective(self._replicas(replicas))

    def num_nodes(self, replicas: range) -> int:
        """Return the number of nodes on which `replicas` are, for one tensor rank and stage."""
        return len({self._nodes[rank] for rank in self._replicas(replicas)})

    def _replicas(self, replicas: range) -> list[int]:
        return [self._degrees.rank(tensor=0, data=index, stage=0) for index in replicas]

    @property
    def within(self) -> float:
        return self._topology.bandwidth.within_node * _GIGA

    @property
    def _between(self) -> float:
        return self._topology.bandwidth.between_nodes * _GIGA

    def _collective(self, members: Sequence[int]) -> float:
        nodes = [self._nodes[rank] for rank in members]
        if len(set(nodes)) == 1:
            return self.within
        together = nodes.count(nodes[0])  # each other group has as many ranks on the node
        return min(self.within, self._between * together / len(self._ranks_on[nodes[0]]))

    def _share_experts(self, experts: ExpertDegrees) -> None:
        """Set `expert`, `expert_tensor` and `expert_data`."""
        degrees, t, etp = self._degrees, self._degrees.tensor, experts.tensor

        def ranks(step: int, count: int) -> list[int]:
            return [degrees.rank(tensor=i * step % t, data=i * step // t, stage=0) for i in range(count)]

        apart = etp * experts.parallel
        self.expert_tensor = self._collective(ranks(1, etp))
        self.expert = self._all_to_all(ranks(etp, experts.parallel))
        self.expert_data = self._collective(ranks(apart, t * degrees.data // apart))

    def _all_to_all(self, members: Sequence[int]) -> float:
        nodes = [self._nodes[rank] for rank in members]
        count, num_nodes = len(members), len(set(nodes))
        if num_nodes == 1:
            return self.within
        share = sum(node != nodes[0] for node in nodes) / (count - 1)
        if self._reached is not None:
            sent, crossing = ((size - 1) / size * self._reached(size) for size in (count, num_nodes))
            share = crossing / sent
        return min(self.within, self._between / len(self._ranks_on[nodes[0]]) / share)

    def _transfer(self, stage: int, target: Sequence[int]) -> float:
        rank = self._degrees.rank(tensor=0, data=0, stage=stage)
        node = self._nodes[rank]
        if self._partner_node(rank, target) == node:
            return self.within
        crossing = sum(self._partner_node(other, target) != node for other in self._ranks_on[node])
        return min(self.within, self._between / crossing)

    def _partner_node(self, rank: int, target: Sequence[int]) -> int:
        at = self._degrees.coordinates(rank)
        return self._nodes[self._degrees.rank(tensor=at.tensor, data=at.data, stage=target[at.stage])]


_MICRO = 1e-6


@dataclass(frozen=True, kw_only=True)
class _Protocol:
    """A protocol of NCCL.

    Attributes:
        bandwidth: the fraction of a link's bandwidth that the protocol reaches.
        once: latency of a collective, in microseconds.
        nvlink, pcie, network: latencies of a step over each kind of link, in microseconds.
    """

    bandwidth: float
    once: float
    nvlink: float
    pcie: float
    network: float


_PROTOCOLS = (
    _Protocol(bandwidth=1.0, once=8.4, nvlink=3.4, pcie=5.7, network=14.0),  # simple
    _Protocol(bandwidth=0.92, once=14.0, nvlink=1.9, pcie=2.5, network=4.0),  # LL128
)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring of a collective's members.

    Attributes:
        size: the number of members, n.
        num_nodes: the number of nodes that the members are on.
        rate: bytes per second that are reached from one member to the next.
        has_nvlink: GPUs of a node are linked by NVLink. If not, by PCIe.
    """

    size: int
    num_nodes: int
    rate: float
    has_nvlink: bool = True

    def seconds(self, num_bytes: float, *, collectives: int = 1) -> float:
        """Return the seconds to gather a buffer of `num_bytes`, or to reduce and scatter it.

        `collectives`: the number of collectives into which the buffer is divided.
        """
        if self.size == 1 or not num_bytes:
            return 0.0
        parts = (self.size - 1) / self.size * num_bytes
        return min(parts / (self.rate * each.bandwidth) + collectives * self._steps(each) for each in _PROTOCOLS)

    def _steps(self, protocol: _Protocol) -> float:
        between = self.num_nodes - 1
        within = self.size - 1 - between
        step = protocol.nvlink if self.has_nvlink else protocol.pcie
        return _MICRO * (protocol.once + within * step + between * protocol.network)


_WIDENING = 0.5
"""The fraction of the FP32 peak that products of 16-bit numbers reach without matrix units: each number is widened."""


@dataclass(frozen=True)
class Rates:
    """The rates that training software reaches on a device, in bytes or operations per second."""

    device: Device
    software: Software
    constants: Constants

    def seconds(self, work: Work, links: Links) -> float:
        """Return the seconds of work on the device, or of the host's kernel launches if they take longer.

        If the software blocks launches, both are added.
        """
        constants = self.constants
        tensor = self.of_link(links.tensor, links, within=constants.tensor_efficiency)
        products = self._products(work.operations, work.calls) + work.attended / self._attention
        if work.fp8_operations:
            products += work.fp8_operations / (self.device.product_rate(1) * constants.product_efficiency)
        if work.unaligned:
            products += work.unaligned / (self.device.peak(FP32) * _WIDENING)
        hidden = work.overlapped / tensor
        seconds = max(products + constants.contention * hidden, hidden)
        seconds += work.traffic / self.memory + work.exchanged / tensor + self._grouped(work)
        seconds += self._shared(work, links, seconds)
        if self.software.cuda_graphs:
            return seconds
        launches = (work.kernels + work.calls + work.collectives) * constants.launch
        return seconds + launches if self.software.blocks_launches else max(seconds, launches)

    @property
    def memory(self) -> float:
        """Bytes per second that kernels reach in the GPU's memory."""
        return self.device.memory_bandwidth * _GIGA * self.constants.memory_efficiency

    @property
    def to_host(self) -> float:
        """Bytes per second that copies reach on the link to the host's memory."""
        return self.device.host_bandwidth * _GIGA * self.constants.link_efficiency

    @property
    def to_neighbours(self) -> float:
        """Bytes per second to the other GPUs of a node, by bulk transfers."""
        return self.device.link_bandwidth * _GIGA * self.constants.link_efficiency

    def of_link(self, rate: float, links: Links, *, within: float | None = None) -> float:
        """Return the bytes per second that transfers reach on a link with the given `rate`.

        Traffic between nodes is also limited by the links within nodes. `within`: the efficiency within a node
        (default: that of bulk transfers).
        """
        reached = links.within * (within or self.constants.link_efficiency)
        return min(reached, rate * self.constants.network_efficiency) if rate < links.within else reached

    @property
    def _product(self) -> float:
        return self.device.product_rate(self.software.element_bytes) * self.constants.product_efficiency

    @property
    def _attention(self) -> float:
        """Operations per second of flash attention, with kernels for this GPU or with FlashAttention-2's."""
        device = self.device
        return self._product * (
            device.older_attention_part if self.software.flash_attention_2 else device.attention_part
        )

    def _products(self, operations: float, calls: float) -> float:
        return self.products(operations, calls, self.software.element_bytes)

    def products(self, operations: float, calls: float, element_bytes: int) -> float:
        """Return the seconds of matrix products: `calls` products with `operations` in total.

        `element_bytes`: bytes of an element, 1, 2 or 4.
        """
        rate = self.device.product_rate(element_bytes) * self.constants.product_efficiency
        return operations / rate + calls * self.constants.product_overhead

    def _grouped(self, work: Work) -> float:
        """Return the seconds of the experts' products. With few tokens they take as long as reading the matrices."""
        if not work.grouped_operations:
            return 0.0
        element_bytes = 1 if self.software.fp8 else self.software.element_bytes
        rate = self.device.product_rate(element_bytes) * self.constants.product_efficiency
        return max(work.grouped_operations / rate, work.grouped_bytes / self.memory)

    def _shared(self, work: Work, links: Links, beside: float) -> float:
        """Return the additional seconds for communication of ranks that share sequences or experts.

        A step of a ring takes as long as its transfer, or as its part of the attention's core if that is longer. The
        core then loses `contention` of the transfer's time. The last step has no transfer. Ranks wait for copies of
        tokens, or the copies overlap with the other direction of another microbatch. Both directions are assumed to
        compute for the same time.

        `beside`: seconds of all other work in this direction.
        """
        if not (work.ring or work.gathered or work.dispatched or work.spread):
            return 0.0
        constants, context = self.constants, self.of_link(links.context, links)
        core = work.ring_operations / self._attention + work.ring_calls * constants.product_overhead
        ring = work.ring / context
        waits = max(constants.contention * ring, ring - core)
        spread = self.of_link(links.expert_tensor, links, within=constants.tensor_efficiency)
        copies = work.dispatched / self.of_link(links.expert, links) + work.spread / spread
        if self.software.overlaps_experts:
            copies = max(constants.contention * copies, copies - beside)
        return waits + work.gathered / context + copies


_BUCKET = 40e6
_OF_REPLICA = 1e6
"""Parameters per bucket: the minimum, and the number per replica (DistributedDataParallel, megatron.core 0.16)."""


def num_buckets(num_parameters: int, replicas: int) -> float:
    """Return the number of gradient buckets of a stage on the first rank, at least 1.

    The number need not be whole, so that the time after the backward grows smoothly with the parameters.
    """
    return max(1.0, num_parameters / max(_BUCKET, _OF_REPLICA * replicas))


def reductions_shown(
    reduce: Sequence[float],
    backward: Sequence[float],
    buckets: Sequence[float],
    ranks: Sequence[int],
    contention: float,
) -> list[float]:
    """Return, by stage, the seconds of its reduction that follow its last backward or lengthen it.

    `ranks`: the stages' pipeline ranks.
    """
    return [
        each if rank else _shown(each, beside, each / count, contention)
        for each, beside, count, rank in zip(reduce, backward, buckets, ranks, strict=True)
    ]


def gathers_shown(
    gather: Sequence[float], forward: Sequence[float], buckets: Sequence[float], ranks: Sequence[int], contention: float
) -> list[float]:
    """Return, by stage, the seconds of its gather that precede its first forward or lengthen it.

    `ranks`: the stages' pipeline ranks.
    """
    before = accumulate(forward, initial=0.0)
    return [
        max(0.0, each - earlier) if rank else _shown(each, beside, each / count, contention)
        for each, beside, count, rank, earlier in zip(gather, forward, buckets, ranks, before, strict=False)
    ]


def _shown(seconds: float, beside: float, bucket: float, contention: float) -> float:
    alone = max(bucket, seconds - beside)
    return alone + contention * (seconds - alone)
