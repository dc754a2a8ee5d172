"""Evaluation: forward only, with the newest weights, on data of its own. The pipeline must be drained."""

import argparse
from collections.abc import Callable

from megatron.pipeline.runtime.engine import PipelineEngine


def evaluate(
    engine: PipelineEngine, args: argparse.Namespace, agree_to_stop: Callable[[], bool]
) -> dict[str, float] | None:
    """Mean of each loss, by name, over `--eval-iters` batches of the full global batch size; the same on every rank.

    Args:
        engine: drained; its stage has the evaluation's iterator.
        agree_to_stop: collective question after every batch, whether any rank wants to stop.

    Returns None if the evaluation was broken off.
    """
    sums: dict[str, tuple[float, float]] = {}
    num_microbatches = _num_microbatches(args)
    for _ in range(args.eval_iters):
        for name, (batch_sum, batch_count) in engine.evaluate(num_microbatches).items():
            numerator, denominator = sums.get(name, (0.0, 0.0))
            sums[name] = (numerator + batch_sum, denominator + batch_count)
        if agree_to_stop():
            return None
    return {name: numerator / max(denominator, 1.0) for name, (numerator, denominator) in sums.items()}


def evaluation_samples(args: argparse.Namespace) -> int:
    """Samples over all replicas that one evaluation takes."""
    return args.eval_iters * _num_microbatches(args) * args.batch_sizes.samples_per_microbatch


def _num_microbatches(args: argparse.Namespace) -> int:
    return args.global_batch_size // args.batch_sizes.samples_per_microbatch
