"""What a search says of weights on the host (l2l): when they are offered, and that nothing else fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron.pipeline.program.lane_order import EAGER
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.search.offers import offer
from megatron.planner.search.outcome import Choice, Kept
from megatron.planner.search.rules import Training


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


def sentences(kept: Iterable[Kept]) -> tuple[str, ...]:
    """What there is to know where a search kept it."""
    kept = list(kept)
    if kept and all(is_hosted(each.choice.schedule) for each in kept):
        needed = min(each.estimate.host.needed_gib for each in kept)
        return (
            f"the model fits only with l2l, which keeps weights, gradients and optimizer in the hosts' memory, from "
            f"{needed:.3g} GiB a node on (docs/l2l.md)",
        )
    return ()
