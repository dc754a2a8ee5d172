"""What the part `config` of an entry says of weights that are split over replicas, by the names that frameworks have.

    fsdp                          true, or over how many replicas: fully sharded (torchtitan, Megatron-FSDP)
    data_parallel_shard_degree    the same number, in torchtitan's words
    zero                          2 or 3: ZeRO's stage, over all replicas (DeepSpeed)
    reshard_after_forward         false: weights stay gathered from their forward on, which is stage 2

Other keys for it are refused (not_modelled.py).
"""

from pydantic_core import PydanticCustomError

from megatron.documents.faults import shown
from megatron.planner.job.sharding import Sharding

_MOST = 10_000_000


def true_or_replicas(value: object) -> object:
    """A value of `fsdp`. Raises pydantic's error."""
    if isinstance(value, bool) or (type(value) is int and 0 <= value <= _MOST):
        return value
    raise PydanticCustomError("int_type", "true or a number of replicas is wanted")


def sharding_of(
    *, fsdp: bool | int | None, zero: int, reshards: bool | None, data: int
) -> Sharding | None:  # fmt: skip
    """How it is split; None: it is not. Raises ValueError where two keys do not agree."""
    is_on = fsdp is not None and fsdp is not False and not (fsdp == 1 and fsdp is not True)
    if not is_on and zero < 2:
        if reshards is not None:
            raise ValueError("config.reshard_after_forward is given without fsdp; give config.fsdp, or leave it out")
        return None
    if is_on and zero in (1, 2):
        raise ValueError(
            f"config.fsdp is {shown(fsdp)} and config.zero {zero}, which are two ways to split; leave one out, and say "
            "reshard_after_forward false for weights that stay gathered"
        )
    shards = data if fsdp is True or not is_on else int(fsdp)
    if shards > data:
        raise ValueError(f"config.fsdp is {shards}, and there are {data} replicas; correct one of them")
    if shards == 1:
        raise ValueError("weights are split over replicas, and there is one; give more GPUs, or leave that out")
    stage = 2 if reshards is False or zero == 2 else 3
    return Sharding(stage=stage, shards=shards)
