"""How replicas share a model, and what does not go with it."""

import pytest

from megatron.planner import Configuration
from megatron.planner.job.configuration import Sharding


def test_stages_and_shards():
    assert Sharding(shards=8).name == "FSDP (ZeRO-3)" and Sharding(stage=2, shards=8).name == "ZeRO-2"
    with pytest.raises(ValueError, match="ZeRO's stage 1 splits no weights and gradients; give 2 or 3"):
        Sharding(stage=1, shards=8)
    with pytest.raises(ValueError, match="1 replicas split nothing; give 2 shards or more, or leave sharding out"):
        Sharding(shards=1)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"pipeline": 2}, "and p is 2, of which the time of both together is not modelled; give p 1"),
        ({"data": 12, "global_batch_size": 12}, "12 replicas do not divide into groups of 8 shards"),
        ({"schedule": "2bw"}, "schedule 2bw with one stage on a rank does not split weights over replicas"),
        ({"distributed_optimizer": True}, "split by sharding already; leave the distributed optimizer out"),
    ],
)
def test_what_does_not_go_with_it(choices, reason):
    given = {"data": 8, "micro_batch_size": 1, "global_batch_size": 8}
    with pytest.raises(ValueError, match=reason):
        Configuration(**given | choices, sharding=Sharding(shards=8))
