"""The effects of a lost rank in a job with replicas, for a dry run.

A rank is lost with all processes that share its layers (tensor, context and expert parallelism), since none of them can
continue alone. If no GPU is named, times are in units of a layer's forward; a backward takes two units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors.losses import RankLoss, losses_of, single_losses
from megatron.pipeline.survivors.sharing import Sharing
from megatron.planner import DEVICES, GIB, RankMemory, device_gib
from megatron.planner.memory.parameters import FP32, stage_expert_parameters
from megatron.trainer.arguments.architecture import architecture
from megatron.trainer.arguments.flags.config import TrainConfig, num_expert_replicas, num_places, num_replicas
from megatron.trainer.arguments.rules.lost_ranks import refusal
from megatron.trainer.plan import from_flags

_MOST = 16_384  # computations in the batches whose orders are searched, over all losses: about a minute

_COPIED_BYTES = 16
"""Bytes for each parameter of a shard: its FP32 master weight, both moments, and the gradient of the current batch."""


@dataclass(frozen=True)
class LossCosts:
    """The cost of losing one rank, for each rank of the pipeline.

    losses: the cost of each loss; empty if the job cannot continue.
    lines: further lines for the dry run.
    seconds: whether times are in seconds; otherwise they are in forwards of a layer.
    """

    losses: tuple[RankLoss, ...]
    lines: tuple[str, ...]
    seconds: bool = False


def lost_ranks(args: TrainConfig, layers: Sequence[int], memory: Sequence[RankMemory]) -> LossCosts | None:
    """The cost of lost ranks for a job of `args` whose stages have `layers` layers; None without replicas."""
    if args.data_parallel_size == 1 or args.skip_train:
        return None
    schedule, size = args.schedule, max(args.batch_sizes.all_num_microbatches())
    if reason := _without_program(args, size):
        return LossCosts((), (f"a lost rank ends this job: {reason}",))
    num_microbatches = num_places(args) * sum(schedule.weights.full_batches(size, 6))
    work = 2 * schedule.num_stages * schedule.num_ranks * num_microbatches
    if work > _MOST:
        line = (
            f"a lost rank: the search for its programs takes minutes for {num_places(args)} replicas of {size} "
            "microbatches; tools/schedule.py without makes them"
        )
        return LossCosts((), (line,))
    costs = _priced(args, layers)
    try:
        found = losses_of(
            schedule, size, num_replicas=num_places(args), lost=single_losses(schedule.num_ranks),
            costs=costs or Costs(forward=tuple(map(float, layers)), backward=tuple(2.0 * each for each in layers)),
        )  # fmt: skip
    except ValueError as error:
        return LossCosts((), (f"a lost rank ends this job: {error}",))
    refused = tuple(f"{' '.join(map(str, each.lost))}: {each.refusal}" for each in found if each.refusal)
    lines = [*refused, *_memory_lines(args, found, memory), *_optimizer_lines(args, layers, memory)]
    if reason := refusal(args):
        lines.append(f"as it is, a lost rank ends this job: {reason}")
    return LossCosts(tuple(found), tuple(lines), seconds=costs is not None)


def _without_program(args: TrainConfig, size: int) -> str | None:
    """The reason why no program without a rank can serve the job; None if a program can.

    `size`: the number of microbatches in a batch.
    """
    if args.num_experts is not None or args.changes or args.schedule.predicts_apart:
        return refusal(args)
    try:
        Sharing(args.schedule, size, num_places(args), frozenset(single_losses(1)[0]))
    except ValueError as error:
        return str(error)
    return None


def _priced(args: TrainConfig, layers: Sequence[int]) -> Costs | None:
    """The costs of the job's stages in seconds; None if the planner cannot price the job or no GPU is named."""
    schedule = args.schedule
    if (
        args.dry_run_gpu not in DEVICES
        or args.program is not None
        or args.context_parallel_size > 1
        or args.num_experts is not None
        or args.recompute_granularity is not None
        or architecture(args).decoder is not None  # cross-attention has no price
        or schedule.num_stages % schedule.num_ranks
    ):
        return None
    return from_flags.costs_by_arithmetic(args, from_flags.configuration_of(args, layers))


def _optimizer_lines(args: TrainConfig, layers: Sequence[int], memory: Sequence[RankMemory]) -> list[str]:
    """A line about optimizer state that is lost with a rank, or about its copies; [] if replicas have it whole."""
    if not args.use_distributed_optimizer:
        return []
    if not args.redundant_optimizer:
        return ["the optimizer's shard is lost with a rank: the others go back to the last checkpoint of --save"]
    state = _COPIED_BYTES
    if args.schedule.provisional_microbatches == 0:
        state += FP32
    elif args.schedule.weights.max_live_versions(0, 1) > 1 and not args.schedule.weights.predicts:
        state += from_flags.training_state(args).weight_bytes
    degrees = from_flags.activation_setting(args).expert_degrees
    experts = stage_expert_parameters(architecture(args), layers, degrees)
    of_ranks = [(each.num_parameters, sum(experts[stage] for stage in each.stages)) for each in memory]
    shards = [(all_of - own) / num_replicas(args) + own / num_expert_replicas(args) for all_of, own in of_ranks]
    most = max(shards) * state
    return [f"copies of the optimizer's shards take up to {most / GIB:.2f} GiB of the host for each rank"]


def _memory_lines(args: TrainConfig, losses: Sequence[RankLoss], memory: Sequence[RankMemory]) -> list[str]:
    """A line about the rank that needs most memory after any loss."""
    held = [each.survivors.held for each in losses if each.survivors]
    before = next(each.survivors.held_undisturbed for each in losses if each.survivors)
    most = [max(of_rank) for of_rank in zip(*held, strict=True)]
    added = [
        max(0, after - own) * each.bytes_per_microbatch for after, own, each in zip(most, before, memory, strict=True)
    ]
    if not any(added):
        return ["no rank holds more microbatches than before"]
    needs = [each.total + more for each, more in zip(memory, added, strict=True)]
    rank = max(range(len(needs)), key=needs.__getitem__)
    line = (
        f"ranks hold up to {max(after - own for after, own in zip(most, before, strict=True))} more microbatches; the "
        f"fullest one, rank {rank}, then needs {needs[rank] / GIB:.1f} GiB"
    )
    if args.dry_run_gpu is None:
        return [line]
    spare = device_gib(args.dry_run_gpu) - needs[rank] / GIB
    return [f"{line}, and {args.dry_run_gpu} {'leaves' if spare >= 0 else 'misses'} {abs(spare):.1f} GiB"]
