"""What a run that changes its pipeline may come to, before it begins: for a dry run.

By hand it is known how many layers freeze; by a rule, it is assumed that all freeze that may, as if the last layer had
the least gradients. Times are counted by arithmetic, since nothing was measured; so where the pipeline shrinks by
measured times, this is a guess.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.placement.hosts import Process
from megatron.planner.memory import RankMemory
from megatron.training.arguments.rules_freezing import make_rule
from megatron.training.arrangement import Arrangement, arrange, iterations_to_the_end
from megatron.training.placement import degrees_of
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


def planned_changes(
    args: argparse.Namespace, layers: Sequence[int], processes: Sequence[Process] = ()
) -> list[PlannedChange]:
    """The changes of a run of `args`, a pipeline of stages with so many `layers` at first.

    `processes`: by rank; none: they are on one node.
    """
    args = argparse.Namespace(**vars(args))
    args.first_arrangement = now = Arrangement(
        args.pipeline_model_parallel_size, args.data_parallel_size, args.micro_batch_size, tuple(layers)
    )
    arrange(args, now)
    rule = make_rule(args) if args.freeze_training else None
    shaping = Shaping(args, processes) if args.elastic_pipeline else None
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
            before = _of_processes(args)
            arrange(args, wanted)
            after = _of_processes(args)
            in_change = max(map(sum, zip(map(_state, before), map(_state, after), strict=True)))
            found.append(PlannedChange(iteration, wanted, max(each.total for each in after), in_change))
            args.train_iters = iterations_to_the_end(args, iteration=iteration, consumed_samples=samples)
            now = wanted
    return found


def _of_processes(args: argparse.Namespace) -> list[RankMemory]:
    """What each process has in its pipeline."""
    ranks, degrees = memory_of_ranks(args), degrees_of(args)
    return [ranks[degrees.coordinates(process).stage] for process in range(degrees.world_size)]


def _state(memory: RankMemory) -> float:
    return memory.parts.weights + memory.parts.gradients + memory.parts.optimizer
