"""Tables and JSON records of a memory estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from megatron.documents.tables import plain_table
from megatron.planner.memory.memory import GIB, MemoryParts, RankMemory

if TYPE_CHECKING:
    from rich.table import Table


def memory_table(memory: Sequence[RankMemory], *, plain: bool) -> Table:
    """A table with a row for each rank of a pipeline: parameters in millions, memory in GiB.

    `plain`: no lines and no colours.
    """
    rare = {name for name in ("deferred", "step") if not any(getattr(rank.parts, name) for rank in memory)}
    parts = [part.name for part in fields(MemoryParts) if part.name not in rare]
    several = any(len(rank.stages) > 1 for rank in memory)
    first = "rank: stages" if several else "stage"
    rows = [
        (
            f"{rank.rank}: {', '.join(map(str, rank.stages))}" if several else str(rank.rank),
            "+".join(map(str, rank.layers)), f"{rank.num_parameters / 1e6:.1f}",
            *(f"{getattr(rank.parts, name) / GIB:.2f}" for name in parts), f"{rank.total / GIB:.2f}",
            f"{rank.saved_microbatches} of {rank.bytes_per_microbatch / GIB:.3f}",
        )
        for rank in memory
    ]  # fmt: skip
    columns = (first, "layers", "params, M", *parts, "total", "saved microbatches")
    return plain_table(columns, rows, plain=plain, left=(first,))


def memory_as_dict(rank: RankMemory) -> dict:
    """A rank's estimate for JSON, in bytes."""
    return {
        "rank": rank.rank,
        "stages": list(rank.stages),
        "layers": list(rank.layers),
        "num_parameters": rank.num_parameters,
        "saved_microbatches": rank.saved_microbatches,
        "bytes_per_microbatch": rank.bytes_per_microbatch,
        **{f"{part.name}_bytes": getattr(rank.parts, part.name) for part in fields(MemoryParts)},
        "total_bytes": rank.total,
    }
