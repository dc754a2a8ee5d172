"""What an entry says of weights that are split, and what does not agree."""

import pytest

from megatron.planner.job.sharding import Sharding
from megatron.planner.published.entries import Unpredictable, read_entry
from tests.planner.published.measured import changed
from tests.planner.published.test_sharded_runs import TORCHTITAN

RUN = changed(TORCHTITAN[2], config={"fsdp": None})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None), ({"fsdp": False}, None), ({"fsdp": 1}, None), ({"zero": 1}, None), ({"zero": 0}, None),
        ({"fsdp": True}, (3, 128)), ({"fsdp": 128}, (3, 128)), ({"data_parallel_shard_degree": 8}, (3, 8)),
        ({"fsdp": 8}, (3, 8)), ({"zero": 3}, (3, 128)), ({"zero_stage": 2}, (2, 128)),
        ({"fsdp": 8, "reshard_after_forward": False}, (2, 8)), ({"fsdp": 8, "reshard_after_forward": True}, (3, 8)),
        ({"fsdp": 64, "t": 2}, (3, 64)), ({"fsdp": True, "t": 2}, (3, 64)), ({"fsdp": 8, "zero": 3}, (3, 8)),
    ],
)  # fmt: skip
def test_what_is_split(config, expected):
    entry = read_entry(changed(RUN, config=config))
    sharding = None if expected is None else Sharding(stage=expected[0], shards=expected[1])
    assert entry.configuration.sharding == sharding
    assert entry.configuration.distributed_optimizer == (config.get("zero") == 1)


def test_replicas_as_many_as_shards():
    """Where nothing else says how many GPUs there are."""
    entry = read_entry(changed(RUN, config={"fsdp": 128}, hardware={"gpus": None}))
    assert entry.configuration.data == 128 and "128 replicas, as many as shards" in entry.assumed


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"fsdp": 256}, "config.fsdp is 256, and there are 128 replicas; correct one of them"),
        ({"fsdp": 24}, "128 replicas do not divide into groups of 24 shards; change one of them"),
        ({"fsdp": 8, "zero": 2}, "config.fsdp is 8 and config.zero 2, which are two ways to split; leave one out"),
        ({"fsdp": 8, "zero": 1}, "config.fsdp is 8 and config.zero 1, which are two ways to split; leave one out"),
        ({"fsdp": 8, "zero1": True}, "leave the distributed optimizer out"),
        ({"fsdp": 8, "data_parallel_shard_degree": 16}, "which are names of one thing; leave one out"),
        ({"zero": 3, "zero_stage": 2}, "config.zero is 3 and config.zero_stage 2, which are names of one thing"),
        ({"reshard_after_forward": False}, "config.reshard_after_forward is given without fsdp; give config.fsdp"),
        ({"fsdp": 64, "p": 2}, "p is 2, of which the time of both together is not modelled; give p 1"),
        ({"fsdp": 8, "schedule": "gpipe"}, "schedule gpipe with one stage on a rank does not split weights"),
        ({"fsdp": -8}, "config.fsdp is -8"),
        ({"fsdp": 8, "technique": "compile+zigzag"}, "config.technique is 'zigzag', which is no technique"),
    ],
)  # fmt: skip
def test_what_does_not_agree(config, reason):
    found = read_entry(changed(RUN, config=config))
    assert isinstance(found, Unpredictable) and reason in found.reason


def test_one_replica_splits_nothing():
    alone = changed(RUN, config={"zero": 3, "global_batch": 2}, hardware={"gpus": 1})
    assert "and there is one; give more GPUs, or leave that out" in read_entry(alone).reason
