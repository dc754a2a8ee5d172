"""Programs with weights on the host, for the checker's tests."""

from hypothesis import strategies as st

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.pipeline.check.oracle import verdict


def hosted(
    p: int, v: int, *, resident: int = 2, update: str = "deferred", stash: str = "device", **flags: bool
) -> Schedule:
    """l2l on p ranks with v stages each."""
    residency = Residency(resident, update, stash)
    return Schedule.preset("l2l", num_stages=p * v, num_virtual_stages=v, residency=residency, **flags)


def hosted_bounds(schedule: Schedule, batches: tuple[int, ...]) -> list[int]:
    """The saved microbatches of each stage: whole batches, but on the last stage of a rank as 1F1B's warm-up says."""
    p, v, m = schedule.num_ranks, schedule.num_virtual_stages, max(batches)
    last = [p - rank if v == 1 else 2 * (p - rank) - 1 for rank in range(p)]
    return [m] * (p * (v - 1)) + [min(m, each) for each in last]


def both_verdicts(program: Program, bounds: list[int] | None) -> str:
    """What the oracle says where lanes run as early as they can, and where as late; it counts boundaries, too."""
    bounds = bounds or [99] * program.num_stages
    return verdict(program, bounds) or verdict(program, bounds, lazy=True)


@st.composite
def hosted_cases(
    draw: st.DrawFn,
    *,
    max_ranks: int = 3,
    max_virtual: int = 4,
    max_microbatches: int = 4,
    max_batches: int = 2,
    stash: str = "device",
) -> tuple[Schedule, Program]:
    """A schedule and a program of it, at any place of a run."""
    schedule = hosted(
        draw(st.integers(1, max_ranks)),
        draw(st.integers(1, max_virtual)),
        resident=draw(st.integers(1, 3)),
        update=draw(st.sampled_from(("eager", "deferred"))),
        stash=stash,
        tied_embeddings=draw(st.booleans()),
        data_parallel=draw(st.booleans()),
    )
    batches = tuple(draw(st.lists(st.integers(1, max_microbatches), min_size=1, max_size=max_batches)))
    first_batch = draw(st.integers(0, 3))
    first_microbatch = draw(st.integers(first_batch, 20)) if first_batch else 0
    return schedule, schedule.build(batches, first_batch=first_batch, first_microbatch=first_microbatch)
