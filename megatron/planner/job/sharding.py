"""Models split over replicas: ZeRO stages 2 and 3. PyTorch calls stage 3 FSDP.

Stage 1 is the distributed optimizer, a separate field (`Configuration.distributed_optimizer`).
"""

from dataclasses import dataclass

STAGES = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A split of a model over replicas.

    Attributes:
        stage: the ZeRO stage. 2 splits gradients and optimizer state; weights are gathered for the forward and kept for
            the backward (FSDP without resharding). 3 also splits weights, which are gathered for each use.
        shards: number of replicas that together hold one copy of the model. With more replicas, several groups of this
            size hold a copy each (HSDP).

    Raises:
        ValueError: `stage` is not 2 or 3, or `shards` is below 2.
    """

    stage: int = 3
    shards: int

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"ZeRO's stage {self.stage} splits no weights and gradients; give 2 or 3")
        if self.shards < 2:
            raise ValueError(f"{self.shards} replicas split nothing; give 2 shards or more, or leave sharding out")

    @property
    def name(self) -> str:
        """The name that frameworks use for this sharding."""
        return "FSDP (ZeRO-3)" if self.stage == 3 else "ZeRO-2"

    def refusal(self, *, pipeline: int, data: int, schedule: str, virtual: int, splits_optimizer: bool) -> str | None:
        """Return the reason why a configuration cannot be split in this way, with the remedy; None if it can."""
        if pipeline > 1:
            return (
                f"weights are split over replicas (fully sharded, ZeRO-{self.stage}) and p is {pipeline}, of which the "
                "time of both together is not modelled; give p 1"
            )
        if data % self.shards:
            return f"{data} replicas do not divide into groups of {self.shards} shards; change one of them"
        if schedule != "flush" or virtual > 1:
            stages = f"{virtual} stages" if virtual > 1 else "one stage"
            return f"schedule {schedule} with {stages} on a rank does not split weights over replicas; give flush, v 1"
        if splits_optimizer:
            return "the optimizer is split by sharding already; leave the distributed optimizer out"
        return None


@dataclass(frozen=True, kw_only=True)
class ShardingRuntime:
    """How training software gathers and keeps split weights.

    Attributes:
        keeps_shards: ranks keep their shard of the weights in the dtype of matrix products, beside the masters. If not,
            the shard is cast for each gather.
        by_matrix: each matrix is gathered and reduced in a separate collective, and only some matrices live at once. If
            not, a whole layer is gathered while the layer before is computed.
        gathers_to_recompute: a whole layer that is recomputed is gathered for the recompute, and again for the
            backward.
        copies: gathered data arrive in one buffer, and weights are copied out of it.
        by_parts: each replica's part in a collective is a separate tensor, which the host makes and copies with one
            kernel. The host waits for the device before, so nothing hides this time.
        keeps_last: the last layer stays gathered from its forward to its backward, which follows at once.
        keeps_batch: with stage 2, weights stay gathered for all microbatches of a batch. If not, for one microbatch.
    """

    keeps_shards: bool = True
    by_matrix: bool = False
    gathers_to_recompute: bool = False
    copies: bool = False
    by_parts: bool = False
    keeps_last: bool = True
    keeps_batch: bool = True


MEGATRON_FSDP = ShardingRuntime()
"""Megatron-Core's FSDP: 16-bit weights and FP32 masters are both sharded. Weights are views of the gathered buffer."""

FSDP2 = ShardingRuntime(keeps_shards=False, copies=True, keeps_batch=False)
"""PyTorch's `fully_shard`, as torchtitan uses it. Each layer is a unit, and so are embedding and head together. Weights
that stay gathered after a forward are split again after its backward."""

DEEPSPEED = ShardingRuntime(by_matrix=True, gathers_to_recompute=True, copies=True, by_parts=True, keeps_last=False)
"""DeepSpeed of July 2021 (commit 1ff2574): each parameter is gathered separately, before its module runs, and released
after the module. `_allgather_param` synchronizes with the device and cuts the buffer into a list with each replica's
part, and `torch.distributed.all_gather` copies part by part. Gradients are treated in the same way."""
