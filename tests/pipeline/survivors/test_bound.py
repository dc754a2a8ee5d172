"""No order undercuts the bound: thousands of random ones of small jobs, and what is known by hand."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.completion import completed
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors import ReplicaRank
from megatron.pipeline.survivors.bound import drained_bound, steady_bound
from megatron.pipeline.survivors.order import Work, run
from megatron.pipeline.survivors.sharing import Sharing
from tests.pipeline.survivors.jobs import ACCEPTED, Job, jobs, schedule_of

DRAINED = tuple(name for name in ACCEPTED if name != "2bw")


def sharing_of(job: Job) -> Sharing:
    return Sharing(job.schedule, job.num_microbatches, job.num_replicas, job.lost)


@pytest.mark.full
@settings(deadline=None, max_examples=40)
@given(jobs(presets=DRAINED), st.integers(0, 2**32 - 1))
def test_random_orders_do_not_undercut_it(job: Job, seed: int):
    """Orders that begin what is ready by random numbers and hold any number of microbatches up to a limit, simulated.

    Each order is held to the bound for the number that it holds.
    """
    sharing, draws = sharing_of(job), random.Random(seed)
    work = Work(sharing, job.costs)
    costs, num_ranks = sharing.costs(job.costs), len(work.rows)
    bounds: dict[int, float] = {}
    for _ in range(12):
        caps = [draws.randint(1, 4) for _ in range(num_ranks)]
        ordered = run(work, caps, draws.sample(range(len(work.computations)), len(work.computations)))
        if ordered is None:
            continue
        held = max(ordered.held)
        bound = bounds.setdefault(held, drained_bound(sharing, job.costs, [held] * num_ranks))
        program = completed(Program.of(work.extent, work.instructions(ordered.rows)))
        assert simulate(program, costs).makespan >= bound - 1e-9


@settings(deadline=None, max_examples=40)
@given(jobs(presets=DRAINED))
def test_an_order_takes_as_long_as_its_simulation(job: Job):
    """Where transfers take no time and nothing is recomputed, the search's own time is exact."""
    job = replace(job, schedule=replace(job.schedule, recompute=False))
    costs = Costs(forward=job.costs.forward, backward=job.costs.backward)
    sharing = sharing_of(job)
    work = Work(sharing, costs)
    for ordered in (run(work), run(work, [2] * len(work.rows), work.priorities[0])):
        if ordered is not None:
            program = completed(Program.of(work.extent, work.instructions(ordered.rows)))
            assert ordered.seconds == simulate(program, sharing.costs(costs)).makespan


def one_loss(name: str, lost: str, num_microbatches: int = 8, num_replicas: int = 4, **choices: object) -> Sharing:
    return Sharing(
        schedule_of(name, 4, **choices), num_microbatches, num_replicas, frozenset([ReplicaRank.parse(lost)])
    )


@pytest.mark.parametrize(
    ("name", "lost", "held", "expected"),
    [
        # 11 microbatches of 3; the first gradient is back at 4 + 3 * 2, and 4 forwards fill 4 of that; behind the last
        # forward it takes 3 + 3 * 2, and three other backwards fill 6 of that
        ("flush", "3.0", 4, 33 + 6 + 3),
        # with room for all forwards there is nothing to wait for
        ("flush", "3.0", 32, 33),
        # the last rank waits for three forwards, and three backwards are behind its last one
        ("flush", "3.3", 4, 3 + 33 + 6),
        # gradients of halves: the first is back at 4 + 3; behind the last forward W of others fills the time
        ("zb-h1", "3.0", 4, 33 + 3),
    ],
)
def test_by_hand(name: str, lost: str, held: int, expected: float):
    sharing = one_loss(name, lost)
    assert drained_bound(sharing, Costs(), [held] * len(sharing.ranks)) == expected


def test_recomputes_hide_behind_gradients_on_their_way():
    """A recompute adds to a rank's work, and not to the time of a microbatch alone but at the last rank."""
    sharing = one_loss("gpipe", "3.0", num_microbatches=1, recompute=True)
    plain = one_loss("gpipe", "3.0", num_microbatches=1)
    costs, held = Costs(forward=1, backward=2, recompute=1), [2] * len(plain.ranks)
    alone, again = (drained_bound(each, costs, held) for each in (plain, sharing))
    assert again >= alone + 1


def test_what_is_held_bounds_the_steady_time():
    """Rank 0 holds a microbatch for 4 + 8 and has 11 of them in a batch: 33 with room for 4, 66 with room for 2."""
    sharing = one_loss("2bw", "3.0")
    assert max(sharing.held_undisturbed) == 4
    assert [steady_bound(sharing, Costs(), [held] * len(sharing.ranks)) for held in (8, 4, 2)] == [33, 33, 66]
