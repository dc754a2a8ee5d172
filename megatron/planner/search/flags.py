"""A configuration as flags of pretrain_gpt.py and pretrain_bert.py.

The flags are a dict of values. A search sets these values in a job's arguments to check the program's rules
(trainer/plan/command.py). They become words of a command line only to write or launch a command.
"""

from collections.abc import Mapping

from megatron.pipeline.program.lane_order import DEVICE
from megatron.pipeline.schedules import PRESETS
from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.activations import RecomputeScope

Flags = dict[str, int | str]
"""Value by flag; True for a switch."""

_RECOMPUTE: dict[RecomputeScope, Flags] = {
    RecomputeScope.NONE: {},
    RecomputeScope.ATTENTION: {"--recompute-granularity": "selective"},
    RecomputeScope.LAYER: {
        "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1,
    },
}  # fmt: skip


def prediction_flags(configuration: Configuration) -> Flags:
    """The flags of 2bw's predictions; empty without predictions."""
    flags: Flags = {"--2bw-provisional": configuration.provisional} if configuration.predicts else {}
    if configuration.provisional_microbatches is not None:
        flags["--2bw-provisional-microbatches"] = configuration.provisional_microbatches
    if configuration.provisional_reduce:
        flags["--2bw-provisional-reduce"] = True
    return flags


def gradient_flags(configuration: Configuration) -> Flags:
    """The flags of 2bw's gradient buffers; empty with two buffers, or for another schedule."""
    return {"--2bw-single-gradient-buffer": True} if configuration.single_gradient_buffer else {}


def hosting_flags(configuration: Configuration) -> Flags:
    """The flags of weights on the host; empty if weights are on devices."""
    if not configuration.is_hosted:
        return {}
    flags: Flags = {
        "--l2l-update": configuration.host_update,
        "--l2l-resident-stages": configuration.resident_stages,
    }
    if configuration.stash != DEVICE:
        flags["--l2l-stash"] = configuration.stash
    if configuration.gathers_fetch:
        flags["--l2l-fetch"] = "shares"
    return flags


def configuration_flags(configuration: Configuration) -> Flags:
    """The flags of degrees, batches, recompute scope, schedule and mapping."""
    flags: Flags = {
        "--tensor-model-parallel-size": configuration.tensor,
        "--pipeline-model-parallel-size": configuration.pipeline,
        "--micro-batch-size": configuration.micro_batch_size,
        "--global-batch-size": configuration.global_batch_size,
        "--pipeline-schedule": configuration.schedule,
        "--rank-mapping": configuration.rank_mapping,
    }
    if configuration.layers is not None and configuration.num_stages > 1:  # the layout says how many stages there are
        stages = "|".join("t" * count for count in configuration.layers)
        flags["--pipeline-model-parallel-layout"] = f"E{stages}L"
    elif configuration.virtual > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = configuration.virtual
    switches = {
        "--balance-activations": configuration.balance and not PRESETS[configuration.schedule].balance,
        "--sequence-parallel": configuration.sequence_parallel,
        "--use-distributed-optimizer": configuration.distributed_optimizer,
    }
    return {
        **flags,
        **{name: True for name, is_on in switches.items() if is_on},
        **prediction_flags(configuration),
        **gradient_flags(configuration),
        **hosting_flags(configuration),
        **_RECOMPUTE[configuration.recompute],
    }


def as_argv(flags: Mapping[str, int | str]) -> tuple[str, ...]:
    """The flags as words of a command line."""
    return tuple(str(part) for name, value in flags.items() for part in ((name,) if value is True else (name, value)))


def configuration_argv(configuration: Configuration) -> tuple[str, ...]:
    """`configuration_flags` as argv."""
    return as_argv(configuration_flags(configuration))
