"""Machines and models that several tests use."""

from collections.abc import Sequence

from megatron.placement import Bandwidth, Degrees, ModelShape, Node, RecomputeScope, Topology, Traffic, estimate_traffic


def machine(
    *gpus: int, within_node: float = 300.0, between_nodes: float = 100.0, teraflops: float | None = None
) -> Topology:
    """Nodes node0, node1, ... with these numbers of GPUs; by default those of the BPipe paper (section 4.1)."""
    return Topology(
        nodes=tuple(Node(name=f"node{index}", gpus=count) for index, count in enumerate(gpus)),
        bandwidth=Bandwidth(within_node=within_node, between_nodes=between_nodes),
        teraflops_per_gpu=teraflops,
    )


def gpt3_96b(*, tensor: int, pipeline: int, micro_batch_size: int) -> ModelShape:
    """GPT-3 96B of the BPipe paper, Table 1."""
    return ModelShape(
        num_layers=80, num_attention_heads=104, hidden_size=9984, sequence_length=2048,
        micro_batch_size=micro_batch_size, pipeline=pipeline, tensor=tensor,
    )  # fmt: skip


def traffic_of(degrees: Degrees, *, num_microbatches: int = 32, **options) -> Traffic:
    """Traffic of GPT-3 96B with the attention recomputed."""
    shape = gpt3_96b(tensor=degrees.tensor, pipeline=degrees.pipeline, micro_batch_size=1)
    options = {"scope": RecomputeScope.ATTENTION, "vocabulary_size": 51200, **options}
    return estimate_traffic(shape, degrees, num_microbatches=num_microbatches, **options)


def stages(mapping: Sequence[int], degrees: Degrees) -> list[int]:
    """The stage in each slot."""
    return [degrees.coordinates(rank).stage for rank in mapping]
