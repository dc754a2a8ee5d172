"""What remains of 2bw's delay in what a search keeps: weights that are a batch old, or predicted from a part of it."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.planner.job.configuration import Configuration
from megatron.planner.search.offers import offer
from megatron.planner.search.outcome import Kept


def known_share(configuration: Configuration) -> Fraction:
    """The part of a batch from which the stage that knows least predicts its weights; 1: all of it.

    Without `provisional_reduce` a stage, or with the distributed optimizer the owner of a shard, reads the gradients of
    one replica.
    """
    read = configuration.provisional_microbatches
    if read is None:
        schedule = configuration.pipeline_schedule(tied_embeddings=False)
        read = configuration.num_microbatches - max(schedule.unread(configuration.num_microbatches))
    replicas = 1 if configuration.provisional_reduce else configuration.data
    return Fraction(read, configuration.num_microbatches * replicas)


def clause(configuration: Configuration) -> str | None:
    """What a row of predicted weights notes."""
    return f"predicts from {known_share(configuration)} of a batch" if configuration.predicts else None


def sentences(kept: Iterable[Kept]) -> tuple[str, ...]:
    """What there is to know of 2bw's weights where a search kept it."""
    modes = {each.choice.provisional == "off" for each in kept if offer(each.choice.schedule).policy == TWO_BW}
    found = []
    if True in modes:
        found.append(
            "2bw computes a batch at weights that are one batch old, which costs loss at the learning rates that flush "
            "bears; --2bw-provisional stage predicts them (docs/provisional.md)"
        )
    if False in modes:
        found.append(
            "2bw with provisional weights computes a batch at a prediction from the part of the batch before that is "
            "noted: the smaller, the noisier (docs/provisional.md)"
        )
    return tuple(found)
