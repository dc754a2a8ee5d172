"""Ranks that one process gives to all: one decision, and one sentence where there is none."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from megatron.pipeline.placement.topology import Process
from megatron.pipeline.runtime.failure.errors import OnThisRank, SameEverywhere
from megatron.pipeline.start_up.rank_exchange import RankDecision, exchange_ranks

PROCESSES = [Process("a", 0), Process("b", None), Process("a", 1)]


def exchange(decide, *, absent: int = 0, timeout: float = 30.0) -> list:
    """What each process gets or raises, in threads over one store; `absent` more processes never come."""
    store = HashStore()

    def run(rank: int) -> object:
        try:
            return exchange_ranks(
                store, PROCESSES[rank], decide, rank=rank, world_size=len(PROCESSES) + absent,
                timeout=timedelta(seconds=timeout),
            )  # fmt: skip
        except (SameEverywhere, OnThisRank) as error:
            return error

    with ThreadPoolExecutor(len(PROCESSES)) as threads:
        return list(threads.map(run, range(len(PROCESSES))))


def test_one_decision_is_everyones():
    """The first process alone decides, knowing all by physical rank; each gets all ranks and the lines."""
    asked = []

    def decide(processes):
        asked.append(list(processes))
        return [2, 0, 1], ["moved"]

    assert exchange(decide) == [RankDecision((2, 0, 1), ("moved",))] * 3
    assert asked == [PROCESSES]


def test_a_new_process_gets_what_was_decided():
    """One that comes later in the place of another, on another host, changes nothing; rank 0 does not decide again."""
    store, decisions = HashStore(), iter([[2, 0, 1], [0, 1, 2]])

    def run(rank: int, process: Process) -> RankDecision:
        return exchange_ranks(
            store, process, lambda processes: (next(decisions), []), rank=rank, world_size=len(PROCESSES),
            timeout=timedelta(seconds=30),
        )  # fmt: skip

    with ThreadPoolExecutor(len(PROCESSES)) as threads:
        decided = list(threads.map(run, range(len(PROCESSES)), PROCESSES))
    assert [run(rank, Process("other", 0)) for rank in (1, 0)] == decided[:2]


def test_a_refusal_is_the_same_sentence_everywhere():
    """What the first process refuses, every process raises."""

    def decide(processes):
        raise ValueError(f"host {processes[1].host} is not listed")

    found = exchange(decide)
    assert [str(error) for error in found] == ["host b is not listed"] * 3
    assert all(isinstance(error, SameEverywhere) for error in found)


def test_processes_do_not_wait_for_ever():
    """Where one does not come, nothing is decided, and each says so by itself."""
    asked, started = [], time.monotonic()
    found = exchange(asked.append, absent=1, timeout=1.0)
    assert all(isinstance(error, OnThisRank) for error in found) and not asked
    assert all(
        str(error).startswith("--rank-mapping: another process ended before ranks were given") for error in found
    )
    assert time.monotonic() - started < 20
