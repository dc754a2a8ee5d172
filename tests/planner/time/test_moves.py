"""Moves of saved activations: which part of them there is, and when they cost nothing."""

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.time.microbatch_flow import StageTimes, hides_moves, moving_parts


def test_moves_are_hidden_behind_one_computation():
    """As long as a forward they cost nothing, and 10% longer they do."""
    chosen = Schedule.preset("bpipe", num_stages=8)
    for evict, costs_time in ((1.0, False), (1.1, True)):
        assert hides_moves(StageTimes(Costs(evict=evict), chosen)) != costs_time
        found = simulate(chosen.build((24,)), Costs(evict=evict)).end
        assert (found > 1.003 * simulate(chosen.build((24,))).end) == costs_time


def test_moved_parts_are_what_exceeds_the_bound():
    """BPipe on 8 stages: 8, 7 and 6 microbatches in flight and a bound of 5; on 4 stages, 4 and a bound of 3."""
    assert moving_parts(Schedule.preset("bpipe", num_stages=8)) == [4 / 8, 3 / 7, 2 / 6, 0, 0, 0, 0, 0]
    assert moving_parts(Schedule.preset("bpipe", num_stages=4)) == [2 / 4, 0, 0, 0]
    assert moving_parts(Schedule.preset("flush", num_stages=8)) == [0.0] * 8
