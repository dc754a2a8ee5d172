"""What closed forms read off costs: by stage and edge, and of whole ranks."""

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.time.microbatch_flow import StageTimes


def test_edges_have_bytes_and_latency_where_ranks_differ():
    """Of `v` the two stages in the middle lie on one rank, between which nothing travels."""
    costs = Costs(bandwidth=2.0, forward_bytes=3.0, backward_bytes=1.0, latency=0.25)
    stages = StageTimes(costs, Schedule(order="merged-1f1b", weights="flush", num_stages=4, rank_of_stage=(0, 1, 1, 0)))
    assert stages.arrival_forward == [0.0, 1.75, 0.0, 1.75] and stages.arrival_backward == [0.75, 0.0, 0.75, 0.0]
    assert stages.occupation == 1.5
    assert stages.by_rank([1.0, 2.0, 4.0, 8.0]) == [9.0, 6.0]


def test_nothing_is_reduced_moved_or_predicted_unless_the_schedule_does():
    costs = Costs(step=2.0, predict=1.5, hold=0.5, reduce_grad=4.0, reduce_embed=1.0, evict=3.0, load=2.0)
    plain = StageTimes(costs, Schedule.preset("2bw", num_stages=4))
    assert not any(plain.reduce + plain.predict + plain.held(8) + plain.moves + plain.partial)
    assert plain.reduce_embed == 0 and plain.longest_update(8) == plain.longest_step == 2
    options = {"data_parallel": True, "tied_embeddings": True, "predict": True, "provisional_microbatches": 2}
    whole = StageTimes(costs, Schedule.preset("2bw", num_stages=4, **options))
    assert whole.reduce == [4.0] * 4 and whole.reduce_embed == 1 and whole.partial == [1.0, 0.0, 0.0, 1.0]
    assert whole.longest_step == 2 and whole.longest_update(8) == 4
    assert StageTimes(costs, Schedule.preset("bpipe", num_stages=4)).moves == [3.0] * 4


@pytest.mark.parametrize(("recompute", "work"), [(False, 3.0), (True, 4.0)])
def test_work_has_what_is_recomputed(recompute, work):
    """By the program: a layer's recomputation is in the backward already."""
    chosen = Schedule(order="1f1b", weights="flush", num_stages=2, recompute=recompute)
    assert StageTimes(Costs(recompute=1.0), chosen).work == [work, work]
