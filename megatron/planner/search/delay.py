"""Notes of a search on delayed weights: the cost of the delay, and the part of a batch that predictions use."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.planner.job.configuration import Configuration
from megatron.planner.search.outcome import Kept, Outcome
from megatron.planner.search.space import delayed as delayed_names
from megatron.planner.search.space import offer


def known_share(configuration: Configuration) -> Fraction:
    """The fraction of a batch from which the stage with the fewest gradients predicts its weights; 1: the whole batch.

    Without `provisional_reduce`, a stage reads the gradients of one replica only; so does the owner of a shard with
    the distributed optimizer.
    """
    read = configuration.provisional_microbatches
    if read is None:
        schedule = configuration.pipeline_schedule(tied_embeddings=False)
        read = configuration.num_microbatches - max(schedule.remaining_backwards(configuration.num_microbatches))
    replicas = 1 if configuration.provisional_reduce else configuration.data
    return Fraction(read, configuration.num_microbatches * replicas)


def clause(configuration: Configuration) -> str | None:
    """The note on a configuration with predicted weights, as a clause; None: it does not predict."""
    if configuration.provisional_microbatches == 0:
        return "takes the last update twice"
    return f"predicts from {known_share(configuration)} of a batch" if configuration.predicts else None


def is_delayed(schedule: str, configuration: Configuration) -> bool:
    """Whether a configuration of this schedule (a name of `offered`) misses updates and does not predict weights."""
    return not configuration.predicts and bool(delayed_names((schedule,)))


def sentence(kept: Iterable[Kept]) -> str | None:
    """A sentence on the cost of delayed weights; None if no configuration computes at delayed weights."""
    names = (each.choice.schedule for each in kept if is_delayed(each.choice.schedule, each.estimate.configuration))
    delayed = list(dict.fromkeys(names))
    if not delayed:
        return None
    cost = (
        f"with {' and '.join(delayed)}, gradients are taken at weights from before the last update: at a learning rate "
        "that flush bears, 2bw ended with 18% more validation loss (docs/convergence.md); lower it"
    )
    if not any(offer(name).policy == TWO_BW for name in delayed):
        return cost
    return f"{cost}, or add --2bw-provisional stage, which predicts them (docs/provisional.md)"


def beside(outcome: Outcome) -> str | None:
    """A sentence on the gain of schedules beside the ranking; None if there are none."""
    gains = [(each, outcome.gain(each)) for rank, each in outcome.best_of_schedules() if rank is None]
    if not gains:
        return None
    names = ",".join(each.choice.schedule for each, _ in gains)
    if outcome.best is None:
        found = f"{names} would fit"
    else:
        found = "against the best " + ", ".join(
            f"{each.choice.schedule} would be {_compared(gain)}" for each, gain in gains
        )
    return f"beside the ranking stands what delays weights: {found}; --schedules {names} ranks them"


def _compared(gain: float) -> str:
    percent = f"{100 * abs(gain):.1f}%"
    return "as fast" if percent == "0.0%" else f"{percent} {'faster' if gain > 0 else 'slower'}"


def sentences(kept: Iterable[Kept]) -> tuple[str, ...]:
    """The notes on the weights of kept schedules."""
    kept = list(kept)
    found = [sentence(kept)]
    configurations = [each.estimate.configuration for each in kept]
    if any(each.predicts and each.provisional_microbatches != 0 for each in configurations):
        found.append(
            "2bw with provisional weights computes a batch at a prediction from the part of the batch before that is "
            "noted: the smaller, the noisier (docs/provisional.md)"
        )
    return tuple(filter(None, found))
