"""What cannot run, or is not worth trying: each rule says so in one clause, or None.

The constraints are BPipe's (section 4.2), PipeDream-2BW's (section 4.3) and those of the training programs, which
refuse in their own words (`megatron/trainer/arguments`, `Schedule`); a test compares with them.
"""

from dataclasses import dataclass, replace

from megatron.documents.numbers import counted
from megatron.pipeline.schedules import Schedule
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.schedule_demand import schedule_demand
from megatron.planner.search.outcome import Choice
from megatron.planner.search.space import PLAIN, Space, fewest_ranks, name_of, offer


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the flags say of the training, as far as it excludes schedules or scopes.

    Attributes:
        clips_gradients: to a global norm.
        scales_loss: FP16.
        saves_scores: unfused attention; flash attention has no scores that could be recomputed.
        fuses_softmax: unfused attention has Megatron's fused softmax, where a number is divisible by 4.
        saves_scores_with_halves: the same of the layers that schedules with I and W take; None: these.
    """

    clips_gradients: bool = True
    scales_loss: bool = False
    saves_scores: bool = True
    fuses_softmax: bool = True
    saves_scores_with_halves: bool | None = None

    @property
    def with_halves(self) -> "Training":
        """What it says of schedules that split backwards."""
        saves = self.saves_scores if self.saves_scores_with_halves is None else self.saves_scores_with_halves
        return replace(self, saves_scores=saves)


def refuse_tensor(model: Architecture, space: Space, t: int) -> str | None:
    """t alone: H mod t = 0 and 8 mod t = 0 (BPipe, 4.2), and what else is split."""
    if t > space.gpus_per_node:
        return f"tensor parallelism over {t} GPUs leaves a node of {space.gpus_per_node}"
    if space.gpus_per_node % t:
        return f"tensor parallelism over {t} GPUs does not divide a node of {space.gpus_per_node}"
    undivided = model.undivided(t)
    return f"{undivided} do not divide by tensor parallel size {t}" if undivided else None


def refuse_pipeline(model: Architecture, space: Space, p: int, d: int) -> str | None:
    """L mod p = 0, and a batch that d divides (BPipe, 4.2)."""
    if model.num_layers % p:
        return f"{model.num_layers} layers do not divide into {p} stages"
    if space.microbatches(d):
        return None
    batch, most = space.global_batch_size, space.largest_batch_size // d
    if space.safe_batch_size is None and batch % d:
        return f"a batch of {batch} does not divide over {d} replicas"
    if most == 0:
        return f"a batch of {space.safe_batch_size} is less than a sequence for each of {d} replicas"
    sizes = " or ".join(map(str, space.micro_batch_sizes or ()))
    cannot = "be divided into" if space.safe_batch_size is None else "hold"
    return f"the {counted(most, 'sequence')} of a replica cannot {cannot} microbatches of {sizes}"


def refuse_schedule(model: Architecture, training: Training, schedule: str, p: int) -> str | None:
    """A schedule on p ranks, whatever the batch."""
    preset = offer(schedule)
    weights = preset.policy
    if p == 1 and weights.drains and preset != PLAIN and preset.residency is None:
        return f"on one stage {schedule} is {name_of(PLAIN)}"
    if weights.updates_alone:
        if p == 1:
            return f"on one stage {schedule} is {name_of(PLAIN)} with batches of one microbatch"
        if model.tied_embeddings:
            return f"{schedule} updates stages apart, and the embeddings are tied"
        if training.clips_gradients:
            return f"{schedule} updates stages apart, and gradients are clipped to a global norm"
        if training.scales_loss:
            return f"{schedule} updates stages apart, and FP16 skips steps of all stages"
    if preset.balance:
        fewest = fewest_ranks(preset)
        if fewest is None:
            return f"{schedule} has nothing to balance"
        if p < fewest:
            return f"p < {fewest} has nothing to balance"
    return None


def refuse_batch(schedule: Schedule, num_microbatches: int) -> str | None:
    """A batch of so many microbatches, in the schedule's own words, or in the checker's."""
    try:
        schedule.validate(num_microbatches)
    except ValueError as error:
        return clause(error)
    try:
        schedule_demand(schedule, num_microbatches, proved=False)
    except ValueError as error:
        return f"its program is refused at {str(error).splitlines()[0]}"
    if schedule.balance:
        batches = (num_microbatches,) * (1 if schedule.weights.drains else 2 * schedule.num_ranks)
        if not schedule.evicting_ranks(batches):
            return f"{num_microbatches} microbatches leave nothing to balance"
    return None


def slow_softmax(model: Architecture, training: Training, choice: Choice) -> str | None:
    """Megatron's fused softmax takes only numbers of sequences times heads of a rank that 4 divides."""
    if not (training.saves_scores and training.fuses_softmax):
        return None
    heads = model.num_attention_heads // choice.tensor
    if choice.micro_batch_size * heads % 4 == 0:
        return None
    times = f"{choice.micro_batch_size} x " if choice.micro_batch_size > 1 else ""
    return f"fused softmax unavailable: {times}{heads} heads a rank"


def clause(error: ValueError) -> str:
    """The first clause of a refusal: what is wrong, without why and the remedy."""
    text = str(error)
    for mark in ("; ", ": "):
        text = text.split(mark)[0]
    return text
