"""The flags of pretrain_gpt.py and pretrain_bert.py that say what a configuration says."""

from megatron.pipeline.program.lane_order import DEVICE
from megatron.pipeline.schedules import PRESETS
from megatron.placement.bandwidth import RecomputeScope
from megatron.planner.job.configuration import Configuration

_RECOMPUTE = {
    RecomputeScope.NONE: (),
    RecomputeScope.ATTENTION: ("--recompute-granularity", "selective"),
    RecomputeScope.LAYER: (
        "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
    ),
}  # fmt: skip


def prediction_words(configuration: Configuration) -> tuple[str, ...]:
    """How 2bw predicts its weights as words of a command line; none where it does not."""
    words = ["--2bw-provisional", configuration.provisional] if configuration.predicts else []
    if configuration.provisional_microbatches is not None:
        words += ["--2bw-provisional-microbatches", str(configuration.provisional_microbatches)]
    if configuration.provisional_reduce:
        words.append("--2bw-provisional-reduce")
    return tuple(words)


def hosting_words(configuration: Configuration) -> tuple[str, ...]:
    """How weights live on the host as words of a command line; none where they do not."""
    if not configuration.is_hosted:
        return ()
    words = ("--l2l-update", configuration.host_update, "--l2l-resident-stages", str(configuration.resident_stages))
    if configuration.stash != DEVICE:
        words += ("--l2l-stash", configuration.stash)
    return (*words, "--l2l-fetch", "shares") if configuration.gathers_fetch else words


def configuration_words(configuration: Configuration) -> tuple[str, ...]:
    """Degrees, batches, recompute scope, schedule and mapping as words of a command line."""
    sizes = {
        "--tensor-model-parallel-size": configuration.tensor,
        "--pipeline-model-parallel-size": configuration.pipeline,
        "--micro-batch-size": configuration.micro_batch_size,
        "--global-batch-size": configuration.global_batch_size,
        "--pipeline-schedule": configuration.schedule,
        "--rank-mapping": configuration.rank_mapping,
    }
    words = [str(part) for pair in sizes.items() for part in pair]
    if configuration.layers is not None and configuration.num_stages > 1:  # the layout says how many stages there are
        stages = "|".join("t" * count for count in configuration.layers)
        words += ["--pipeline-model-parallel-layout", f"E{stages}L"]
    elif configuration.virtual > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(configuration.virtual)]
    if configuration.balance and not PRESETS[configuration.schedule].balance:
        words.append("--balance-activations")
    if configuration.sequence_parallel:
        words.append("--sequence-parallel")
    if configuration.distributed_optimizer:
        words.append("--use-distributed-optimizer")
    return (
        *words,
        *prediction_words(configuration),
        *hosting_words(configuration),
        *_RECOMPUTE[configuration.recompute],
    )
