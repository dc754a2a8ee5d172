"""Which process becomes which rank, decided by one process for all, before the process group forms.

Problem: nodes may see different files, and each process knows its own host only.

Solution: every process tells its host and LOCAL_RANK through the job's store. The process with physical rank 0 decides
and answers, so that all follow one decision.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from megatron.pipeline.placement.topology import Process
from megatron.pipeline.runtime.failure.agreement import wait_for_readers
from megatron.pipeline.runtime.failure.errors import OnThisRank, SameEverywhere

Decide = Callable[[Sequence[Process]], tuple[Sequence[int], Sequence[str]]]
"""Processes by physical rank -> logical rank by physical rank, and lines for the log. Raises ValueError."""


@dataclass(frozen=True)
class RankDecision:
    """What was decided: logical rank by physical rank, and lines for the log."""

    ranks: tuple[int, ...]
    lines: tuple[str, ...]


def exchange_ranks(
    store: Store, process: Process, decide: Decide, *, rank: int, world_size: int, timeout: timedelta
) -> RankDecision:
    """What `decide` says on physical rank 0, on every rank. Collective over the job's `store`, once.

    Args:
        process: this one.
        rank: its physical rank, as the launcher gave it.

    Raises:
        SameEverywhere: on every rank, what `decide` refused.
        OnThisRank: another process is gone, or did not come within `timeout`.
    """
    store = PrefixStore("placement", store)
    try:
        store.set(f"process/{rank}", json.dumps([process.host, process.local_rank]))
        if rank == 0:
            store.set("answer", json.dumps(_answer(store, decide, world_size, timeout)))
        store.wait(["answer"], timeout)
        answer = json.loads(store.get("answer"))
    except RuntimeError as error:
        raise OnThisRank(f"--rank-mapping: another process ended before ranks were given ({error})") from error
    wait_for_readers(store, rank, world_size)
    if "problem" in answer:
        raise SameEverywhere(answer["problem"])
    return RankDecision(tuple(answer["ranks"]), tuple(answer["lines"]))


def _answer(store: Store, decide: Decide, world_size: int, timeout: timedelta) -> dict:
    keys = [f"process/{each}" for each in range(world_size)]
    store.wait(keys, timeout)
    processes = [Process(*json.loads(text)) for text in store.multi_get(keys)]
    try:
        ranks, lines = decide(processes)
    except ValueError as error:
        return {"problem": str(error)}
    return {"ranks": list(ranks), "lines": list(lines)}
