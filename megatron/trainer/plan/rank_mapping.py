"""Which process becomes which rank: `--rank-mapping`, applied before the process group forms.

The process with physical rank 0 reads the files and decides for all (`megatron.pipeline.start_up.rank_exchange`). Then
each process rewrites its RANK; LOCAL_RANK, and with it the device, stays. The store stays where it is, with torchrun's
agent or the process of physical rank 0, wherever logical rank 0 goes.

Where the pipeline changes while it trains, processes keep these ranks, and `pipelines_in_a_row` decides anew what they
stand for: whether the ranks of a pipeline stand in a row or the replicas of a stage.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from torch.distributed import Store

from megatron.documents import counted
from megatron.pipeline.placement.cost import (
    count_crossing,
    describe_crossing,
    describe_need,
    fits_under_forward,
    pair_transfers,
    placement_cost,
)
from megatron.pipeline.placement.mapping import Degrees, Mapping, load_mapping, pair_adjacent, standard
from megatron.pipeline.placement.optimize import optimized
from megatron.pipeline.placement.topology import (
    Bandwidth,
    JobSlots,
    Node,
    Process,
    Topology,
    find_slots,
    load_topology,
    this_process,
)
from megatron.pipeline.placement.traffic import Traffic, count_transfers
from megatron.pipeline.start_up.rank_exchange import exchange_ranks
from megatron.planner.time.traffic import CutModel
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    assumed_vocabulary,
    choice_of,
    num_replicas,
    padded_vocabulary,
)
from megatron.trainer.plan import from_flags

_NOTHING_BUT_THE_NETWORK = Bandwidth(within_node=1e12, between_nodes=1.0)
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RankAssignment:
    """This process's rank, the rank of the process that hosts the store without torchrun, and lines for the log."""

    rank: int
    store_host: int
    lines: tuple[str, ...] = ()


def assign_rank(args: TrainConfig, store: Store, *, rank: int, world_size: int, timeout: timedelta) -> RankAssignment:
    """Find this process's logical rank and write it to RANK. Collective over the job's `store`.

    Where the flags ask for nothing, nothing is exchanged and ranks stay as the launcher gave them.

    Raises:
        SameEverywhere: a file, the hosts or the mapping is wrong.
        OnThisRank: another process is gone.
    """
    if args.rank_mapping == "standard" and args.rank_topology is None:
        return RankAssignment(rank, 0, tuple(_advice_without_hosts(args)))
    decision = exchange_ranks(
        store, this_process(), partial(decide, args), rank=rank, world_size=world_size, timeout=timeout
    )
    os.environ["RANK"] = str(decision.ranks[rank])
    return RankAssignment(decision.ranks[rank], decision.ranks[0], decision.lines)


def decide(args: TrainConfig, processes: Sequence[Process]) -> tuple[list[int], list[str]]:
    """Logical rank by physical rank, and lines for the log. Raises ValueError."""
    topology = load_topology(args.rank_topology) if args.rank_topology else None
    slots = find_slots(processes, topology)
    if topology is not None:
        topology = topology.restricted(dict(slots.nodes))
    degrees = degrees_of(args)
    traffic = None if topology is None else estimated_traffic(args)
    mapping = _mapping(args, degrees, slots, topology, traffic)
    lines = _describe(args, mapping, degrees, slots)
    if topology is not None:
        seconds = placement_cost(mapping, degrees, traffic, topology).total_seconds
        usual = placement_cost(standard(degrees), degrees, traffic, topology).total_seconds
        lines[0] += f"; an iteration's transfers take {seconds:.4g} s in sum (standard: {usual:.4g} s)"
        if args.schedule.balance:
            lines += _judge_bandwidth(args, mapping, degrees, topology)
    return list(slots.logical_ranks(mapping)), lines


def degrees_of(args: TrainConfig) -> Degrees:
    """The degrees of the job as it is arranged now."""
    return Degrees(
        tensor=args.tensor_model_parallel_size, pipeline=args.pipeline_model_parallel_size,
        data=num_replicas(args),
        pipelines_in_a_row=args.arrangement is not None and args.arrangement.pipelines_in_a_row,
    )  # fmt: skip


def evictors(args: TrainConfig) -> tuple[int, ...]:
    """The ranks of a pipeline that move activations to their pair in a batch of the largest size."""
    return args.schedule.evicting_ranks((max(args.batch_sizes.all_num_microbatches()),))


def _mapping(
    args: TrainConfig,
    degrees: Degrees,
    slots: JobSlots,
    topology: Topology | None,
    traffic: Traffic | None,
) -> Mapping:
    if args.rank_mapping == "standard":
        return slots.process_of_slot  # the launcher's ranks, whatever their order over the hosts
    if args.rank_mapping == "pair-adjacent":
        return pair_adjacent(degrees)
    if args.rank_mapping == "optimized":
        assert topology is not None and traffic is not None, "the rules refuse it"
        return optimized(degrees, traffic, topology)
    return load_mapping(args.rank_mapping, degrees.world_size)


def estimated_traffic(args: TrainConfig) -> Traffic:
    """What an iteration of the largest batch sends."""
    counts = count_transfers(args.schedule, max(args.batch_sizes.all_num_microbatches()))
    return cut_model(args).traffic(counts, gradient_bytes=from_flags.training_state(args).gradient_bytes)


def cut_model(args: TrainConfig) -> CutModel:
    """The job's model in its stages; where flags deal out layers unevenly, each stage has the mean."""
    schedule, frozen, rows = args.schedule, args.frozen_stages, args.padded_vocab_size
    if rows is None and args.architecture != "vit":  # tokenizers are read after the group has formed
        rows = padded_vocabulary(args, assumed_vocabulary(args))
    return CutModel(
        model=from_flags.architecture(replace(args, padded_vocab_size=rows or 0)),
        setting=from_flags.activation_setting(args),
        schedule=schedule,
        layers=frozen.layers if frozen else (args.num_layers / schedule.num_stages,) * schedule.num_stages,
    )


def pipelines_in_a_row(args: TrainConfig, processes: Sequence[Process]) -> bool:
    """Whether transfers take less if the ranks of each pipeline stand in a row, and not the replicas of each stage.

    Without `--rank-topology`: whether fewer bytes cross a node.

    Args:
        args: of a job that is arranged as it is to go on.
        processes: by rank.
    """
    topology = load_topology(args.rank_topology) if args.rank_topology else None
    slots = find_slots(processes, topology)
    if topology is None:
        nodes = tuple(Node(name=name, gpus=count) for name, count in slots.nodes)
        topology = Topology(nodes=nodes, bandwidth=_NOTHING_BUT_THE_NETWORK)
    else:
        topology = topology.restricted(dict(slots.nodes))
    traffic = estimated_traffic(args)
    replicas, pipelines = (
        placement_cost(
            slots.process_of_slot, replace(degrees_of(args), pipelines_in_a_row=each), traffic, topology
        ).total_seconds
        for each in (False, True)
    )
    return pipelines < replicas * (1 - _ROUNDING)


def _describe(args: TrainConfig, mapping: Mapping, degrees: Degrees, slots: JobSlots) -> list[str]:
    first = f"rank mapping {args.rank_mapping} on {counted(len(slots.nodes), 'node')}"
    if args.schedule.balance:
        moving = evictors(args)
        lines = [f"{first}: {describe_crossing(mapping, degrees, slots.node_sizes, moving)}"]
        if args.rank_topology is None and count_crossing(mapping, degrees, slots.node_sizes, moving):
            num_bytes = max(cut_model(args).moved_bytes[rank] for rank in moving)
            lines.append(
                f"warning: pairs that cross a node move {num_bytes / 1e9:.3g} GB for each microbatch; give "
                "--rank-topology with teraflops_per_gpu to see whether the network is fast enough"
            )
        return lines
    if args.rank_mapping == "pair-adjacent":
        return [
            first,
            f"note: --rank-mapping pair-adjacent brings pairs together, between which "
            f"{choice_of(args).flag} moves no activations",
        ]
    return [first]


def _judge_bandwidth(args: TrainConfig, mapping: Mapping, degrees: Degrees, topology: Topology) -> list[str]:
    cut = cut_model(args)
    transfers = pair_transfers(mapping, degrees, topology, cut.moved_bytes, evictors(args))
    if not transfers:
        return []
    forward = None
    if topology.teraflops_per_gpu is not None:
        forward = cut.forward_seconds(teraflops=topology.teraflops_per_gpu)
    is_late = forward is not None and not fits_under_forward(transfers, forward)
    text = describe_need(transfers, forward_seconds=forward)
    if is_late:
        return [f"warning: compute will wait for pairs: {text}"]
    return [f"pairs: {text}"]


def _advice_without_hosts(args: TrainConfig) -> list[str]:
    """What the launcher's environment alone shows about pairs."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not evictors(args) or not local.isdigit() or int(local) >= args.world_size:
        return []
    if args.tensor_model_parallel_size >= int(local):
        return [
            f"warning: tensor parallel size {args.tensor_model_parallel_size} fills a node of {local} GPUs, so all "
            "pairs cross nodes; give --rank-topology to see whether the network is fast enough"
        ]
    return [
        "note: under --rank-mapping standard pairs lie on different nodes where a pipeline spans several; "
        "--rank-mapping pair-adjacent keeps them together"
    ]
