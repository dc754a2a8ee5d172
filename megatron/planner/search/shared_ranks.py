"""What a search does with ranks that share sequences (context parallelism) or experts.

It prices them, and this project's trainer trains neither. So they are considered where a user asks for them, and the
search says of what it keeps that nobody starts it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.refusals import OVERLAPPED, refuse_shares
from megatron.planner.memory.architecture import Architecture
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Choice, Kept, Rejected
from megatron.planner.search.rules import Training, clause
from megatron.planner.search.space import Space, offer, splits


def is_shared(choice: Choice) -> bool:
    """Whether this project's trainer does not train it: sequences are shared, or the model has experts."""
    return (choice.context or 1) > 1 or choice.expert is not None


def choices(space: Space, planner: Planner, choice: Choice) -> Iterator[Choice | Rejected]:
    """A choice of t and p with each number of ranks that share sequences and experts; and with the replicas that are
    left."""
    ranks = space.num_gpus // (choice.tensor * choice.pipeline)
    for context in space.context:
        given = replace(choice, context=None if space.context == (1,) else context)
        if ranks % context:
            yield Rejected(choice=given, reason=f"{ranks} ranks with the same layers do not divide by cp {context}")
            continue
        given = replace(given, data=ranks // context)
        if planner.model.experts is None:
            yield _refused(given, planner) or given
            continue
        for expert in space.expert:
            trial = replace(given, expert=expert, expert_tensor=space.expert_tensor)
            yield _refused(trial, planner) or trial


def _refused(choice: Choice, planner: Planner) -> Rejected | None:
    """What excludes it whatever the microbatch and the schedule."""
    if not is_shared(choice):
        return None
    try:
        configuration = Configuration(
            tensor=choice.tensor, pipeline=choice.pipeline, data=choice.data, micro_batch_size=1,
            global_batch_size=choice.data, sequence_parallel=splits_sequences(planner.model, choice),
            context=choice.context or 1, expert=choice.expert or 1, expert_tensor=choice.expert_tensor,
        )  # fmt: skip
        if planner.software.overlaps_experts and planner.model.experts is not None and choice.expert in (None, 1):
            raise ValueError("copies of tokens beside another microbatch take ep above 1")
        refuse_shares(planner.model, configuration, replace(planner.software, overlaps_experts=False))
    except ValueError as error:
        return Rejected(choice=choice, reason=clause(error))
    return None


def splits_sequences(model: Architecture, choice: Choice) -> bool:
    """Whether tensor ranks split what they have of a sequence."""
    return choice.tensor > 1 and model.sequence_length // (choice.context or 1) % choice.tensor == 0


def refuse_schedule(choice: Choice, training: Training, schedule: str) -> str | None:
    """What excludes a schedule for ranks that share so; in a clause."""
    if not is_shared(choice):
        return None
    if offer(schedule).residency is not None:
        return f"{schedule} is not modelled with ranks that share sequences or experts"
    if (choice.context or 1) > 1 and splits(offer(schedule)) and training.with_halves.saves_scores:
        return f"context parallelism needs flash attention, which the layers of {schedule} do not have"
    return None


def refuse_overlap(choice: Choice, planner: Planner, schedule: str) -> str | None:
    """What excludes a schedule where copies of tokens go beside another microbatch; in a clause."""
    if not planner.software.overlaps_experts or choice.expert is None:
        return None
    taken = OVERLAPPED[choice.pipeline > 1 :]
    if schedule in taken:
        return None
    return f"copies of tokens beside another microbatch take {' or '.join(taken)}, not {schedule}"


def sentences(kept: Iterable[Kept]) -> tuple[str, ...]:
    """What there is to know where a search kept some: that they are prices, of what the trainer does not train."""
    kept = list(kept)
    names = []
    if any((each.choice.context or 1) > 1 for each in kept):
        names.append("context parallelism (cp)")
    if any(each.choice.expert is not None for each in kept):
        names.append("experts (ep)")
    if not names:
        return ()
    return (
        f"{' and '.join(names)}: priced here and not trained by this project's trainer, which refuses the flags, so "
        "no script is written that would start a configuration with them; how near such prices came to published "
        "runs says docs/planner.md",
    )
