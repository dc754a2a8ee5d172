"""What a run that changes its pipeline may come to, before it begins: for a dry run.

By hand it is known how many layers freeze; by a rule, it is assumed that all freeze that may, as if the last layer had
the least gradients. Times are counted by arithmetic, since nothing was measured; so where the pipeline shrinks by
measured times, this is a guess.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.arguments.rules_freezing import make_rule
from megatron.training.arrangement import Arrangement, arrange
from megatron.training.shaping import Shaping, bytes_of_ranks

_MOST_CHANGES = 64


@dataclass(frozen=True)
class PlannedChange:
    """Behind `iteration`, to what, and bytes of the fullest rank from then on."""

    iteration: int
    arrangement: Arrangement
    num_bytes: float


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
    for iteration in range(args.freeze_start + args.freeze_interval, args.train_iters, args.freeze_interval):
        wanted = now if rule is None else now.with_frozen(max(now.num_frozen, rule.decide(least_at_the_end)))
        if shaping is not None:
            wanted, _ = shaping.decide(wanted, batches_left=args.train_iters - iteration)
        if wanted != now:
            arrange(args, wanted)
            found.append(PlannedChange(iteration, wanted, bytes_of_ranks(args)))
            now = wanted
        if len(found) == _MOST_CHANGES:
            break
    return found
