"""Machines and models that several tests use."""

from collections.abc import Sequence

from megatron.pipeline.schedules import Schedule
from megatron.placement import (
    Bandwidth,
    Degrees,
    ModelShape,
    Node,
    RecomputeScope,
    Topology,
    Traffic,
    count_transfers,
    estimate_traffic,
)


def machine(
    *gpus: int, within_node: float = 300.0, between_nodes: float = 100.0, teraflops: float | None = None
) -> Topology:
    """Nodes node0, node1, ... with these numbers of GPUs; by default those of the BPipe paper (section 4.1)."""
    return Topology(
        nodes=tuple(Node(name=f"node{index}", gpus=count) for index, count in enumerate(gpus)),
        bandwidth=Bandwidth(within_node=within_node, between_nodes=between_nodes),
        teraflops_per_gpu=teraflops,
    )


def gpt3_96b(*, tensor: int, pipeline: int, micro_batch_size: int, num_virtual_stages: int = 1) -> ModelShape:
    """GPT-3 96B of the BPipe paper, Table 1."""
    return ModelShape(
        num_layers=80, num_attention_heads=104, hidden_size=9984, sequence_length=2048,
        micro_batch_size=micro_batch_size, pipeline=pipeline, tensor=tensor, num_virtual_stages=num_virtual_stages,
    )  # fmt: skip


def traffic_of(
    degrees: Degrees, *, num_microbatches: int = 32, schedule: str = "bpipe", num_virtual_stages: int = 1, **choices
) -> Traffic:
    """Traffic of GPT-3 96B with the attention recomputed."""
    p, v = degrees.pipeline, num_virtual_stages
    program = Schedule.preset(schedule, num_stages=p * v, num_virtual_stages=v, **choices)
    shape = gpt3_96b(tensor=degrees.tensor, pipeline=p, micro_batch_size=1, num_virtual_stages=v)
    counts = count_transfers(program, num_microbatches)
    return estimate_traffic(shape, degrees, counts, scope=RecomputeScope.ATTENTION, vocabulary_size=51200)


def stages(mapping: Sequence[int], degrees: Degrees) -> list[int]:
    """The stage in each slot."""
    return [degrees.coordinates(rank).stage for rank in mapping]
