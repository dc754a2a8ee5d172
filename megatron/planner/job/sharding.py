"""Models that are split over replicas: ZeRO's stages 2 and 3. PyTorch calls stage 3 FSDP.

Stage 1 is the distributed optimizer, a separate field (`Configuration.distributed_optimizer`).
"""

from dataclasses import dataclass

STAGES = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A split of a model over replicas.

    Attributes:
        stage: 2: gradients and optimizer state; weights are gathered for the forward and kept for the backward (FSDP
            without resharding). 3: weights too, which are gathered for each use.
        shards: number of replicas that hold one copy of the model together; with several such groups each holds a copy
            (HSDP).
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
        """The frameworks' name for it."""
        return "FSDP (ZeRO-3)" if self.stage == 3 else "ZeRO-2"

    def refusal(self, *, pipeline: int, data: int, schedule: str, virtual: int, splits_optimizer: bool) -> str | None:
        """Why a configuration cannot be split in this way, with the remedy; None if it can."""
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
    """How a software gathers and keeps split weights.

    Attributes:
        keeps_shards: ranks keep their shard of the weights in the type of products beside the masters; else it is cast
            for each gather.
        by_matrix: each matrix is gathered and reduced in a collective of its own, and only some live at once; else a
            layer is gathered as a whole, while the one before is computed.
        gathers_to_recompute: whole layers that are recomputed are gathered for that, and again for their backward.
        copies: what is gathered arrives in one buffer, and weights are copied out of it.
        by_parts: the part of each replica in a collective is a tensor of its own, which the host makes and copies with
            a kernel each; it waits for the device before, so nothing hides that.
        keeps_last: the last layer stays gathered from its forward to its backward, which follows at once.
        keeps_batch: with stage 2 weights stay gathered for all microbatches of a batch; else for one.
    """

    keeps_shards: bool = True
    by_matrix: bool = False
    gathers_to_recompute: bool = False
    copies: bool = False
    by_parts: bool = False
    keeps_last: bool = True
    keeps_batch: bool = True


MEGATRON_FSDP = ShardingRuntime()
"""Megatron-Core's own: 16-bit weights and FP32 masters are both sharded, and weights are views of what is gathered."""

FSDP2 = ShardingRuntime(keeps_shards=False, copies=True, keeps_batch=False)
"""PyTorch's `fully_shard`, as torchtitan uses it: each layer, and embedding and head together; what stays gathered
after a forward is split again after its backward."""

DEEPSPEED = ShardingRuntime(by_matrix=True, gathers_to_recompute=True, copies=True, by_parts=True, keeps_last=False)
"""DeepSpeed of July 2021 (commit 1ff2574): each parameter is gathered by itself, before the module that has it, and
released behind it. `_allgather_param` synchronizes with the device, cuts the buffer into a list with the part of each
replica, and `torch.distributed.all_gather` copies part by part; likewise gradients."""
