"""The possible changes of a run's pipeline, computed before the run starts, for a dry run.

If the user lists the numbers of frozen layers, they are known. With a rule, all layers that may freeze are assumed to
freeze, as if the last layer had the smallest gradients. Times are computed by arithmetic, since nothing was measured;
so if measured times decide how the pipeline shrinks, the result is a guess. A cache is assumed to be used, and reading
it to cost nothing.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron.elastic.cache import CacheSeconds
from megatron.elastic.freezing import ByHand
from megatron.elastic.stages import Arrangement
from megatron.pipeline.placement.topology import Process
from megatron.pipeline.schedules import PRESETS
from megatron.planner import GIB, RankMemory, Verdict, device_gib
from megatron.planner.job.estimate import judge_fullest, waiting_gib
from megatron.planner.memory.parameters import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    matrix_parameters,
)
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.freezing import make_rule
from megatron.trainer.arguments.rules.programs import data_paths
from megatron.trainer.changes.arrangement_choice import ArrangementChoice, memory_of_ranks
from megatron.trainer.changes.arrangement_choice import bytes_in_change as within_change
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.arrangement import Outlook, arranged, degrees_of, iterations_to_the_end


@dataclass(frozen=True)
class PlannedChange:
    """One change of a run.

    Attributes:
        iteration: the last iteration before the change.
        arrangement: the arrangement after the change.
        num_bytes: bytes of the fullest rank after the change.
        bytes_in_change: bytes of the fullest rank during the change: the old state without gradients, and the new
            state, without activations.
        rank: the pipeline rank, in the new pipeline, to which the larger of these two numbers belongs.
        bytes_moved: an upper bound on the bytes that ranks send each other, summed over all ranks.
        outlook: seconds of a batch, up to a factor; None if the run searches for no other split.
        waiting_bytes: bytes of waiting operands of collectives. A rank needs them beside `num_bytes`, but not during
            the change, when nothing is computed (planner/job/estimate.py).
    """

    iteration: int
    arrangement: Arrangement
    num_bytes: float
    bytes_in_change: float
    rank: int
    bytes_moved: float
    outlook: Outlook | None = None
    waiting_bytes: float = 0.0

    @property
    def is_fullest_within(self) -> bool:
        """Whether a rank needs more memory during the change than after it."""
        return self.bytes_in_change > self.num_bytes + self.waiting_bytes

    @property
    def most_bytes(self) -> float:
        return max(self.num_bytes + self.waiting_bytes, self.bytes_in_change)

    @property
    def speedup(self) -> float | None:
        """The factor by which the new split makes batches faster."""
        return self.outlook.before / self.outlook.after if self.outlook is not None and self.outlook.after else None

    def judge(self, gib: float) -> Verdict:
        """The verdict on GPUs with `gib` GiB of memory."""
        if self.is_fullest_within:
            return judge_fullest(self.bytes_in_change, gib, rank=self.rank)
        return judge_fullest(self.num_bytes, gib, rank=self.rank, waiting=self.waiting_bytes / GIB)


@dataclass(frozen=True)
class _ProcessPart:
    """A process's part of a pipeline."""

    memory: RankMemory
    layers: range


def planned_changes(args: TrainConfig, layers: Sequence[int], processes: Sequence[Process] = ()) -> list[PlannedChange]:
    """The changes of a run of `args`. `layers`: the number of layers of each stage at the start.

    `processes`: by rank; if empty, all are on one node.
    """
    first = Arrangement(
        args.pipeline_model_parallel_size, args.data_parallel_size, args.micro_batch_size, tuple(layers)
    )
    args = arranged(replace(args, first_arrangement=first, activation_cache_use="always"), first)
    decisions, found, held = _Decisions(args, processes), [], _held(args)
    iteration, samples = args.freeze_start, args.freeze_start * args.global_batch_size
    while (iteration := iteration + args.freeze_interval) < args.train_iters and not decisions.are_final(args):
        samples += args.freeze_interval * args.batch_sizes.global_batch_size  # only used if all batches have one size
        wanted = decisions.next(args, iteration)
        if wanted != args.arrangement:
            args = arranged(args, wanted)
            change, held = _change(args, iteration, held, decisions.outlook)
            found.append(change)
            last = iterations_to_the_end(args, iteration=iteration, consumed_samples=samples)
            args = replace(args, train_iters=last)
    return found


class _Decisions:
    """The decisions of the run of `args` at the ends of its intervals, in order.

    Arrangements are compared only if something has changed since the previous interval: the number of frozen layers, a
    number in the user's lists, or the pipeline. The length of the rest of the run does not matter: here a change costs
    nothing, and a cache is always read.

    Attributes:
        outlook: the expected times of the last decision; None if the run searches for no other split.
    """

    def __init__(self, args: TrainConfig, processes: Sequence[Process]) -> None:
        self.outlook: Outlook | None = None
        self._rule = make_rule(args) if args.freeze_training else None
        self._choice = _choice(args, processes)
        self._norms = tuple(float(layer) for layer in range(args.num_layers, 0, -1))  # smallest at the end
        self._num_by_hand = max(len(args.elastic_schedule or ()), len(args.elastic_micro_batch_size or ()))
        self._num_intervals, self._is_settled = 0, False

    def next(self, args: TrainConfig, iteration: int) -> Arrangement:
        """The arrangement after the next interval, which ends at `iteration`; the current one is that of `args`."""
        self._num_intervals += 1
        wanted = now = args.arrangement
        if self._rule is not None:
            wanted = now.with_frozen(max(now.num_frozen, self._rule.decide(self._norms)))
        is_new = wanted != now or self._num_intervals <= self._num_by_hand or not self._is_settled
        if self._choice is not None and is_new:
            self._choice.args = args
            wanted, self.outlook = self._choice.decide(wanted, batches_left=args.train_iters - iteration)
        self._is_settled = wanted == now
        return wanted

    def are_final(self, args: TrainConfig) -> bool:
        """Whether no later decision changes the arrangement."""
        return self._is_settled and self._num_intervals >= self._num_by_hand and self._has_all_layers(args)

    def _has_all_layers(self, args: TrainConfig) -> bool:
        """Whether no more layers can freeze."""
        rule = self._rule
        is_used_up = isinstance(rule, ByHand) and rule.num_intervals >= len(rule.counts)
        return rule is None or is_used_up or args.arrangement.num_frozen == args.num_layers - 1


def _choice(args: TrainConfig, processes: Sequence[Process]) -> ArrangementChoice | None:
    """The run's choice of arrangements, under the same flags; it does not measure the disk."""
    if not args.elastic_pipeline and args.activation_cache is None:
        return None
    device_bytes = math.inf if args.dry_run_gpu is None else device_gib(args.dry_run_gpu) * GIB
    is_here = args.activation_cache is None or all(map(os.path.exists, data_paths(args)["train"]))
    return ArrangementChoice(
        args, processes, device_bytes=device_bytes, disk=CacheSeconds(0.0, 0.0, 0.0),
        epoch=None if is_here else 1,  # the length of an epoch is unknown here
    )  # fmt: skip


def _change(
    args: TrainConfig, iteration: int, before: list[_ProcessPart], outlook: Outlook | None
) -> tuple[PlannedChange, list[_ProcessPart]]:
    """The change to the current arrangement of `args`, and each process's part after it."""
    after = _held(args)
    num_bytes, rank = max((each.memory.total, each.memory.rank) for each in after)
    bytes_in_change, rank_within = max(
        (within_change(old.memory, new.memory), new.memory.rank) for old, new in zip(before, after, strict=True)
    )
    moved = sum(_bytes_of_others(args, old.layers, new.layers) for old, new in zip(before, after, strict=True))
    waiting = waiting_gib(from_flags.architecture(args), from_flags.activation_setting(args)) * GIB
    change = PlannedChange(
        iteration, args.arrangement, num_bytes, bytes_in_change, rank, moved, outlook, waiting_bytes=waiting
    )
    return (replace(change, rank=rank_within) if change.is_fullest_within else change), after


def _held(args: TrainConfig) -> list[_ProcessPart]:
    """Each process's part of the pipeline."""
    ranks = memory_of_ranks(args, counts_communicators=from_flags.uses_nccl(args))
    degrees = degrees_of(args)
    ends = list(accumulate(args.arrangement.layers_of_rank, initial=0))
    stages = [degrees.coordinates(process).stage for process in range(degrees.world_size)]
    return [_ProcessPart(ranks[stage], range(ends[stage], ends[stage + 1])) for stage in stages]


def _bytes_of_others(args: TrainConfig, before: range, after: range) -> float:
    """The bytes that a process with layers `before` lacks for layers `after`, in the current arrangement of `args`.

    They are weights and the optimizer's state. If replicas shard this state, another rank may hold all of it.
    """
    model, state, tensor = (
        from_flags.architecture(args),
        from_flags.training_state(args),
        args.tensor_model_parallel_size,
    )
    num_frozen, last = args.arrangement.num_frozen, args.num_layers - 1
    versions = 1 + (PRESETS[args.pipeline_schedule].policy.delay or 0)

    def count(layers: Sequence[int], *, frozen: bool) -> int:
        own = layer_parameters(model, tensor) * sum((each < num_frozen) == frozen for each in layers)
        if 0 in layers and frozen == (num_frozen > 0):
            own += embedding_parameters(model, tensor)
        return own + (head_parameters(model, tensor, holds_embedding=False) if last in layers and not frozen else 0)

    new = [each for each in after if each not in before]
    trained = count(new, frozen=False)
    stepped = after if state.distributed_optimizer else new
    matrices = matrix_parameters(model, tensor, sum(each >= num_frozen for each in stepped))
    return (
        state.weights(trained, num_versions=versions)
        + state.optimizer(count(stepped, frozen=False), num_versions=versions, matrices=matrices)
        + state.weight_bytes * count(new, frozen=True)
    )
