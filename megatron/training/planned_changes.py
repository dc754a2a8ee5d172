"""What a run that changes its pipeline may come to, before it begins: for a dry run.

By hand it is known how many layers freeze; by a rule, it is assumed that all freeze that may, as if the last layer had
the least gradients. Times are counted by arithmetic, since nothing was measured; so where the pipeline shrinks by
measured times, this is a guess.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.memory import RankMemory
from megatron.training.arguments.rules_freezing import make_rule
from megatron.training.arrangement import Arrangement, arrange, iterations_to_the_end
from megatron.training.shaping import Shaping, memory_of_ranks

_MOST_CHANGES = 64


@dataclass(frozen=True)
class PlannedChange:
    """Behind `iteration`, to what; bytes of the fullest rank from then on, and of the fullest within the change, where
    the state of before and that of after are held, without activations."""

    iteration: int
    arrangement: Arrangement
    num_bytes: float
    bytes_in_change: float


def planned_changes(args: argparse.Namespace, layers: Sequence[int]) -> list[PlannedChange]:
    """The changes of a run of `args`, a pipeline of stages with so many `layers` at first."""
    args = argparse.Namespace(**vars(args))
    args.first_arrangement = now = Arrangement(
        args.pipeline_model_parallel_size, args.data_parallel_size, args.micro_batch_size, tuple(layers)
    )
    arrange(args, now)
    rule = make_rule(args) if args.freeze_training else None
    shaping = Shaping(args) if args.elastic_pipeline else None
    least_at_the_end = tuple(float(layer) for layer in range(args.num_layers, 0, -1))
    found = []
    iteration, samples = args.freeze_start, args.batch_sizes.samples_after(args.freeze_start)
    while len(found) < _MOST_CHANGES:
        interval = args.freeze_interval
        samples += args.batch_sizes.samples_after(iteration + interval) - args.batch_sizes.samples_after(iteration)
        iteration += interval
        if iteration >= args.train_iters:
            break
        wanted = now if rule is None else now.with_frozen(max(now.num_frozen, rule.decide(least_at_the_end)))
        if shaping is not None:
            wanted, _ = shaping.decide(wanted, batches_left=args.train_iters - iteration)
        if wanted != now:
            before = memory_of_ranks(args)
            arrange(args, wanted)
            after = memory_of_ranks(args)
            found.append(PlannedChange(iteration, wanted, max(each.total for each in after), _in_change(before, after)))
            args.train_iters = iterations_to_the_end(args, iteration=iteration, consumed_samples=samples)
            now = wanted
    return found


def _in_change(before: Sequence[RankMemory], after: Sequence[RankMemory]) -> float:
    """The most state that a process holds: what it had in its old pipeline and what it gets in the new one. Replicas of
    a stage have ranks in a row, so of n ranks' pipelines process k of m is at n k / m."""
    num_processes = math.lcm(len(before), len(after))
    return max(
        _state(before[len(before) * process // num_processes]) + _state(after[len(after) * process // num_processes])
        for process in range(num_processes)
    )


def _state(memory: RankMemory) -> float:
    return memory.parts.weights + memory.parts.gradients + memory.parts.optimizer
