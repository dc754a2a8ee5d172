"""Ranks that share sequences or experts: how many there are of what, and what is refused."""

from dataclasses import replace

import pytest

from megatron.planner import Cluster, Configuration
from megatron.planner.job.configuration import Sharding
from megatron.planner.job.refusals import refuse_shares
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.memory.architecture import Latents, Windows
from megatron.planner.planner import Planner
from tests.planner.memory.expert_layers import shape_of

FLASH = replace(MEGATRON_CORE, flash_attention=True)


def configuration(**changes: object) -> Configuration:
    given = {"tensor": 2, "data": 4, "micro_batch_size": 1, "global_batch_size": 8, "sequence_parallel": True}
    return Configuration(**given | changes)


def test_counts_of_ranks():
    """Ranks that share sequences hold the same weights; those with the same experts are counted over all of a stage."""
    one = configuration(context=2, expert=8, expert_tensor=1)
    assert (one.num_gpus, one.replicas, one.expert_replicas, one.num_microbatches) == (16, 8, 2, 2)
    assert (one.degrees.data, one.degrees.world_size) == (8, 16)
    assert configuration(expert=4).expert_replicas == 1 and configuration().expert_replicas == 4


def test_gradients_are_reduced_where_only_ranks_of_sequences_share_weights():
    alone, shared = configuration(data=1), configuration(data=1, context=2)
    schedules = [each.pipeline_schedule(tied_embeddings=False) for each in (alone, shared)]
    assert [each.data_parallel for each in schedules] == [False, True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context": 0}, "context 0 is below 1"),
        ({"expert": 3}, "expert 3 times expert_tensor 2 does not divide the 8 ranks of a stage"),
        ({"expert": 8}, "expert 8 times expert_tensor 2 does not divide"),
        ({"expert_tensor": 0}, "expert 1 times expert_tensor 0"),
        ({"context": 2, "rank_mapping": "optimized"}, "rank mapping optimized does not know"),
        ({"context": 2, "schedule": "l2l"}, "context 2 does not go with l2l"),
    ],
)
def test_configurations_that_cannot_be(changes, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        configuration(**changes)
    assert "; " in str(refused.value)


@pytest.mark.parametrize(
    ("model", "changes", "software", "reason"),
    [
        ({"layers": (0, 0)}, {"context": 64}, FLASH, "sequences of 64 do not divide into two parts"),
        ({}, {"context": 16, "tensor": 8, "expert_tensor": 1}, FLASH, "the 4 tokens of a context parallel rank"),
        ({}, {"context": 2}, MEGATRON_CORE, "context parallelism over 2 ranks needs flash attention"),
        ({}, {"expert": 8, "expert_tensor": 1}, FLASH, "4 experts do not divide over 8 ranks"),
        ({}, {"expert_tensor": 1}, FLASH, "expert 1 with expert_tensor 1 would leave copies of an expert on the 2"),
        ({"ffn_hidden_size": 97}, {}, FLASH, "97 columns of an expert do not divide by expert_tensor 2"),
        ({}, {"sequence_parallel": False}, FLASH, "experts with tensor 2 need sequence parallelism"),
        (None, {"expert": 2}, FLASH, "expert is 2, and the model has no experts"),
        (None, {"expert_tensor": 1}, FLASH, "expert_tensor is 1, and the model has no experts"),
        ({}, {"schedule": "l2l", "virtual": 2}, FLASH, "l2l with experts is not modelled"),
    ],
)
def test_what_a_model_does_not_allow(model, changes, software, reason):
    shape = replace(shape_of(), experts=None) if model is None else shape_of(**model)
    with pytest.raises(ValueError, match=reason) as refused:
        refuse_shares(shape, configuration(**changes), software)
    assert "; " in str(refused.value)


@pytest.mark.parametrize(
    ("model", "gathers", "reason"),
    [
        ({"sinks": True}, True, "sinks by a2a alone, which has no price"),
        ({"windows": Windows(before=7)}, False, "windows by all_gather; give --cp-comm-type all_gather"),
        ({"latents": Latents(query_rank=0, key_rank=8, head=8, rotated=4, value=8)}, True, "latents by p2p; give"),
    ],
)
def test_attention_that_shares_sequences_in_one_way(model, gathers, reason):
    """It is Transformer Engine's; the other way is priced."""
    shape, shared = replace(shape_of(), **model), configuration(context=2)
    with pytest.raises(ValueError, match=reason):
        refuse_shares(shape, shared, replace(FLASH, gathers_keys=gathers))
    if not shape.sinks:
        refuse_shares(shape, shared, replace(FLASH, gathers_keys=not gathers))


def test_the_planner_asks():
    planner = Planner(shape_of(), Cluster(gpu="H100", nodes=1), software=MEGATRON_CORE)
    with pytest.raises(ValueError, match="flash attention"):
        planner.layers(configuration(context=2, data=2, global_batch_size=4))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"expert": 1}, "expert 1; give more"),
        ({"pipeline": 2, "data": 2, "expert": 2, "global_batch_size": 4}, "one stage on each rank"),
        ({"expert": 2, "recompute": "layer"}, "recompute layer; choose another"),
    ],
)
def test_copies_beside_another_microbatch(changes, match):
    """What megatron.core wants for them; else they may be."""
    overlapping = replace(FLASH, overlaps_experts=True)
    with pytest.raises(ValueError, match=match):
        refuse_shares(shape_of(), configuration(**changes), overlapping)
    refuse_shares(shape_of(), configuration(expert=2), overlapping)


def test_no_experts_beside_fsdp_or_in_eager_layers():
    """Neither is modelled; nor are ranks that share sequences beside weights that are split over replicas."""
    split = {"sharding": Sharding(stage=3, shards=4)}
    with pytest.raises(ValueError, match="experts whose weights are split over replicas"):
        refuse_shares(shape_of(), configuration(**split), FLASH)
    with pytest.raises(ValueError, match="context 2 beside weights that are split over replicas"):
        configuration(context=2, **split)
    for software in (replace(FLASH, keeps_every_other_product=True), replace(FLASH, fuses_elementwise=False)):
        with pytest.raises(ValueError, match=r"experts are modelled with megatron\.core's kernels"):
            refuse_shares(shape_of(), configuration(), software)
    refuse_shares(shape_of(), configuration(), replace(FLASH, fp8=True))
