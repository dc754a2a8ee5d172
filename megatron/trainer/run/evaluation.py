"""The loss on data that are not trained on."""

from collections.abc import Callable

from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.auxiliary import ROUTER_LOSSES, loss_names
from megatron.trainer.arguments.flags.config import TrainConfig


def evaluate(
    engine: PipelineEngine, args: TrainConfig, agree_to_stop: Callable[[], bool], *, replicas_in_program: int = 1
) -> dict[str, float] | None:
    """Mean of each loss, by name, over `--eval-iters` batches of the full global batch size; the same on every rank.

    `replicas_in_program`: how many replicas' microbatches are those of the engine's program.
    `engine`: drained, and its stages have the evaluation's iterators. `agree_to_stop`: asked on all ranks after every
    batch, whether any rank wants to stop; then the evaluation is broken off, and None is returned.
    """
    sums: dict[str, tuple[float, float]] = {}
    num_microbatches = full_batch(args) * replicas_in_program
    of_backwards = (*ROUTER_LOSSES.values(), *loss_names(args.mtp_num_layers))  # which nothing has without a backward
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
