"""What a search says of weights on the host (l2l): when they are offered, and that nothing else fits."""

from __future__ import annotations

from dataclasses import replace

from megatron.pipeline.program.lane_order import EAGER
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.search.outcome import Choice, Outcome
from megatron.planner.search.rules import Training
from megatron.planner.search.space import offer


def is_hosted(schedule: str) -> bool:
    """Whether a name of `offered` keeps weights on the host."""
    return offer(schedule).residency is not None


def refuse(cluster: Cluster, choice: Choice) -> str | None:
    """What excludes such a schedule whatever the microbatch; in a clause."""
    if cluster.host_memory_gib is None:
        return f"{choice.schedule} needs the hosts' memory, which the cluster does not say (host_memory_gib)"
    if choice.distributed_optimizer:
        return f"{choice.schedule} has the optimizer on the host, and shards it over no devices"
    return None


def updated(configuration: Configuration, training: Training) -> Configuration:
    """The same with updates as training chooses them (`--l2l-update auto`): eager if nothing waits for the norm."""
    waits = training.clips_gradients or training.scales_loss
    return replace(configuration, host_update=EAGER) if configuration.is_hosted and not waits else configuration


def sentences(outcome: Outcome) -> tuple[str, ...]:
    """What there is to know where a search kept nothing else, of what it tried beside."""
    tried_others = any(_holds_others(each.choice.schedule) for each in outcome.rejected)
    if tried_others and outcome.kept and all(is_hosted(each.choice.schedule) for each in outcome.kept):
        needed = min(each.estimate.host.needed_gib for each in outcome.kept)
        return (
            f"the model fits only with l2l, which keeps weights, gradients and optimizer in the hosts' memory, from "
            f"{needed:.3g} GiB a node on (docs/l2l.md)",
        )
    return ()


def _holds_others(schedule: str | None) -> bool:
    """Whether a rejected choice names a schedule whose weights stay on devices."""
    return schedule is not None and not is_hosted(schedule)
