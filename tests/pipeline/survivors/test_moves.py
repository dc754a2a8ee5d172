"""Without a rank activations move where that is faster: proved, within memory, and never slower than without moves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import MOVES
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.completion import completed
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.survivors import ReplicaRank, Survivors, without
from megatron.pipeline.survivors.bound import drained_bound
from megatron.pipeline.survivors.order import Work, run
from megatron.pipeline.survivors.renaming import distinct, renamed
from megatron.pipeline.survivors.room import rooms_of
from megatron.pipeline.survivors.sharing import Sharing
from megatron.pipeline.survivors.table import Entry
from tests.pipeline.survivors.jobs import schedule_of

MOVING = {"pair": ("bpipe", {}), "host": ("flush", {"most_on_device": 3})}
LIMIT = 3  # microbatches on a rank, of both


def losses(num_replicas: int) -> st.SearchStrategy[frozenset[ReplicaRank]]:
    """One or two lost ranks of different pipeline ranks."""
    one = st.builds(ReplicaRank, st.integers(0, num_replicas - 1), st.integers(0, 3))
    return st.lists(one, min_size=1, max_size=2, unique_by=lambda each: each.rank).map(frozenset)


def left_of(way: str, lost: str, num_replicas: int = 4, **options: object) -> Survivors:
    name, choices = MOVING[way]
    ranks = list(map(ReplicaRank.parse, lost.split()))
    return without(schedule_of(name, 4, **choices), 8, num_replicas=num_replicas, lost=ranks, **options)


@pytest.mark.full
@settings(deadline=None, max_examples=12)
@given(st.sampled_from(sorted(MOVING)), st.integers(4, 9), st.integers(2, 3), st.data())
def test_it_is_proved_within_memory_and_no_slower(way: str, num_microbatches: int, num_replicas: int, data):
    """For any number of batches, whatever the stages and the moves cost."""
    name, choices = MOVING[way]
    lost, recompute = data.draw(losses(num_replicas)), data.draw(st.booleans())
    of_stages = st.tuples(*[st.integers(1, 3)] * 4)
    costs = Costs(
        forward=data.draw(of_stages), backward=data.draw(of_stages),
        **dict.fromkeys(("evict", "load") if way == "pair" else ("swap_out", "swap_in"), data.draw(st.integers(0, 5))),
    )  # fmt: skip
    given = {"num_replicas": num_replicas, "lost": lost, "costs": costs}
    schedule = schedule_of(name, 4, recompute=recompute, **choices)
    left = without(schedule, num_microbatches, **given)
    check(left.schedule.build((num_replicas * num_microbatches,) * 2), max_saved_on_rank=(LIMIT,) * len(left.ranks))
    still = without(schedule_of("flush", 4, recompute=recompute), num_microbatches, most_held=LIMIT, **given)
    assert left.bound - 1e-9 <= left.seconds <= still.seconds and max(left.held) <= LIMIT


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), [("bpipe", 3, 4), ("bpipe", 4, 3), ("bpipe", 5, 4)])
def test_a_schedule_that_has_nothing_to_move_moves_nothing(name: str, num_ranks: int, num_microbatches: int):
    """Its ranks have no part that could, with all ranks and without some."""
    schedule = schedule_of(name, num_ranks)
    assert schedule.moves_activations and not schedule.evicting_ranks((num_microbatches,))
    for rank in range(num_ranks):
        left = without(schedule, num_microbatches, num_replicas=2, lost=[ReplicaRank(0, rank)])
        assert not left.schedule.moves_activations


def test_the_host_has_room_for_what_waits_there_while_no_rank_is_lost():
    """With 8 stages that is more than the rank itself may hold."""
    schedule = schedule_of("flush", 8, most_on_device=LIMIT)
    left = without(schedule, 16, num_replicas=3, lost=[ReplicaRank(0, 0)])
    assert left.bound <= left.seconds == 94 and max(left.held) == LIMIT


@pytest.mark.full
@settings(deadline=None, max_examples=12)
@given(st.sampled_from(sorted(MOVING)), losses(2), st.integers(0, 2**32 - 1))
def test_random_orders_with_moves_do_not_undercut_the_bound(way: str, lost: frozenset[ReplicaRank], seed: int):
    name, choices = MOVING[way]
    sharing, draws = Sharing(schedule_of(name, 4, **choices), 6, 2, lost), random.Random(seed)
    room, work, kept = rooms_of(sharing, LIMIT)[-1], Work(sharing, Costs()), 0
    bound, costs = drained_bound(sharing, Costs(), room.most), sharing.costs(Costs())
    for _ in range(30):
        caps = [draws.randint(1, 2 * LIMIT) for _ in work.rows]
        ordered = run(work, caps, draws.choice(work.priorities))
        if ordered is None or any(room.over(ordered.held)):
            continue
        program = completed(room.program(work.extent, work.instructions(ordered.rows)))
        assert max(check(program).peak_saved_on_rank) <= LIMIT
        assert simulate(program, costs).makespan >= bound
        kept += 1
    assert kept, "no order was timed"


@pytest.mark.parametrize(
    ("way", "lost", "seconds", "still"),
    [
        ("pair", "0.0", 43, 52),
        ("pair", "0.2", 40, 42),
        ("pair", "0.3", 42, 42),  # nobody takes what the first rank of this replica would have to send away
        ("pair", "0.0 1.1", 47, 52),
        ("host", "0.0", 39, 52),
        ("host", "0.3", 42, 42),
    ],
)
def test_what_moves_gain(way: str, lost: str, seconds: float, still: float):
    """Four replicas of 4 ranks and 8 microbatches, which take 33 with all ranks; as many are held in either case."""
    ranks = list(map(ReplicaRank.parse, lost.split()))
    left = left_of(way, lost)
    assert (left.seconds, without(schedule_of("flush", 4), 8, num_replicas=4, lost=ranks, most_held=LIMIT).seconds) == (
        seconds, still,
    )  # fmt: skip
    assert left.schedule.moves_activations == (seconds < still) and left.bound <= seconds


def test_pairs_are_of_one_replica_and_alive():
    """Both ranks of a pair name each other; the one whose pair is lost names none, and moves nothing."""
    left = left_of("pair", "1.0")
    pairs = {
        str(own): None if copy.pair is None else str(left.ranks[copy.pair])
        for own, copy in zip(left.ranks, left.schedule.copies, strict=True)
    }
    whole = {f"{replica}.{rank}": f"{replica}.{3 - rank}" for replica in range(4) for rank in range(4)}
    assert whole.pop("1.0") and pairs == whole | {"1.3": None}
    assert not any(each.kind in MOVES for each in left.schedule.program.rows[left.ranks.index(ReplicaRank(1, 3))])


@pytest.mark.parametrize("way", sorted(MOVING))
def test_a_loss_of_another_replica_is_the_same_program(way: str):
    """Renamed and read from the text of a store, it is to the letter what a search for this loss finds."""
    wanted = left_of(way, "2.0", num_replicas=3)
    known, replicas = distinct(wanted.lost, 3)
    assert renamed(left_of(way, " ".join(map(str, known)), 3), replicas).schedule.text == wanted.schedule.text
    name, choices = MOVING[way]
    schedule = schedule_of(name, 4, **choices)
    entry, packed = Entry.search(schedule, 8, num_replicas=3, lost=wanted.lost)
    read = entry.survivors(packed, Sharing(schedule, 8, 3, frozenset(wanted.lost)))
    assert read.schedule == wanted.schedule and read.schedule.moves_activations
    assert Program.from_csv(wanted.schedule.program.to_csv()) == read.schedule.program


@pytest.mark.parametrize(
    "choices", [{"balance": True}, pytest.param({"most_on_device": 3}, marks=pytest.mark.full)], ids=str
)
def test_2bw_moves_without_a_drain(choices: dict):
    """In the steady state a batch takes as long as with room for all."""
    given = {"lost": [ReplicaRank(0, 0)], "num_replicas": 2}
    left = without(schedule_of("2bw", 4, **choices), 6, **given)
    assert left.schedule.moves_activations and not left.schedule.drains_between_periods
    assert left.seconds == without(schedule_of("2bw", 4), 6, **given).seconds == left.bound == 36
    assert without(schedule_of("2bw", 4), 6, most_held=LIMIT, **given).seconds == 48
    assert max(left.held) <= LIMIT
