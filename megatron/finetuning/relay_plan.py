"""Memory and time of a relay (L2L) before it runs: bytes on the device and on the host, and the speed on known GPUs.

The bound of a batch is what no order of its work can beat: the computation of the busiest device, the bytes that its
link carries in either direction, or its share of the host's optimizer, whichever takes longest. The program is
simulated with the same numbers.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from rich.table import Table

from megatron.capture.estimate import Roofline, estimate, estimated_milliseconds
from megatron.documents import GIB, counted
from megatron.documents.tables import console
from megatron.finetuning.partitioning import stage_costs, state_bytes
from megatron.finetuning.plan import RunPlan, adapter_line, planned, shorter_lines
from megatron.finetuning.relay import packed_names, packing_of
from megatron.finetuning.trainer import EVALUATED_TOGETHER
from megatron.partition import Partition
from megatron.pipeline.program.lane_order import GRADIENT_BUFFERS, places
from megatron.pipeline.runtime.failure.errors import SameEverywhere
from megatron.pipeline.runtime.relay.host_store import FlatLayout, trained
from megatron.pipeline.runtime.relay.packed_weights import Packing
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.job.cluster import HOST_MEMORY_BANDWIDTH
from megatron.planner.job.devices import DEVICES, Device

LAUNCH_MICROSECONDS = 5.0
STEPPED_BYTES = 12
"""Bytes that the host moves for a parameter in a step, besides the optimizer's state. The host reads the gradient, and
reads and writes the weight, of 4 bytes each. With --bf16 it reads the gradient and writes the weight, of 2 bytes each,
and reads and writes the master."""


@dataclass(frozen=True)
class RelayBytes:
    """The bytes that a relay takes on one rank.

    Attributes:
        resident: on the device, the weights of the layers that are there at once.
        gradients: on the device, the buffers of gradients.
        inputs: on the device, the inputs and outputs of layers.
        layer: on the device, the activations that a microbatch saves in the layer that computes.
        host: on the host, weights, gradients, masters and the optimizer's state.
        stash: on the host, the inputs of layers.
    """

    resident: int
    gradients: int
    inputs: int
    layer: int
    host: int
    stash: int

    @property
    def device(self) -> int:
        return self.resident + self.gradients + self.inputs + self.layer


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage in flat memory.

    Attributes:
        weights: dtype -> bytes of all weights on the device.
        plain: bytes of the weights that are not packed.
        packed: dtype -> bytes of the parts of packed weights.
        unpacked: (elements, dtype) of a packed weight on the device -> the number of such weights.
        gradients: bytes of the gradients of trained weights.
        trained: the number of elements of trained weights.
    """

    weights: Mapping[torch.dtype, int]
    plain: int
    packed: Counter[torch.dtype]
    unpacked: Counter[tuple[int, torch.dtype]]
    gradients: int
    trained: int

    @property
    def fetched(self) -> int:
        return self.plain + self.packed.total()


def stage_bytes(plan: RunPlan, args: argparse.Namespace) -> list[StageBytes]:
    """The bytes of each stage."""
    packing, of_packed = packing_of(args), packed_names(plan, args)
    return [_stage_bytes(plan, packing, of_packed, stage) for stage in range(plan.schedule.num_stages)]


def _stage_bytes(plan: RunPlan, packing: Packing | None, of_packed: Set[str], stage: int) -> StageBytes:
    crossing = plan.crossing
    own = {
        name: plan.captured.parameters[name]
        for name, owner in crossing.owner.items()
        if stage in crossing.copies.get(name, (owner,))
    }
    steps = trained(own)
    unpacked = {name: each for name, each in own.items() if name in of_packed}
    packed = {
        f"{name}: {part}": tensor for name, each in unpacked.items() for part, tensor in packing.empty(each).items()
    }
    plain = {name: each for name, each in own.items() if name not in unpacked}
    return StageBytes(
        weights=_by_dtype(own), plain=FlatLayout(plain).num_bytes, packed=Counter(_by_dtype(packed)),
        unpacked=Counter((each.numel(), each.dtype) for each in unpacked.values()),
        gradients=FlatLayout(steps).num_bytes, trained=sum(each.numel() for each in steps.values()),
    )  # fmt: skip


def _by_dtype(tensors: Mapping[str, torch.Tensor]) -> dict[torch.dtype, int]:
    return {dtype: count * dtype.itemsize for dtype, count in FlatLayout(tensors).num_elements.items()}


def relay_bytes(plan: RunPlan, args: argparse.Namespace) -> list[RelayBytes]:
    """The bytes of each rank of a replica. Inputs on the device are an upper bound."""
    of_stages = stage_bytes(plan, args)
    return [_bytes_of_rank(plan, args, rank, of_stages) for rank in range(plan.schedule.num_ranks)]


def _bytes_of_rank(plan: RunPlan, args: argparse.Namespace, rank: int, of_stages: Sequence[StageBytes]) -> RelayBytes:
    stages, residency = plan.schedule.stages_of(rank), plan.schedule.residency
    found = [of_stages[stage] for stage in stages]
    arenas = {
        dtype: places([each.weights.get(dtype, 0) for each in found], residency.stages)[1]
        for dtype in {dtype for each in found for dtype in each.weights}
    }
    arriving = Counter[torch.dtype]()
    for each in found:
        arriving |= each.packed  # the largest of each dtype
    m, largest = args.gradient_accumulation_steps, max(edge.activations for edge in plan.edge_bytes.values())
    at_once = max(m, EVALUATED_TOGETHER) if args.do_eval else m
    leaving = sum(plan.edge_bytes[stage - 1, stage].activations for stage in _stashed(plan.schedule, rank) if stage)
    gradients, elements = sum(each.gradients for each in found), sum(each.trained for each in found)
    optimizer = elements * (state_bytes(args) + 4) if args.bf16 else gradients * state_bytes(args) // 4
    on_host = residency.stashes_on_host
    return RelayBytes(
        resident=sum(arenas.values()) + arriving.total(),
        gradients=min(GRADIENT_BUFFERS, len(stages)) * max(each.gradients for each in found),
        inputs=(at_once + 3) * largest if on_host else m * leaving + 2 * at_once * largest,
        layer=max(plan.partition.stages[stage].saved_bytes for stage in stages),
        host=sum(each.fetched for each in found) + gradients + optimizer, stash=m * leaving if on_host else 0,
    )  # fmt: skip


def relay_lines(plan: RunPlan, args: argparse.Namespace) -> Iterator[str]:
    """The first lines of a run's log."""
    schedule, residency = plan.schedule, plan.schedule.residency
    if plan.adapter is not None:
        yield adapter_line(plan)
    yield (
        f"{plan.captured.model_name}: {counted(schedule.num_stages, 'stage')} relayed by "
        f"{counted(schedule.num_ranks, 'rank')}, {residency.stages} at once on a device, updates {residency.update}, "
        f"inputs on the {residency.stash}"
    )
    for rank, found in enumerate(relay_bytes(plan, args)):
        yield (
            f"rank {rank}: {found.device / GIB:.3f} GiB on the device (weights {found.resident / GIB:.3f}, gradients "
            f"{found.gradients / GIB:.3f}, inputs {found.inputs / GIB:.3f}, a layer's activations "
            f"{found.layer / GIB:.3f}), {(found.host + found.stash) / GIB:.3f} GiB on the host"
        )


@dataclass(frozen=True)
class Speed:
    """The predicted time of a batch on one kind of GPU.

    Attributes:
        compute, link, host: lower bounds in seconds, from the computations, the link to the host, and the host's
            updates.
        simulated: seconds of a batch in the simulated program.
        tokens: number of tokens of a batch, padding included.
    """

    compute: float
    link: float
    host: float
    simulated: float
    tokens: int

    @property
    def bound(self) -> float:
        return max(self.compute, self.link, self.host)


def unpack_seconds(of_stages: Sequence[StageBytes], packing: Packing | None, roofline: Roofline) -> list[float]:
    """For each stage, the time in which the device unpacks its packed weights once."""

    def one(count: int, dtype: torch.dtype) -> float:
        weight = torch.empty(count, dtype=dtype, device="meta")
        codes, scales = packing.empty(weight).values()
        packing.unpack(codes, scales, weight)  # the first call makes tables that later ones find
        return estimated_milliseconds(lambda: packing.unpack(codes, scales, weight), roofline) / 1e3

    times = {kind: one(*kind) for kind in {kind for each in of_stages for kind in each.unpacked}}
    return [sum(count * times[kind] for kind, count in each.unpacked.items()) for each in of_stages]


def speed_of(plan: RunPlan, args: argparse.Namespace, device: Device) -> Speed:
    """The speed on GPUs of a kind.

    Packed weights are unpacked after each fetch, on its stream. The kernels delay the end of the fetch, and take the
    device from computations, which get their time in equal shares.
    """
    schedule, m, size = plan.schedule, args.gradient_accumulation_steps, plan.dtype.itemsize
    roofline = Roofline(device.product_rate(size) / 1e12, device.memory_bandwidth, LAUNCH_MICROSECONDS)
    partition = Partition(plan.partition.stage_of_node, plan.partition.rank_of_stage)
    costs = stage_costs(plan.captured, estimate(plan.captured, plan.batch, roofline), partition)
    found = stage_bytes(plan, args)
    to_host = 1e9 * device.host_bandwidth
    weights = [each.fetched / to_host for each in found]
    unpack = unpack_seconds(found, packing_of(args), roofline)
    gradients = [each.gradients / (to_host * args.data_parallel_size) for each in found]  # each replica stores a share
    stepped = (STEPPED_BYTES + 2 * state_bytes(args)) * schedule.num_ranks / (1e9 * HOST_MEMORY_BANDWIDTH)
    update = [stepped * each.trained for each in found]
    ring = 2 * (1 - 1 / args.data_parallel_size) / (1e9 * device.link_bandwidth)
    edges = [plan.edge_bytes[edge.source, edge.target].activations for edge in schedule.graph.edges]
    inputs = [0.0, *(each / to_host for each in edges)]
    plain = [(cost.plain_forward_ms / 1e3, cost.plain_backward_ms / 1e3) for cost in costs]
    forward = [
        (cost.forward_ms / 1e3 if schedule.recomputes(stage) else plain[stage][0]) + unpack[stage] / m
        for stage, cost in enumerate(costs)
    ]
    twice = {stage for rank in range(schedule.num_ranks) for stage in _fetched_twice(schedule, rank)}
    backward = [each + unpack[stage] / m * (stage in twice) for stage, (_, each) in enumerate(plain)]
    priced = Costs(
        forward=forward, recompute=[each for each, _ in plain], backward=backward,
        fetch=[sum(each) for each in zip(weights, unpack, strict=True)],
        store=gradients, update=update, reduce_grad=[ring * each.gradients for each in found], offload=inputs,
        bandwidth=1e9 * device.link_bandwidth, forward_bytes=edges,
    )  # fmt: skip
    ends = [simulate(schedule.build((m,) * batches), priced).makespan for batches in (2, 4)]
    compute = link = host = 0.0
    for rank in range(schedule.num_ranks):
        own = schedule.stages_of(rank)
        again = sum(plain[stage][0] for stage in own if schedule.recomputes(stage))
        back = sum(backward[stage] for stage in own if stage >= schedule.num_frozen)
        compute = max(compute, m * (again + back + sum(forward[stage] for stage in own)))
        stash = m * sum(inputs[stage] for stage in _stashed(schedule, rank)) * schedule.residency.stashes_on_host
        down = sum(weights[stage] for stage in (*own, *_fetched_twice(schedule, rank))) + stash
        link = max(link, down, sum(gradients[stage] for stage in own) + stash)
        host = max(host, sum(update[stage] for stage in own))
    sequences = max(sum(name.endswith("input_ids") for name in plan.batch), 1)  # of a sample: a pair has two
    rows = next(iter(plan.batch.values())).shape[0] * sequences
    tokens = rows * args.max_seq_length * m * args.data_parallel_size
    return Speed(compute, link, host, (ends[1] - ends[0]) / 2, tokens)


def _fetched_twice(schedule: Schedule, rank: int) -> Sequence[int]:
    """The stages of a rank that leave the device and come back; the last ones stay, and frozen ones have forwards
    alone."""
    return [stage for stage in schedule.stages_of(rank)[: -schedule.residency.stages] if stage >= schedule.num_frozen]


def _stashed(schedule: Schedule, rank: int) -> Sequence[int]:
    """The stages of a rank whose inputs wait for a recompute in a later turn."""
    return [stage for stage in schedule.stages_of(rank)[:-1] if stage >= schedule.num_frozen]


def run_dry(args: argparse.Namespace) -> None:
    """Print a relay's memory and times on the first rank. Raises SameEverywhere if the job could not run."""
    if args.rank:
        return
    if unknown := [name for name in args.dry_run_gpus if name not in DEVICES]:
        raise SameEverywhere(f"--dry_run_gpus {unknown[0]} is not known; give some of {', '.join(DEVICES)}")
    data, plan = planned(args)
    out = console(150)
    for line in (*relay_lines(plan, args), *shorter_lines(plan, args, data)):
        out.print(line)
    out.print(_table(plan, args))


def _table(plan: RunPlan, args: argparse.Namespace) -> Table:
    """A row for each kind of GPU in --dry_run_gpus: whether the job fits, and the predicted times."""
    table = Table("GPU", "fits", "of GiB", "compute s", "link s", "host s", "simulated s", "of the bound", "tokens/s")
    most = max(each.device for each in relay_bytes(plan, args))
    for name in args.dry_run_gpus:
        speed = speed_of(plan, args, DEVICES[name])
        table.add_row(
            name, "yes" if most <= DEVICES[name].memory_gib * GIB else "no", f"{DEVICES[name].memory_gib:.1f}",
            f"{speed.compute:.2f}", f"{speed.link:.2f}", f"{speed.host:.2f}", f"{speed.simulated:.2f}",
            f"{100 * speed.bound / speed.simulated:.1f}%", f"{speed.tokens / speed.simulated:,.0f}",
        )  # fmt: skip
    return table
