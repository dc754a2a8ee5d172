"""The partition of a captured model: the model is profiled, several methods cut it, and the simulator chooses.

The objective of `megatron.partition` counts the work of devices and the bytes between them, but not the time that
stages wait for each other. So the simulator runs the program of each candidate on the profiled times.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import networkx
import torch
from torch import Tensor

from megatron import backend
from megatron.capture.blocks import blocks_of, crossings
from megatron.capture.estimate import Roofline, estimate
from megatron.capture.export import Captured, signature
from megatron.capture.graph_file import graph_file, stage_of_operators
from megatron.capture.layers import stages_of_layers
from megatron.capture.profile import BlockCost, parameters_of, profile
from megatron.finetuning.adapter_arguments import has_adapter
from megatron.finetuning.arguments import has_masters
from megatron.finetuning.partition_file import (
    FORM,
    EdgeBytes,
    PartitionFile,
    StageCost,
    bytes_of_edges,
    edges_of,
    schedule_of,
)
from megatron.finetuning.samples import Data
from megatron.partition import CompeteResult, Competition, Graph, Partition, compete, parse_graph
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs

ALIKE = 1.005
"""Among candidates within this factor of the least simulated time, the one of the least depth (staleness) is chosen."""

_STATE_BYTES = {"adamw": 8, "adamw_torch_fused": 8, "adam": 8, "sgd": 4, "adafactor": 0}
"""Bytes of the optimizer's state for each parameter, in FP32; Adafactor's row and column sums are negligible."""


@dataclass(frozen=True)
class PlannedMachine:
    """The machine that a partition is for.

    Attributes:
        memory_bytes: memory of each device.
        bandwidth: between devices, in 10^9 bytes per second.
    """

    num_devices: int
    memory_bytes: float
    bandwidth: float


@dataclass(frozen=True)
class Candidate:
    """A result of the competition as a pipeline.

    Attributes:
        simulated_ms: milliseconds of a microbatch in the steady state.
        depth: the largest number of edges from a stage to the last one; a greater depth means staler weights.
    """

    result: CompeteResult
    file: PartitionFile
    simulated_ms: float
    depth: int


def state_bytes(args: argparse.Namespace) -> int:
    """Bytes of the optimizer's state for each parameter, if the parameter or its master is FP32."""
    return _STATE_BYTES[args.optim] // (2 if args.l2l_moments == "bfloat16" else 1)


def weight_bytes(args: argparse.Namespace) -> float:
    """Bytes of a trained parameter together with its gradient and the optimizer's state.

    All three have the precision of --dtype, or FP32 for adapters. With --bf16 or --fp16,
    parameter and gradient have 2 bytes, and the master, a copy of the gradient during the step and the optimizer's
    state are FP32.
    """
    if has_masters(args):
        return 2 * 2 + 4 + 4 + _STATE_BYTES[args.optim]
    return trained_itemsize(args) * (2 + _STATE_BYTES[args.optim] / 4)


def trained_itemsize(args: argparse.Namespace) -> int:
    """Bytes of an element of what is trained: of the weights, or of adapters, which PEFT keeps in FP32."""
    return 4 if has_adapter(args) else getattr(torch, args.dtype).itemsize


def num_bytes(text: str) -> float:
    """The bytes of an amount such as `11GiB`, `512MiB` or `11GB`. Raises ValueError for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) *(GiB|MiB|GB|MB)", text)
    if match is None or not 0 < float(match[1]) < 1e9:
        raise ValueError(f"'{text}' is no amount of memory; write it as 11GiB or 512MiB")
    return float(match[1]) * {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}[match[2]]


def cut_model(
    captured: Captured,
    batch: Mapping[str, Tensor],
    machine: PlannedMachine,
    args: argparse.Namespace,
    *,
    methods: Sequence[str] = ("sequential", "mixed"),
    milp_seconds: float | None = None,
    effort: float = 1.0,
    num_microbatches: float = math.inf,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Candidate, list[Candidate], Graph, Competition]:
    """Profile a model on this process's device, and cut it into stages.

    Args:
        batch: a microbatch.
        methods, milp_seconds, effort, num_microbatches, seconds: as `compete` takes them.
        progress: called with a description of the current step.

    Returns the chosen candidate, all candidates, the graph and the competition.

    Raises ValueError, with the reason for each method, if no partition fits.
    """
    num_blocks = len(blocks_of(captured))
    costs = profile(
        captured, {name: tensor.to(backend.device()) for name, tensor in batch.items()},
        progress=lambda done, _: progress(f"profiling block {done} of {num_blocks}"),
    )  # fmt: skip
    graph = graph_of(captured, costs, machine, args)
    simulated: dict[int, Candidate | ValueError] = {}

    def milliseconds_of(result: CompeteResult) -> float:
        if id(result) not in simulated:
            progress(f"simulating {result.method}")
            try:
                simulated[id(result)] = candidate_of(captured, costs, batch, result, machine, args)
            except ValueError as error:  # the stages form no pipeline; for example, one has nothing to train
                simulated[id(result)] = error
        found = simulated[id(result)]
        return found.simulated_ms if isinstance(found, Candidate) else math.inf

    competition = compete(
        graph, methods=methods, max_stages_per_device=args.max_stages_per_device, milp_seconds=milp_seconds,
        seed=args.seed, effort=effort, num_microbatches=num_microbatches, seconds=seconds,
        milliseconds_of=milliseconds_of, alike=ALIKE, progress=progress,
    )  # fmt: skip
    different: dict[object, Candidate] = {}
    for result in competition.results:
        if milliseconds_of(result) == math.inf:
            competition.failures[result.method] = str(simulated[id(result)])
        else:
            file = simulated[id(result)].file
            different.setdefault((tuple(file.stage_of_node.items()), file.rank_of_stage), simulated[id(result)])
    candidates = list(different.values())
    if not candidates:
        reasons = "; ".join(f"{method}: {reason}" for method, reason in competition.failures.items())
        raise ValueError(f"no partition makes a pipeline ({reasons}); try other --methods, or more devices")
    least = min(candidate.simulated_ms for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.simulated_ms <= ALIKE * least]
    choice = min(near, key=lambda candidate: (candidate.depth, candidate.simulated_ms))
    return choice, candidates, graph, competition


def relay_partition(captured: Captured, batch: Mapping[str, Tensor], args: argparse.Namespace) -> PartitionFile:
    """Partition a model into one stage per layer, dealt out to the devices in turn. Costs are estimated for a typical
    GPU.

    Raises ValueError for a model with too few layers.
    """
    devices, first = args.devices // args.data_parallel_size, len(captured.inputs)
    stages = stages_of_layers(captured, multiple_of=devices)
    stage_of_node = dict.fromkeys(range(first), 0) | dict(enumerate(stages, start=first))
    partition = Partition(stage_of_node, tuple(stage % devices for stage in range(max(stages) + 1)))
    costs = estimate(captured, batch, _COMMON)
    machine = PlannedMachine(devices, num_bytes(args.memory), args.bandwidth)
    return _partition_file(captured, costs, partition, machine, args, method="layers", objective_ms=0.0)


def _partition_file(
    captured: Captured, costs: Sequence[BlockCost], partition: Partition, machine: PlannedMachine,
    args: argparse.Namespace, *, method: str, objective_ms: float,
) -> PartitionFile:  # fmt: skip
    return PartitionFile(
        form=FORM, model=captured.model_name, task=args.task, signature=signature(captured),
        micro_batch_size=args.per_device_train_batch_size, sequence=(args.max_seq_length, args.max_target_length),
        dtype=args.dtype, method=method, objective_ms=objective_ms,
        stage_of_node=dict(sorted(partition.stage_of_node.items())), rank_of_stage=partition.device_of_stage,
        stages=stage_costs(captured, costs, partition), bandwidth_gigabytes_per_second=machine.bandwidth,
        memory_limit_bytes=machine.memory_bytes, weight_bytes_per_parameter=weight_bytes(args),
    )  # fmt: skip


_COMMON = Roofline(teraflops=100, gigabytes_per_second=800, launch_microseconds=5)
"""A device on which layers are weighed against one another."""


def num_microbatches(args: argparse.Namespace, data: Data) -> float:
    """The number of microbatches of a run on `data` for each replica: as `finetune.py`'s flags say, or three epochs."""
    rows = data.training if data.training is not None else data.validation
    epoch = -(-len(rows) // (args.per_device_train_batch_size * getattr(args, "data_parallel_size", 1)))
    most = getattr(args, "max_steps", -1) * args.gradient_accumulation_steps
    return most if most > 0 else getattr(args, "num_train_epochs", 3.0) * epoch


def graph_of(
    captured: Captured, costs: Sequence[BlockCost], machine: PlannedMachine, args: argparse.Namespace
) -> Graph:
    """The profiled graph that the methods of `megatron.partition` cut."""
    return parse_graph(graph_file(
        captured, costs, num_devices=machine.num_devices, bandwidth_gigabytes_per_second=machine.bandwidth,
        memory_limit_bytes=machine.memory_bytes, weight_bytes_per_parameter=weight_bytes(args),
        microbatches_per_version=args.gradient_accumulation_steps,
    ))  # fmt: skip


def candidate_of(
    captured: Captured, costs: Sequence[BlockCost], batch: Mapping[str, Tensor], result: CompeteResult,
    machine: PlannedMachine, args: argparse.Namespace,
) -> Candidate:  # fmt: skip
    """A result of the competition with its stages in pipeline order and its simulated time.

    Raises ValueError if the stages do not form a pipeline.
    """
    partition = _in_order(captured, result.partition)
    found = {"method": result.method, "objective_ms": result.value.objective_ms}
    file = _partition_file(captured, costs, partition, machine, args, **found)
    crossing = crossings(captured, file.stage_of_operators(captured))
    edges = edges_of(captured, crossing)
    edge_bytes = bytes_of_edges(captured, crossing, captured.sizes_of(batch))
    schedule = schedule_of("ftpipe", edges, file, recompute=True)
    seconds = simulated_seconds(schedule, file, edge_bytes, args.gradient_accumulation_steps)
    depth = max(map(schedule.graph.depth, range(schedule.num_stages)))
    return Candidate(result, file, 1000 * seconds, depth)


def simulated_seconds(
    schedule: Schedule,
    file: PartitionFile,
    edge_bytes: Mapping[tuple[int, int], EdgeBytes],
    num_microbatches: int,
    *,
    replicas: int = 1,
) -> float:
    """Seconds of a microbatch in the steady state, simulated with the profiled times and the machine's bandwidth.

    `num_microbatches`: number of microbatches of a batch. `replicas`: of the pipeline; a ring reduces their gradients.
    """
    gradient_bytes = getattr(torch, file.dtype).itemsize * 2 * (replicas - 1) / replicas
    recomputes = [schedule.recomputes(stage) for stage in range(schedule.num_stages)]
    bandwidth, plain = 1e9 * file.bandwidth_gigabytes_per_second, [cost.plain_forward_ms / 1000 for cost in file.stages]
    costs = Costs(
        forward=[
            cost.forward_ms / 1000 if recomputes[stage] else plain[stage] for stage, cost in enumerate(file.stages)
        ],
        recompute=plain,
        backward=[cost.plain_backward_ms / 1000 for cost in file.stages],
        bandwidth=bandwidth,
        reduce_grad=[cost.parameters * gradient_bytes / bandwidth for cost in file.stages],
        forward_bytes=[
            edge_bytes[edge.source, edge.target].a_microbatch(num_microbatches, schedule.weights)
            for edge in schedule.graph.edges
        ],
    )
    settling = max(3 * schedule.num_stages, 4)
    short, long = (
        simulate(schedule.build((num_microbatches,) * count), costs).makespan for count in (settling, 2 * settling)
    )
    work = file.work(schedule.graph)
    busiest = max(sum(sum(work[stage]) for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    # While a rank that began late catches up, the difference does not yet show that another rank has more work.
    return max((long - short) / settling / num_microbatches, busiest if all(recomputes[:-1]) else 0.0)


def _in_order(captured: Captured, partition: Partition) -> Partition:
    """The partition with stages renumbered so that each depends only on earlier ones, without stages of only inputs."""
    stage_of = stage_of_operators(captured, partition.stage_of_node)
    first_of: dict[int, int] = {}
    graph = networkx.DiGraph()
    place = {node: number for number, node in enumerate(captured.nodes)}
    for number, stage in stage_of.items():
        graph.add_node(stage)
        first_of[stage] = min(first_of.get(stage, number), number)
        for user in captured.nodes[number].users:
            target = stage_of.get(place.get(user, -1))
            if target is not None and target != stage:
                graph.add_edge(stage, target)
    order = list(networkx.lexicographical_topological_sort(graph, key=first_of.__getitem__))
    number_of = {stage: number for number, stage in enumerate(order)}
    stage_of_node = {node: number_of.get(stage, 0) for node, stage in partition.stage_of_node.items()}
    return Partition(stage_of_node, tuple(partition.device_of_stage[stage] for stage in order))


def stage_costs(captured: Captured, costs: Sequence[BlockCost], partition: Partition) -> tuple[StageCost, ...]:
    """The costs of each stage: the sums over its blocks."""
    sums = [Counter(parameters=0, frozen_bytes=0) for _ in range(partition.num_stages)]
    holders: dict[tuple[str, int | None], int] = {}  # parameter, and the device if it is frozen -> the first such stage
    for node, (block, cost) in enumerate(zip(blocks_of(captured), costs, strict=True), start=len(captured.inputs)):
        stage = partition.stage_of_node[node]
        sums[stage].update(
            forward_ms=cost.forward_ms, recompute_and_backward_ms=cost.recorded_forward_ms + cost.backward_ms,
            plain_forward_ms=cost.recorded_forward_ms, plain_backward_ms=cost.backward_ms, saved_bytes=cost.saved_bytes,
        )  # fmt: skip
        for name in parameters_of(captured, block):
            is_trained = captured.parameters[name].requires_grad
            key = name, None if is_trained else partition.device_of_stage[stage]
            holders[key] = min(holders.get(key, stage), stage)
    for (name, _), stage in holders.items():
        parameter = captured.parameters[name]
        if parameter.requires_grad:
            sums[stage]["parameters"] += parameter.numel()
        else:
            sums[stage]["frozen_bytes"] += parameter.nbytes
    return tuple(StageCost(**total) for total in sums)
