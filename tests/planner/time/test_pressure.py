"""What a short memory costs."""

from dataclasses import replace

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import Software
from megatron.planner.planner import in_one_gradient_buffer, slowed
from tests.planner.search.helper import gpt3, planner

TWO_BW = Configuration(pipeline=4, data=8, tensor=1, micro_batch_size=1, global_batch_size=64, schedule="2bw")


def two_bw(p: int) -> Schedule:
    return Schedule.preset("2bw", num_stages=p, data_parallel=True)


def test_a_slowed_rank_keeps_a_part_of_its_speed():
    """All that it computes, halves of backwards included, and nothing else."""
    costs = Costs(forward=[1.0, 1.0], backward=[2.0, 2.0], step=3.0)
    found = slowed(costs, [1], 0.5)
    assert found == replace(costs, forward=[1.0, 2.0], backward=[2.0, 4.0])
    halves = replace(costs, backward_input=[1.0, 1.0], backward_weight=[1.0, 1.0])
    found = slowed(halves, [0], 0.5)
    assert (found.backward_input, found.backward_weight) == ([2.0, 1.0], [2.0, 1.0])
    assert slowed(costs, [], 0.5) is costs


def test_one_buffer_waits_for_what_a_forward_does_not_hide():
    costs = Costs(forward=[1.0, 1.0], backward=[2.0, 2.0], step=[3.0, 3.0], reduce_grad=[0.5, 4.0])
    found = in_one_gradient_buffer(costs, two_bw(2))
    assert found == replace(costs, step=[3.0, 6.0], reduce_grad=[0.5, 1.0])


def test_a_stage_that_waits_for_a_slower_one_hides_more():
    costs = Costs(forward=[1.0, 2.0], backward=[2.0, 4.0], step=0.0, reduce_grad=[5.0, 5.0])
    assert in_one_gradient_buffer(costs, two_bw(2)).step == [5.0 - (6.0 - 2.0), 5.0 - 2.0]


def test_tied_embeddings_have_the_last_stage_wait_for_the_first_one():
    """Their sum needs the gradients of both, and the first one's come behind all other backwards."""
    costs = Costs(forward=[1.0] * 3, backward=[2.0] * 3, step=[3.0] * 3, reduce_grad=[0.5] * 3, reduce_embed=4.0)
    found = in_one_gradient_buffer(costs, two_bw(3))
    assert found.step == [3.0 + 3.5, 3.0, 3.0 + 4.0 + 0.5 + 4.0 - 1.0] and found.reduce_embed == 0


def test_one_buffer_takes_less_memory_and_no_less_time():
    """A gradient of each parameter; without replicas there is nothing to wait for."""
    model = replace(gpt3(16, 4096, 32), tied_embeddings=False)
    for configuration, waits in ((TWO_BW, True), (replace(TWO_BW, data=1), False)):
        nodes = Cluster(gpu="A100-80", nodes=4, gpus_per_node=configuration.data, bandwidth={"between_nodes": 400.0})
        asked = planner(model, nodes, Software())
        two = asked.estimate(configuration)
        one = asked.estimate(replace(configuration, single_gradient_buffer=True))
        for rank, other in zip(two.memory, one.memory, strict=True):
            assert rank.total - other.total == 4 * rank.num_parameters
        assert (one.seconds > two.seconds) == waits and one.seconds >= two.seconds


def test_one_buffer_is_of_2bw():
    for schedule, provisional in (("flush", "off"), ("2bw", "stage")):
        with pytest.raises(ValueError, match="single_gradient_buffer goes with 2bw whose weights are not predicted"):
            replace(TWO_BW, schedule=schedule, provisional=provisional, single_gradient_buffer=True)
