"""Two lanes, each in order; a task waits for its lane and for what it names."""

from megatron.planner.sharded import GpuLane, Task, ends

C, N = GpuLane.COMPUTE, GpuLane.NETWORK


def test_lanes_run_side_by_side():
    """Neither waits for the other unless a task says so."""
    assert ends([Task(C, "a", 2.0), Task(N, "b", 3.0), Task(C, "c", 1.0)]) == [2.0, 3.0, 3.0]


def test_a_lane_is_in_order():
    """A task that could start is held up by the one before it in its lane."""
    tasks = [Task(C, "a", 5.0), Task(N, "b", 1.0, (0,)), Task(N, "c", 1.0)]
    assert ends(tasks) == [5.0, 6.0, 7.0]


def test_a_task_waits_for_all_that_it_names():
    tasks = [Task(C, "a", 1.0), Task(N, "b", 4.0), Task(C, "c", 1.0, (0, 1))]
    assert ends(tasks)[-1] == 5.0
