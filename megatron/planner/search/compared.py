"""What others reach without a pipeline, in words and for programs: weights split over replicas (FSDP, ZeRO-2 and 3).

This project's trainer does not train so. A search compares it, so that its user sees when no pipeline is the better
answer, and names who trains it; the best, and the script for it, are of what this project trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import Software
from megatron.planner.memory.memory import GIB

if TYPE_CHECKING:
    from megatron.planner.search.outcome import Kept, Outcome

TRAINED_BY = {3: ("torchtitan", "Megatron-FSDP", "DeepSpeed"), 2: ("Megatron-FSDP", "DeepSpeed")}
"""Systems that split so, by ZeRO's stage."""

MARGIN_OF_SPLIT, MARGIN_OF_WHOLE = 0.37, 0.2
"""By how much one must be faster to be called the better answer (docs/planner.md). Split weights: by more than the
largest error of a published run, ZeRO-3's of 37%; that covers how fast runs were predicted at most, 30% too fast. What
has whole weights, mostly a pipeline: by more than a fifth. It needs less, since 13 of 18 runs of split weights were
predicted too fast: most errors are in their favour already."""


@dataclass(frozen=True, kw_only=True)
class WithoutPipeline:
    """The fastest that fits. `estimate`: None where none does. `software`: what trains it. `missing_gib`: what the
    nearest misses then. `is_slowed`: some fit, and are left out since the allocator would slow them
    (`--avoid-pressure`)."""

    estimate: Estimate | None = None
    software: Software | None = None
    missing_gib: float | None = None
    is_slowed: bool = False

    @property
    def sequences_per_second(self) -> float:
        assert self.estimate is not None
        return self.estimate.configuration.global_batch_size / self.estimate.seconds


def describe(configuration: Configuration) -> str:
    """Such a configuration in few words."""
    sharding = configuration.sharding
    assert sharding is not None
    parts = [f"t={configuration.tensor}", f"d={configuration.data}"]
    if sharding.shards < configuration.data:
        parts.append(f"shards over {sharding.shards}")
    parts.append(f"microbatches of {configuration.micro_batch_size}")
    if configuration.recompute.value != "none":
        parts.append(f"recompute {configuration.recompute.value}")
    return f"{sharding.name}, {', '.join(parts)}"


def sentence(outcome: Outcome, *, has_script: bool) -> str | None:
    """The comparison, for the table, the page and the head of the script; None where nothing was compared.

    `has_script`: the best can be started (best.sh).
    """
    found = outcome.without_pipeline
    if found is None:
        return None
    if found.is_slowed:
        return (
            "without a pipeline nothing is left, weights split over replicas (FSDP) included: the allocator would slow "
            "what fits, and --avoid-pressure leaves that out"
        )
    if found.estimate is None:
        short = "" if found.missing_gib is None else f": the nearest misses {found.missing_gib:.1f} GiB"
        return f"without a pipeline nothing fits, weights split over replicas (FSDP) included{short}"
    estimate = found.estimate
    trained_by = TRAINED_BY[estimate.configuration.sharding.stage]
    gib = max(rank.total for rank in estimate.memory) / GIB
    text = (
        f"without a pipeline: {describe(estimate.configuration)} would take ~{estimate.seconds:.3g} s an iteration, "
        f"{found.sequences_per_second:.3g} sequences/s and {gib:.1f} GiB"
    )
    if estimate.under_pressure:
        text += " (slowed for want of memory)"
    if outcome.best is not None:
        text += f", {_compared(found, outcome)}"
    return (
        f"{text}; {', '.join(trained_by[:-1])} and {trained_by[-1]} train so, this project does not"
        + (", and best.sh starts the best that it trains" if outcome.best is not None and has_script else "")
    )  # fmt: skip


def _compared(found: WithoutPipeline, outcome: Outcome) -> str:
    """By sequences per second, with the fastest that was kept: the best for less memory is slow. It may have no
    pipeline either."""
    best: Kept = max(outcome.ranking, key=lambda each: each.sequences_per_second)
    ratio = found.sequences_per_second / best.sequences_per_second
    name = "best" if best is outcome.best else "fastest"
    part = f"{100 * abs(ratio - 1):.1f}%"
    text = f"{part} {'faster' if ratio > 1 else 'slower'} than the {name} here"
    if part == "0.0%":
        text = f"as fast as the {name} here"
    if found.software is not None and found.software.layers != best.layers:
        text += f" (with other layers: {found.software.layers}, not {best.layers})"
    if -MARGIN_OF_WHOLE <= ratio - 1 <= MARGIN_OF_SPLIT:
        return f"{text}, which is less than such predictions may be off (docs/planner.md)"
    if best.choice.pipeline == 1:
        return f"{text}, so {'split' if ratio > 1 else 'whole'} weights are the better answer"
    return f"{text}, so {'no' if ratio > 1 else 'a'} pipeline is the better answer"


def record(found: WithoutPipeline | None) -> dict | None:
    """The same for programs."""
    if found is None:
        return None
    if found.estimate is None:
        return {"fits": False, "missing_gib": found.missing_gib, **({"verdict": "slowed"} if found.is_slowed else {})}
    estimate, configuration = found.estimate, found.estimate.configuration
    return {
        "fits": True,
        "strategy": "fsdp",
        "trained_by": list(TRAINED_BY[configuration.sharding.stage]),
        "trained_here": False,
        "zero_stage": configuration.sharding.stage,
        "shards": configuration.sharding.shards,
        "tensor": configuration.tensor,
        "data": configuration.data,
        "transformer_impl": found.software and found.software.transformer_impl,
        "attention": found.software and found.software.attention,
        "micro_batch_size": configuration.micro_batch_size,
        "global_batch_size": configuration.global_batch_size,
        "recompute": configuration.recompute.value,
        "iteration_seconds": estimate.seconds,
        "sequences_per_second": found.sequences_per_second,
        "mfu": estimate.mfu,
        "memory_gib": max(rank.total for rank in estimate.memory) / GIB,
        "verdict": estimate.verdict.word,
    }
