"""The assignment of ranks to processes, which one process decides for all before the process group forms.

Problem: nodes may see different files, and each process knows only its own host.

Solution: every process writes its host and LOCAL_RANK into the job's store. The process with physical rank 0 decides
and writes the answer, so that all processes follow one decision.
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
"""A function: processes by physical rank -> logical rank by physical rank, and lines for the log.

Raises ValueError to refuse.
"""


@dataclass(frozen=True)
class RankDecision:
    """The decision: logical rank by physical rank, and lines for the log."""

    ranks: tuple[int, ...]
    lines: tuple[str, ...]


def exchange_ranks(
    store: Store, process: Process, decide: Decide, *, rank: int, world_size: int, timeout: timedelta
) -> RankDecision:
    """Call `decide` on physical rank 0, and return its decision on every rank.

    Collective: every rank of the job must call it, once for each `store`. A new process that takes the place of a lost
    rank gets the decision that was made before.

    Args:
        process: the place of this process.
        rank: the physical rank of this process, as the launcher numbered it.

    Raises:
        SameEverywhere: on every rank, if `decide` raises ValueError.
        OnThisRank: another process has ended, or did not call this function within `timeout`.
    """
    store = PrefixStore("placement", store)
    try:
        store.set(f"process/{rank}", json.dumps([process.host, process.local_rank]))
        if rank == 0 and not store.check(["answer"]):
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
