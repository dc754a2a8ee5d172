"""Machines and models that several tests use."""

from collections.abc import Sequence

from megatron.pipeline.placement.mapping import Degrees
from megatron.pipeline.placement.topology import Bandwidth, Node, Topology
from megatron.pipeline.placement.traffic import Traffic, count_transfers
from megatron.pipeline.schedules import Schedule
from megatron.planner import ActivationSetting, Architecture, Recompute
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.traffic import CutModel


def machine(
    *gpus: int, within_node: float = 300.0, between_nodes: float = 100.0, teraflops: float | None = None
) -> Topology:
    """Nodes node0, node1, ... with these numbers of GPUs; by default those of the BPipe paper (section 4.1)."""
    return Topology(
        nodes=tuple(Node(name=f"node{index}", gpus=count) for index, count in enumerate(gpus)),
        bandwidth=Bandwidth(within_node=within_node, between_nodes=between_nodes),
        teraflops_per_gpu=teraflops,
    )


def gpt3_96b(
    *,
    tensor: int,
    pipeline: int,
    micro_batch_size: int,
    num_virtual_stages: int = 1,
    schedule: str = "bpipe",
    **choices: object,
) -> CutModel:
    """GPT-3 96B of the BPipe paper, Table 1, with the attention recomputed."""
    num_stages = pipeline * num_virtual_stages
    return CutModel(
        model=Architecture.gpt3(
            num_layers=80, hidden_size=9984, num_attention_heads=104, sequence_length=2048, vocabulary_size=51200
        ),
        setting=ActivationSetting(
            tensor=tensor, micro_batch_size=micro_batch_size, sequence_parallel=True,
            recompute=Recompute.of(RecomputeScope.ATTENTION),
        ),
        schedule=Schedule.preset(schedule, num_stages=num_stages, num_virtual_stages=num_virtual_stages, **choices),
        layers=(80 / num_stages,) * num_stages,
    )  # fmt: skip


def traffic_of(degrees: Degrees, *, num_microbatches: int = 32, **choices: object) -> Traffic:
    """Traffic of GPT-3 96B."""
    cut = gpt3_96b(tensor=degrees.tensor, pipeline=degrees.pipeline, micro_batch_size=1, **choices)
    return cut.traffic(count_transfers(cut.schedule, num_microbatches))


def stages(mapping: Sequence[int], degrees: Degrees) -> list[int]:
    """The stage in each slot."""
    return [degrees.coordinates(rank).stage for rank in mapping]
