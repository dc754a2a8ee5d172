"""Evaluation: the loss on data that the run does not train on."""

from collections.abc import Callable

from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.auxiliary import ROUTER_LOSSES, loss_names
from megatron.trainer.arguments.flags.config import TrainConfig


def evaluate(
    engine: PipelineEngine, args: TrainConfig, agree_to_stop: Callable[[], bool], *, replicas_in_program: int = 1
) -> dict[str, float] | None:
    """The mean of each loss, by name, over `--eval-iters` batches of the full global batch size.

    It is the same on every rank.

    `engine`: drained, with the evaluation's iterators in its stages. `agree_to_stop`: called on all ranks after every
    batch; if it returns True, the evaluation is interrupted, and None is returned. `replicas_in_program`: the number of
    replicas whose microbatches the engine's program contains.
    """
    sums: dict[str, tuple[float, float]] = {}
    num_microbatches = full_batch(args) * replicas_in_program
    of_backwards = (*ROUTER_LOSSES.values(), *loss_names(args.mtp_num_layers))  # losses that only a backward computes
    for _ in range(args.eval_iters):
        for name, (batch_sum, batch_count) in engine.evaluate(num_microbatches).items():
            if name in of_backwards:
                continue
            numerator, denominator = sums.get(name, (0.0, 0.0))
            sums[name] = (numerator + batch_sum, denominator + batch_count)
        if agree_to_stop():
            return None
    return {name: numerator / max(denominator, 1.0) for name, (numerator, denominator) in sums.items()}


def full_batch(args: TrainConfig) -> int:
    """The number of microbatches of a batch of `--global-batch-size`."""
    return args.global_batch_size // args.batch_sizes.samples_per_microbatch
