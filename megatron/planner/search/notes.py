"""Notes of a search: sentences on what a table of configurations does not show.

They tell the cost of delayed weights and the part of a batch from which predictions are made, compare the best with
training without a pipeline, and say where configurations differ in their layers or fit only with weights on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.planner.job.configuration import Configuration
from megatron.planner.search.outcome import Kept, Outcome, WithoutPipeline
from megatron.planner.search.rules import is_hosted
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


def delay_clause(configuration: Configuration) -> str | None:
    """The note on a configuration with predicted weights, as a clause; None: it does not predict."""
    if configuration.provisional_microbatches == 0:
        return "takes the last update twice"
    return f"predicts from {known_share(configuration)} of a batch" if configuration.predicts else None


def is_delayed(schedule: str, configuration: Configuration) -> bool:
    """Whether a configuration of this schedule (a name of `offered`) misses updates and does not predict weights."""
    return not configuration.predicts and bool(delayed_names((schedule,)))


def delay_sentence(kept: Iterable[Kept]) -> str | None:
    """A sentence on the cost of delayed weights; None if no configuration computes at delayed weights."""
    names = (each.choice.schedule for each in kept if is_delayed(each.choice.schedule, each.estimate.configuration))
    delayed = list(dict.fromkeys(names))
    if not delayed:
        return None
    cost = (
        f"with {' and '.join(delayed)}, gradients are computed at weights from before the last update: at a learning "
        "rate at which flush is stable, 2bw ended with an 18% higher validation loss (docs/convergence.md); lower the "
        "learning rate"
    )
    if not any(offer(name).policy == TWO_BW for name in delayed):
        return cost
    return f"{cost}, or add --2bw-provisional stage, which predicts the weights (docs/provisional.md)"


def sentences_on_weights(kept: Iterable[Kept]) -> tuple[str, ...]:
    """The notes on the weights of kept schedules."""
    kept = list(kept)
    found = [delay_sentence(kept)]
    configurations = [each.estimate.configuration for each in kept]
    if any(each.predicts and each.provisional_microbatches != 0 for each in configurations):
        found.append(
            "2bw with provisional weights predicts the weights of a batch from a part of the batch before, which the "
            "notes give; a smaller part gives noisier predictions (docs/provisional.md)"
        )
    return tuple(filter(None, found))


def beside_ranking(outcome: Outcome) -> str | None:
    """A sentence on the gain of schedules beside the ranking; None if there are none."""
    gains = [(each, outcome.gain(each)) for rank, each in outcome.best_of_schedules() if rank is None]
    if not gains:
        return None
    names = ",".join(each.choice.schedule for each, _ in gains)
    if outcome.best is None:
        found = f"{names} would fit"
    else:
        found = "compared with the best, " + ", ".join(
            f"{each.choice.schedule} would be {_compared(gain)}" for each, gain in gains
        )
    return f"schedules with delayed weights stand beside the ranking: {found}; --schedules {names} ranks them"


def _compared(gain: float) -> str:
    percent = f"{100 * abs(gain):.1f}%"
    return "as fast" if percent == "0.0%" else f"{percent} {'faster' if gain > 0 else 'slower'}"


TRAINED_BY = {3: ("torchtitan", "Megatron-FSDP", "DeepSpeed"), 2: ("Megatron-FSDP", "DeepSpeed")}
"""Systems that split weights over replicas, by ZeRO stage."""


MARGIN_OF_SPLIT, MARGIN_OF_WHOLE = 0.37, 0.2
"""The relative gain in predicted speed from which split or whole weights are called the better answer
(docs/planner_sharded.md).

Split weights need the larger margin: the largest error of a published run, 37% (ZeRO-3), which also covers the most
optimistic prediction, 30% too fast. Whole weights, mostly with a pipeline, need a fifth. Their margin is smaller since
13 of 18 runs of split weights were predicted too fast: most errors already favour split weights."""


def described(configuration: Configuration) -> str:
    """Describe a configuration with split weights in short text."""
    sharding = configuration.sharding
    assert sharding is not None
    parts = [f"t={configuration.tensor}", f"d={configuration.data}"]
    if sharding.shards < configuration.data:
        parts.append(f"shards over {sharding.shards}")
    parts.append(f"microbatches of {configuration.micro_batch_size}")
    if configuration.recompute.value != "none":
        parts.append(f"recompute {configuration.recompute.value}")
    return f"{sharding.name}, {', '.join(parts)}"


def without_pipeline_sentence(outcome: Outcome, *, has_script: bool) -> str | None:
    """The comparison with training without a pipeline as a sentence; None if nothing was compared.

    `has_script`: whether a script that starts the best configuration was written (best.sh).
    """
    found = outcome.without_pipeline
    if found is None:
        return None
    if found.is_slowed:
        return (
            "--avoid-pressure leaves out every configuration without a pipeline, also with weights split over replicas "
            "(FSDP): the allocator would slow each that fits"
        )
    if found.estimate is None:
        short = "" if found.missing_gib is None else f": the nearest misses {found.missing_gib:.1f} GiB"
        return f"without a pipeline nothing fits, not even with weights split over replicas (FSDP){short}"
    estimate = found.estimate
    trained_by = TRAINED_BY[estimate.configuration.sharding.stage]
    text = (
        f"without a pipeline: {described(estimate.configuration)} would take ~{estimate.seconds:.3g} s an iteration, "
        f"{found.sequences_per_second:.3g} sequences/s and {estimate.memory_gib:.1f} GiB"
    )
    if estimate.under_pressure:
        text += " (slowed by a lack of memory)"
    if outcome.best is not None:
        text += f", {_compared_split(found, outcome)}"
    return (
        f"{text}; {', '.join(trained_by[:-1])} and {trained_by[-1]} can train it, this project cannot"
        + (", so best.sh starts the best that it can train" if outcome.best is not None and has_script else "")
    )  # fmt: skip


def _compared_split(found: WithoutPipeline, outcome: Outcome) -> str:
    """The comparison in sequences per second with the fastest ranked configuration, as a clause.

    The best by memory may be slow, so it is not the one compared. The fastest may have no pipeline either.
    """
    best: Kept = max(outcome.ranking, key=lambda each: each.sequences_per_second)
    ratio = found.sequences_per_second / best.sequences_per_second
    name = "best" if best is outcome.best else "fastest"
    text = _compared(ratio - 1)
    text += f" {'as' if text == 'as fast' else 'than'} the {name} here"
    if found.software is not None and found.software.layers != best.layers:
        text += f" (with other layers: {found.software.layers}, not {best.layers})"
    if -MARGIN_OF_WHOLE <= ratio - 1 <= MARGIN_OF_SPLIT:
        return f"{text}, which is less than the error of such predictions (docs/planner.md)"
    if best.choice.pipeline == 1:
        return f"{text}, so {'split' if ratio > 1 else 'whole'} weights are the better answer"
    return f"{text}, so {'no' if ratio > 1 else 'a'} pipeline is the better answer"


def without_pipeline_record(found: WithoutPipeline | None) -> dict | None:
    """The comparison as a JSON record; None if nothing was compared."""
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
        "memory_gib": estimate.memory_gib,
        "verdict": estimate.verdict.word,
    }


def sentences_on_layers(kept: Iterable[Kept]) -> tuple[str, ...]:
    """A note if not all configurations have the same layers."""
    schedules: dict[str, list[str]] = {}
    for each in kept:
        names = schedules.setdefault(each.layers, [])
        if each.choice.schedule not in names:
            names.append(each.choice.schedule)
    if len(schedules) < 2:
        return ()
    parts = "; ".join(f"{what} of {', '.join(names)}" for what, names in schedules.items())
    return (
        f"configurations differ in their layers or attention ({parts}), so their times do not compare schedules alone; "
        "--transformer-impl local gives all of them the same layers and attention",
    )


def notes_on_hosted(outcome: Outcome) -> tuple[str, ...]:
    """A note if a search tried other schedules and kept only those with weights on the host."""
    tried = {each.choice.schedule for each in outcome.rejected} - {None}
    tried_others = not all(map(is_hosted, tried))
    if tried_others and outcome.kept and all(is_hosted(each.choice.schedule) for each in outcome.kept):
        needed = min(each.estimate.host.needed_gib for each in outcome.kept)
        return (
            f"the model fits only with l2l, which keeps weights, gradients and optimizer in the hosts' memory, from "
            f"{needed:.3g} GiB a node on (docs/l2l.md)",
        )
    return ()
