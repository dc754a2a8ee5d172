"""Losses that a run is ready for: ranks share out the searches, and each has the same program for the same loss."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from megatron.pipeline.runtime.failure.errors import OnThisRank, SameEverywhere
from megatron.pipeline.runtime.failure.membership import Membership
from megatron.pipeline.survivors import ReplicaRank, without
from megatron.pipeline.survivors.losses import double_losses, single_losses
from megatron.pipeline.survivors.table import Entry
from megatron.trainer.run import proved_losses
from megatron.trainer.run.proved_losses import ProvedLosses
from tests.pipeline.survivors.jobs import schedule_of

NUM_RANKS, NUM_REPLICAS, SIZE = 2, 3, 2
EVERY = [ReplicaRank(replica, rank) for replica in range(NUM_REPLICAS) for rank in range(NUM_RANKS)]


class Place:
    """A rank's place among those of a job that share a store, as `Membership` has it. `ranks`: of the epoch; None: the
    process is not in the job yet."""

    _timeout = 60.0
    await_keys = Membership.await_keys

    def __init__(
        self, store: HashStore, rank: int, ranks: Iterable[int] | None = range(len(EVERY)), alarm: str | None = None
    ) -> None:
        self.rank, self.world_size, self.alarm, self._store = rank, len(EVERY), alarm, store
        self.epoch = None if ranks is None else SimpleNamespace(ranks=tuple(ranks))

    def ask(self, question):
        return question(self._store)


SCHEDULE = schedule_of("zb-h1", NUM_RANKS)


def proving(place: Place, **changes) -> ProvedLosses:
    job = {"schedule": SCHEDULE, "size": SIZE, "num_replicas": NUM_REPLICAS, "place_size": 1, "minimum_speed": 0.0}
    return ProvedLosses(place, **{**job, **changes})


@pytest.fixture
def searched(monkeypatch) -> list[tuple[ReplicaRank, ...]]:
    """The losses that `Entry.search` has searched."""
    losses, search, lock = [], Entry.search, threading.Lock()

    def noted(*arguments, lost, **options):
        with lock:
            losses.append(tuple(lost))
        return search(*arguments, lost=lost, **options)

    monkeypatch.setattr(Entry, "search", noted)
    return losses


def proved_by_all(**changes) -> tuple[list[ProvedLosses], HashStore]:
    """A job of threads, each of which is a rank."""
    store = HashStore()
    places = [Place(store, rank) for rank in range(len(EVERY))]
    ranks = [proving(place, **changes) for place in places]
    with ThreadPoolExecutor(len(ranks)) as threads:
        try:
            for each in [threads.submit(rank.prove) for rank in ranks]:
                each.result(timeout=60)
        finally:
            for place in places:
                place.alarm = "a rank has failed"  # the others would wait for it
    return ranks, store


def test_ranks_agree_on_every_loss_of_one_and_two_ranks(searched):
    """Each distinct loss is searched once, and a process that joins later searches none. Programs are proved."""
    ranks, store = proved_by_all()
    assert sorted(searched) == sorted([*single_losses(NUM_RANKS), *double_losses(NUM_RANKS)])
    newcomer = proving(Place(store, 0, ranks=None))
    newcomer.prove()
    assert len(searched) == 6
    for lost in [(each,) for each in EVERY] + list(combinations(EVERY, 2)):
        found = [rank.of(lost) for rank in (*ranks, newcomer)]
        assert len({each.schedule.sha256 for each in found}) == 1 and all(rank.knows(rank.of(lost)) for rank in ranks)
        assert found[0].schedule.proofs and found[0].lost == lost and not {*lost} & {*found[0].ranks}
        if len(lost) == 1:
            direct = without(SCHEDULE, SIZE, num_replicas=NUM_REPLICAS, lost=lost)
            assert found[0].schedule == direct.schedule


def test_more_losses_are_searched_when_they_happen():
    """As without a table, and all ranks come to the same program."""
    ranks, _ = proved_by_all()
    lost = [ReplicaRank(0, 0), ReplicaRank(1, 1), ReplicaRank(2, 0)]
    direct = without(SCHEDULE, SIZE, num_replicas=NUM_REPLICAS, lost=lost)
    assert (
        not ranks[0].knows(ranks[0].of(lost))
        and ranks[0].of(lost).schedule == ranks[1].of(lost).schedule == direct.schedule
    )


def test_the_log_says_what_was_proved():
    """Times of single losses by pipeline rank, and the least and the most of two ranks."""
    ranks, _ = proved_by_all()
    single = [f"{ranks[0].of([ReplicaRank(0, rank)]).slowdown:.2f}" for rank in range(NUM_RANKS)]
    double = [ranks[0].of(lost).slowdown for lost in double_losses(NUM_RANKS)]
    assert f"by pipeline rank, a batch takes {' '.join(single)} times as long" in ranks[0].lines[0]
    assert f"without two ranks it takes {min(double):.2f} to {max(double):.2f} times as long" in ranks[3].lines[1]
    assert len(ranks[0].lines) == 2 and "end the job" not in " ".join(ranks[0].lines)


def test_two_replicas_cannot_lose_both_ranks_of_a_stage():
    """These losses are known to end the job, and the log counts them."""
    alone = proving(Place(HashStore(), 0, ranks=[0]), num_replicas=2)
    alone.prove()
    assert alone.lines[1].endswith("; 2 of 4 such losses end the job")
    with pytest.raises(ValueError, match="every replica has lost rank 1, so nobody holds the weights of stage 1"):
        alone.of([ReplicaRank(1, 1), ReplicaRank(0, 1)])


def test_a_start_does_not_take_long_for_losses_of_two_ranks(searched, monkeypatch):
    """Where they would, by the time of the others, they are left to the loss, and the log says so."""
    monkeypatch.setattr(proved_losses, "_MOST_SECONDS", 0.0)
    ranks, _ = proved_by_all()
    assert sorted(searched) == single_losses(NUM_RANKS)
    assert "programs without two ranks are made when these are lost: to prove all 4 now would" in ranks[0].lines[1]
    lost = [ReplicaRank(2, 0), ReplicaRank(0, 1)]
    assert not ranks[0].knows(ranks[0].of(lost)) and ranks[0].of(lost).schedule == ranks[5].of(lost).schedule


def test_a_speed_that_no_loss_keeps_is_refused():
    """All ranks know it, and none begins."""
    with pytest.raises(SameEverywhere, match=r"--minimum-speed 0.9: without a rank the job has at most 70% of "):
        proved_by_all(minimum_speed=0.9)


def test_a_loss_that_would_be_too_slow_is_a_warning():
    """Others leave the job fast enough, so it begins."""
    job = {"schedule": schedule_of("flush", 3), "size": 4}
    alone = proving(Place(HashStore(), 0, ranks=[0]), **job)
    alone.prove()
    speeds = [1 / alone.of([ReplicaRank(0, rank)]).slowdown for rank in range(3)]
    least = (min(speeds) + max(speeds)) / 2
    alone = proving(Place(HashStore(), 0, ranks=[0]), **job, minimum_speed=least)
    alone.prove()
    warnings = [line for line in alone.lines if line.startswith("warning: the loss of a rank ")]
    assert min(speeds) < max(speeds)
    assert len(warnings) == sum(each < least for each in speeds)


def test_a_schedule_that_goes_on_without_no_rank_is_refused():
    with pytest.raises(SameEverywhere, match="--go-on-without-lost-ranks: a run cannot go on without a rank where its"):
        proved_by_all(schedule=schedule_of("pipedream", NUM_RANKS), size=1)


def test_a_rank_that_is_lost_meanwhile_is_not_waited_for(searched):
    """Those that are left prove what it has not proved, and nothing else again."""
    place = Place(HashStore(), 1, alarm="rank 5 is lost: its process has ended")
    rank = proving(place)
    with pytest.raises(OnThisRank, match="rank 5 is lost: its process has ended"):
        rank.prove()
    place.epoch, place.alarm, before = SimpleNamespace(ranks=(1,)), None, list(searched)
    rank.prove()
    assert sorted(searched) == sorted([*single_losses(NUM_RANKS), *double_losses(NUM_RANKS)])
    assert before == searched[: len(before)] and not {*before} & {*searched[len(before) :]}
