"""Jobs that lose ranks, for property tests: any preset that can go on, of few ranks, replicas and microbatches."""

from dataclasses import dataclass

from hypothesis import strategies as st

from megatron.pipeline.schedules import PRESETS, Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors import ReplicaRank

ACCEPTED = (
    "gpipe", "flush", "bpipe", "zb-h1", "zb-h2", "interleaved", "interleaved-zb", "zbv", "v-half", "v-min", "2bw",
)  # fmt: skip


_PREDICTIONS = (
    {}, {"predict": True, "reduce_partial": True}, {"predict": True, "provisional_microbatches": 0},
    {"predict": True, "reduce_partial": True, "provisional_microbatches": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A schedule of a replica, its microbatches, the replicas, the lost ranks, and costs."""

    schedule: Schedule
    num_microbatches: int
    num_replicas: int
    lost: frozenset[ReplicaRank]
    costs: Costs


def schedule_of(name: str, num_ranks: int, **choices: object) -> Schedule:
    virtual = 2 if PRESETS[name].interleaves else 1
    return Schedule.preset(
        name, num_stages=num_ranks * virtual, num_virtual_stages=virtual, data_parallel=True, **choices
    )


@st.composite
def jobs(draw: st.DrawFn, *, presets: tuple[str, ...] = ACCEPTED, most: int = 3, most_lost: int = 2) -> Job:
    """At most `most` ranks, replicas and microbatches, but for the fewest that a schedule takes."""
    num_ranks, num_replicas = draw(st.integers(1, most)), draw(st.integers(2, most))
    preset = draw(st.sampled_from(presets))
    predictions = draw(st.sampled_from(_PREDICTIONS)) if preset == "2bw" else {}
    schedule = schedule_of(
        preset, num_ranks, recompute=draw(st.booleans()), tied_embeddings=draw(st.booleans()), **predictions
    )
    sizes = [size for size in range(1, 2 * num_ranks + most) if schedule.accepts(size)]
    every = [ReplicaRank(replica, rank) for replica in range(num_replicas) for rank in range(num_ranks)]
    lost = {draw(st.sampled_from(every))}
    for _ in range(draw(st.integers(0, most_lost - 1))):
        other = draw(st.sampled_from(every))
        if sum(each.rank == other.rank for each in lost | {other}) < num_replicas:
            lost.add(other)
    of_stages = st.tuples(*[st.integers(1, 4)] * schedule.num_stages)
    of_edges = st.tuples(*[st.integers(0, 2)] * (schedule.num_stages - 1))
    costs = Costs(
        forward=draw(of_stages), backward=draw(of_stages), latency=draw(of_edges), forward_bytes=draw(of_edges),
        bandwidth=1.0,
    )  # fmt: skip
    return Job(schedule, sizes[draw(st.integers(0, min(most, len(sizes)) - 1))], num_replicas, frozenset(lost), costs)
