"""How fast bytes move between the ranks of a job, by where its mapping puts them.

A GPU has its link to the GPUs of its node; all GPUs of a node share the node's link to the network. A collective whose
members lie on several nodes goes round rings that enter and leave each node once, over all of the node's adapters, so
its speed is the node's, divided by the number of groups that use it at once. A transfer between two ranks shares the
node's link with the transfers that other ranks of the node make at the same time. Of an all-to-all each member's part
for those on other nodes crosses, while all GPUs of the node send as much.

Where a token is sent once to each node, and from there once to each rank (DeepEP, HybridEP), less of it crosses.

Replicas are numbered with the ranks that share sequences: those of context parallel ranks first, which so lie next to
one another, behind the tensor ranks. Experts are shared by ranks in that order, too: etp ranks have parts of the same,
ep times as many different ones.

Nodes are taken to be alike; the ranks of the first replica stand for all.
"""

from collections.abc import Callable, Sequence

from megatron.pipeline.placement.degrees import Degrees
from megatron.pipeline.placement.mapping import Mapping, inverse
from megatron.pipeline.placement.topology import Topology
from megatron.pipeline.program.move_order import pair_of
from megatron.planner.memory.architecture import ExpertDegrees

_GIGA = 1e9


class Links:
    """Bytes per second that one rank sends in each kind of traffic, as data sheets say.

    Attributes:
        tensor: in a collective of the tensor ranks.
        data: of the replicas.
        edges: by rank of a pipeline, to the next one; the last one's to the first.
        pairs: by rank of the pipeline, to the rank of its pair (BPipe).
        context: round the ring of ranks that share sequences, or in a collective of them.
        expert: in an all-to-all of the ranks with different experts.
        expert_tensor, expert_data: in a collective of those with parts of the same experts, and of their replicas.

    `reached`: to how many of so many groups of ranks a token is sent, where it is sent once to each; None: a copy is
    sent for each expert.
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
        """From a rank of a pipeline to another, while the others send as far along the pipeline, which is a ring."""
        if (source, target) not in self._rates:
            p = self._degrees.pipeline
            targets = [(rank + target - source) % p for rank in range(p)]
            self._rates[source, target] = self._transfer(source, targets)
        return self._rates[source, target]

    def among(self, replicas: range) -> float:
        """In a collective of these replicas, while the others of the job are in groups of as many."""
        return self._collective(self._replicas(replicas))

    def num_nodes(self, replicas: range) -> int:
        """On how many nodes these replicas lie, of one tensor rank and stage."""
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
        together = nodes.count(nodes[0])  # the other ranks of the node are in groups of as many
        return min(self.within, self._between * together / len(self._ranks_on[nodes[0]]))

    def _share_experts(self, experts: ExpertDegrees) -> None:
        """See `expert`, `expert_tensor` and `expert_data`."""
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
