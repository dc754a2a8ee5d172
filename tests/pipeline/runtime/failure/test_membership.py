"""Survivors agree on who is lost, whoever dies when; who is slow stays; who was thrown out finds out."""

import json
import signal
import threading
import time

import pytest
from torch.distributed import HashStore, TCPStore

from megatron.pipeline.runtime.failure.epochs import decided, first_record
from megatron.pipeline.runtime.failure.errors import OnThisRank
from megatron.pipeline.runtime.failure.heartbeats import LEFT, Member, Watch
from megatron.pipeline.runtime.failure.membership import Membership, takes_in
from tests.pipeline.runtime.failure.membership_cases import PATIENCE, Job, lose_at_random

TIMEOUT = 3.0
"""Of tests that judge seconds, and so are alone."""
PATIENT = 8.0
"""Of tests beside which others run: nobody is silent for so long without being lost."""


def test_a_killed_rank_is_missed_before_the_failure_timeout(tmp_path):
    """Its door proves its death; all others are in the next epoch, with one reason and everybody's note."""
    with Job(tmp_path, 4, timeout=10.0) as job:
        at = job.send(signal.SIGKILL, 2)
        assert job.wait_for([0, 1, 3]) - at < 10.0
        assert job.current == {
            "ranks": (0, 1, 3), "lost": {2: "its process has ended"}, "joined": (),
            "notes": {rank: f"note of {rank}" for rank in (0, 1, 3)},
        }  # fmt: skip


@pytest.mark.alone
def test_a_stopped_rank_is_lost_and_ends_when_it_wakes_up(tmp_path):
    """It is stopped before it writes something that lasts, and wakes up in a job that has gone on: it never writes."""
    with Job(tmp_path, 3, timeout=TIMEOUT) as job:
        job.tell("confirm", tmp_path / "latest", ranks=[1])
        at = time.monotonic()
        assert TIMEOUT - 0.5 <= job.wait_for([0, 2]) - at < TIMEOUT + 2
        job.tell("store", "key", "of the survivors", ranks=[0])
        assert job.hear(0) == b"of the survivors"
        job.send(signal.SIGCONT, 1)
        assert job.status(1) == 1
        lost = f"rank 1 was declared lost (no heartbeat for {TIMEOUT:g} s)"
        assert job.output(1).endswith(f" stops: {lost}, and the others went on with epoch 1 without it\n")
        assert not (tmp_path / "latest").exists()
        assert set(job.epochs) == {0, 1}


@pytest.mark.alone
@pytest.mark.parametrize(
    "seed", [12, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(50) if seed != 12)]
)
def test_losses_at_random_moments(tmp_path, seed):
    """Killed or stopped, alone or together, while the others agree: no two views of an epoch, and all in time.

    Under `--full` 200 losses.
    """
    assert lose_at_random(tmp_path, seed, num_losses=4, world_size=6, timeout=TIMEOUT) < TIMEOUT + 2


@pytest.mark.alone
def test_a_rank_that_holds_its_interpreter_stays(tmp_path):
    """It is silent for most of the failure timeout, is suspected, and comes late: nobody is lost."""
    with Job(tmp_path, 3, timeout=6.0) as job:
        job.tell("hold", 4, ranks=[1])
        job.tell("suspect", [1], "connection closed by peer", ranks=[0])
        job.wait_for([0, 1, 2])
        deadline = time.monotonic() + 20
        while 1 not in job.epochs and time.monotonic() < deadline:
            job.listen(1.0)
        job.wait_for([0, 1, 2])
        assert job.hear(1) == "held"
        assert job.current["lost"] == {} and set(job.epochs) == {0, 1}


@pytest.mark.alone
def test_a_rank_may_be_silent_for_as_long_as_it_has_announced(tmp_path):
    """It holds its interpreter longer than the failure timeout, and nobody is lost. Its death is noticed all the same,
    and a stop when the announced time is over."""
    with Job(tmp_path, 3, timeout=1.0) as job:
        job.tell("announce", 60, 3, ranks=[1])
        assert (job.hear(1), job.hear(1)) == ("announced", "held")
        job.tell("announce", 60, 60, ranks=[1])
        assert job.hear(1) == "announced"
        job.send(signal.SIGKILL, 1)
        job.wait_for([0, 2])
        assert job.current["lost"] == {1: "its process has ended"} and set(job.epochs) == {0, 1}
        job.tell("announce", 4, 60, ranks=[2])
        assert job.hear(2) == "announced"
        job.wait_for([0])
        assert job.current["lost"] == {2: "no heartbeat for 4 s"}


def test_a_suspicion_stands_beside_the_reason(tmp_path):
    with Job(tmp_path, 3, timeout=PATIENT) as job:
        job.send(signal.SIGSTOP, 2)
        job.tell("suspect", [2], "connection closed by peer in 1RECV_F3", ranks=[1])
        job.wait_for([0, 1])
        assert job.current["lost"] == {2: "no heartbeat for 8 s; rank 1: connection closed by peer in 1RECV_F3"}


def test_a_rank_that_leaves_is_not_lost(tmp_path):
    """Its process has ended, and nobody minds until the others agree on something else."""
    with Job(tmp_path, 3, timeout=PATIENT) as job:
        job.tell("leave", ranks=[2])
        assert job.status(2) == 0
        job.listen(1.5)
        job.listen(1.5)  # the first one heard the end of its pipe
        assert set(job.epochs) == {0}
        job.tell("agree", False, 60.0, ranks=[0, 1])
        job.wait_for([0, 1])
        assert job.current["lost"] == {2: "it has left the job"}


def test_a_new_process_joins_where_all_admit_it(tmp_path):
    """It takes the place of a lost one, at a border to which all come, and not in an agreement on a loss."""
    with Job(tmp_path, 4, timeout=PATIENT) as job:
        job.send(signal.SIGKILL, 1)
        job.wait_for([0, 2, 3])
        job.start(1)
        heard = {rank: () for rank in (0, 2, 3)}
        deadline = time.monotonic() + 30
        while set(heard.values()) != {(1,)} and time.monotonic() < deadline:
            job.tell("newcomers", ranks=heard)
            heard = {rank: job.hear(rank) for rank in heard}
        job.send(signal.SIGKILL, 3)
        job.wait_for([0, 2])
        job.tell("agree", True, 60.0, ranks=[0, 2])
        job.wait_for([0, 1, 2])
        assert job.current["joined"] == (1,) and job.current["lost"] == {} and set(job.current["notes"]) == {0, 2}
        job.send(signal.SIGKILL, 0)
        job.wait_for([1, 2])
        assert set(job.current["notes"]) == {1, 2}


@pytest.mark.alone
def test_a_group_is_lost_and_comes_back_as_a_whole(tmp_path):
    """Ranks 2 and 3 compute layers together: when one is killed the other ends, too. A new process waits for the other
    one; both are in one epoch."""
    with Job(tmp_path, 4, timeout=TIMEOUT, group_size=2) as job:
        job.send(signal.SIGKILL, 3)
        job.wait_for([0, 1])
        why = "rank 3, with which it computes its layers, is lost"
        assert job.current["lost"] == {2: why, 3: "its process has ended"}
        assert job.status(2) == 1
        assert job.output(2).endswith(
            f" stops: rank 2 was declared lost ({why}), and the others went on with epoch 1 without it\n"
        )

        def heard(until: tuple) -> tuple:
            found, deadline = (), time.monotonic() + (2 * TIMEOUT if not until else 30)
            while found != (until or None) and time.monotonic() < deadline:
                job.tell("newcomers", ranks=[0])
                found = job.hear(0)
            return found

        job.start(2)
        assert heard(()) == ()
        job.start(3)
        assert heard((2, 3)) == (2, 3)
        job.tell("agree", True, 60.0, ranks=[0, 1])
        job.wait_for([0, 1, 2, 3])
        assert job.current["joined"] == (2, 3) and job.current["lost"] == {}


@pytest.mark.alone
@pytest.mark.full
def test_a_process_that_was_taken_in_asks_no_more(tmp_path):
    """One that came into the job and is lost while its heart still beats is no newcomer behind that."""
    with Job(tmp_path, 3, timeout=TIMEOUT, patience=2.0) as job:
        job.send(signal.SIGKILL, 1)
        job.wait_for([0, 2])
        job.start(1)
        heard, deadline = (), time.monotonic() + 30
        while heard != (1,) and time.monotonic() < deadline:
            job.tell("newcomers", ranks=[0])
            heard = job.hear(0)
        job.tell("agree", True, 60.0, ranks=[0, 2])
        job.wait_for([0, 1, 2])
        job.tell("hang", 10 * PATIENCE, ranks=[1])
        time.sleep(0.5)
        job.tell("suspect", [1], "connection closed by peer", ranks=[0])
        job.wait_for([0, 2])
        for _ in range(10):
            job.tell("newcomers", ranks=[0])
            assert job.hear(0) == ()
            time.sleep(0.1)


@pytest.mark.alone
@pytest.mark.full
def test_no_group_is_left(tmp_path):
    """Each has lost a rank: the others end, and so does a new process that waits."""
    with Job(tmp_path, 4, timeout=TIMEOUT, group_size=2) as job:
        job.send(signal.SIGSTOP, 1, 2)
        for rank, with_whom in ((0, 1), (3, 2)):
            assert job.status(rank) == 1
            why = f"rank {with_whom}, with which it computes its layers, is lost"
            assert f"rank {rank} was declared lost ({why}), and no rank could continue\n" in job.output(rank)
        job.start(0)
        assert job.hear(0) == "no rank of epoch 1 is left to admit rank 0"


def test_nobody_is_left_to_take_a_new_process_in(tmp_path):
    """Whoever asks the store whether the job runs hears so as long as a process lives, or has left normally."""
    with Job(tmp_path, 2, timeout=PATIENT) as job:
        job.send(signal.SIGKILL, 0)
        job.wait_for([1])
        assert takes_in(job.store, timeout=PATIENT)
        job.send(signal.SIGKILL, 1)
        assert not takes_in(job.store, timeout=10 * PATIENCE)  # their doors prove it before
        job.start(0)
        assert job.hear(0) == "no rank of epoch 1 is left to admit rank 0"


def test_no_job_has_begun_or_its_host_is_cut_off():
    """Then nothing proves that its processes have ended, and their silence does."""
    store = HashStore()
    assert not takes_in(store, timeout=10 * PATIENCE)
    store.set("membership/epoch/0", json.dumps(first_record([Member(0, "token", "elsewhere", "127.0.0.1", 1, 1)])))
    store.set("membership/beat/token", "7")
    assert not takes_in(store, timeout=0.8)
    store.set("membership/beat/token", LEFT)
    assert takes_in(store, timeout=10 * PATIENCE)


def test_a_rank_that_lives_and_does_not_come_is_named(tmp_path):
    """It is not thrown out: the one that waited for it ends, and its death then ends the other's waiting."""
    with Job(tmp_path, 2, timeout=PATIENT) as job:
        job.tell("agree", False, 1.0, ranks=[0])
        assert job.hear(0) == "rank 0 waited 1 s to begin epoch 1; rank 1 did not come, though alive"
        assert job.status(0) == 3
        job.wait_for([1])


@pytest.mark.alone
def test_a_rank_that_hangs_is_lost_where_most_have_come(tmp_path):
    """Its heart beats, and its training thread never comes: after their patience the others go on without it, and it
    ends. One that is late, and comes before, stays."""
    patience = 6.0
    with Job(tmp_path, 4, timeout=TIMEOUT, patience=patience) as job:
        job.tell("hang", 2.0, ranks=[2])
        job.tell("hang", 10 * PATIENCE, ranks=[3])
        time.sleep(0.5)
        at = time.monotonic()
        job.tell("suspect", [1], "connection closed by peer", ranks=[0])
        assert patience <= job.wait_for([0, 1, 2]) - at < patience + 3
        assert job.current["lost"] == {3: "it did not come within 6 s, though alive"}
        assert job.status(3) == 1
        assert "process" in job.output(3) and "without it" in job.output(3)


def test_the_store_goes_with_its_host(tmp_path):
    """That ends the job, named as the failure guard names it."""
    with Job(tmp_path, 2, timeout=PATIENT) as job:
        job.store = None
        for rank in range(2):
            assert job.hear(rank) == (
                "rank 0 ended without an error message (killed, or crashed): it hosts the job's store, which is gone"
            )
            assert job.status(rank) == 3


# --- without processes ------------------------------------------------------------------------------------------------


def test_a_store_without_a_second_connection_is_refused():
    with pytest.raises(ValueError, match="opens no second connection to a store, which"):
        Membership(object(), 0, 2)


MEMBERS = [Member(rank, f"token{rank}", "host", "127.0.0.1", 1, 1) for rank in range(3)]
NEW = Member(2, "new", "host", "127.0.0.1", 1, 1)


def arrived(rank, admits=None):
    return {"kind": "arrived", "token": f"token{rank}", "note": "", "admits": admits}


def lost(rank):
    return {"kind": "lost", "token": f"token{rank}", "reason": "why"}


@pytest.mark.parametrize(
    ("log", "ranks"),
    [
        ([arrived(0), arrived(1)], None),
        ([arrived(0), arrived(1), arrived(2)], [0, 1, 2]),
        ([arrived(0), arrived(1), lost(2)], [0, 1]),
        ([arrived(0), arrived(2), lost(2), arrived(1)], [0, 1]),  # lost before all were there
        ([lost(2), arrived(2), arrived(0), arrived(1)], [0, 1]),  # woken up while the others agree
        ([arrived(0), arrived(1), arrived(2), lost(2)], [0, 1, 2]),  # lost after: the next epoch's affair
        ([arrived(0), lost(2), lost(1), arrived(1)], [0]),
        ([arrived(0), arrived(1), {**lost(2), "token": "of no member"}], None),
    ],
)
def test_the_order_of_the_log_decides(log, ranks):
    """So do its later lines nothing: whoever reads more of it decides the same."""
    record = decided(MEMBERS, log)
    assert (record and [member.rank for member in record["members"]]) == ranks
    if ranks is not None:
        later = [lost(0), lost(1), arrived(2), arrived(0, [list(NEW)])]
        assert decided(MEMBERS, log + later) == record


def test_an_alarm_goes_on_until_the_rank_comes():
    """What the training thread begins to wait for after the alarm is interrupted, too; in `agree` nothing is."""
    store, calls = TCPStore("127.0.0.1", 0, is_master=True), []
    membership = Membership(store, 0, 1, failure_timeout=PATIENT, on_alarm=calls.append)
    membership.begin()
    membership.suspect([], "a broken link")
    deadline = time.monotonic() + 60
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert membership.agree().number == 1 and membership.alarm is None
    num_calls = len(calls)
    time.sleep(1.0)
    assert len(calls) == num_calls >= 3
    membership.leave()


def test_newcomers_are_admitted_by_all():
    """One that only some have heard is in, one that somebody does not admit is not, nor one whose place is taken."""
    asks = [list(NEW)]
    for log, joined in (
        ([arrived(0, asks), arrived(1, []), lost(2)], [2]),
        ([arrived(0, asks), arrived(1, None), lost(2)], []),
        ([arrived(0, asks), arrived(1, asks), arrived(2, asks)], []),
    ):
        record = decided(MEMBERS, log)
        assert record["joined"] == joined
        assert (NEW in record["members"]) == bool(joined)


def test_a_watcher_that_was_held_up_accuses_nobody(monkeypatch):
    """Its own pause is not the others' silence."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = Watch(0.5)
    for now[0], heartbeat in ((0.5, "1"), (1.0, "2"), (100.0, "2")):
        watch.look({"a": heartbeat})
    assert watch.silence("a") <= 1.0
    for now[0] in (100.5, 101.0):
        watch.look({"a": "2", "b": "7", "c": LEFT})
    assert watch.silence("a") == 2.0 and watch.silence("b") == 0.5 and watch.silence("c") == 0.0
    assert watch.has_left("c") and not watch.is_heard("b")


@pytest.mark.parametrize("where", ["look", "question"])
def test_what_the_thread_cannot_read_fails_on_this_rank(monkeypatch, where):
    """Its training thread hears of it at once and cannot wait any more: the others would declare it lost."""
    printed, heard = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda told: printed.append(told.exc_type))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    membership = Membership(store, 0, 1, on_alarm=lambda sentence: heard.set())
    membership.begin(PATIENCE)
    if where == "look":
        store.set("membership/joins", "no JSON")
    else:
        with pytest.raises(OnThisRank, match=r"^rank 0 cannot go on reading the job's store: KeyError: 'no such'$"):
            membership.ask(lambda store: {}["no such"])
    assert heard.wait(PATIENCE) and "rank 0 cannot go on reading the job's store" in membership.alarm
    with pytest.raises(OnThisRank, match=r"rank 0 cannot go on reading the job's store: (JSONDecode|Key)Error"):
        membership.agree()
    membership.leave()
    assert printed == [json.JSONDecodeError if where == "look" else KeyError]
