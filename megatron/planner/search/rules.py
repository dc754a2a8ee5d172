"""Rules of the search: each returns the reason why a choice cannot run, or is not worth trying, as one clause; or None.

The constraints are those of BPipe (section 4.2), of PipeDream-2BW (section 4.3) and of the training programs, which
refuse with their own messages (`megatron/trainer/arguments`, `Schedule`). A test checks that rules and programs agree.

Schedules with weights on the host (l2l) have separate rules. So do context and expert parallelism, which the search
prices if a user asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.documents import counted
from megatron.pipeline.program.lane_order import EAGER
from megatron.pipeline.schedules import Schedule
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.refusals import OVERLAPPED, refuse_fp8, refuse_shares
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.schedule_demand import schedule_demand
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Choice, Rejected
from megatron.planner.search.space import PLAIN, Space, fewest_ranks, name_of, offer, splits


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a training that exclude schedules or recompute scopes.

    Attributes:
        clips_gradients: gradients are clipped to a global norm.
        scales_loss: the loss is scaled (FP16).
        saves_scores: attention is unfused; flash attention has no scores to recompute.
        fuses_softmax: unfused attention has Megatron's fused softmax, if sequences times heads divide by 4.
        saves_scores_with_halves: `saves_scores` of the layers that split backwards (I and W) use; None: the same.
    """

    clips_gradients: bool = True
    scales_loss: bool = False
    saves_scores: bool = True
    fuses_softmax: bool = True
    saves_scores_with_halves: bool | None = None

    @property
    def with_halves(self) -> Training:
        """The settings for schedules that split backwards."""
        saves = self.saves_scores if self.saves_scores_with_halves is None else self.saves_scores_with_halves
        return replace(self, saves_scores=saves)


def refuse_tensor(model: Architecture, space: Space, t: int) -> str | None:
    """The reason why t is impossible: H mod t = 0 and 8 mod t = 0 are required (BPipe, 4.2), and t must divide
    everything else that it splits."""
    if t > space.gpus_per_node:
        return f"tensor parallelism over {t} GPUs leaves a node of {space.gpus_per_node}"
    if space.gpus_per_node % t:
        return f"tensor parallelism over {t} GPUs does not divide a node of {space.gpus_per_node}"
    undivided = model.undivided(t)
    return f"{undivided} do not divide by tensor parallel size {t}" if undivided else None


def refuse_pipeline(model: Architecture, space: Space, p: int, d: int) -> str | None:
    """The reason why p and d are impossible: every stage has a layer, and d must divide the batch (BPipe, 4.2)."""
    if model.num_layers < p:
        return f"{model.num_layers} layers are fewer than {p} stages"
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
    """The reason why a schedule is impossible, or not worth trying, on p ranks with any batch."""
    preset = offer(schedule)
    weights = preset.policy
    if p == 1 and weights.drains and preset != PLAIN and preset.residency is None:
        return f"on one stage {schedule} is {name_of(PLAIN)}"
    if weights.updates_alone:
        if p == 1:
            return f"on one stage {schedule} is {name_of(PLAIN)} with batches of one microbatch"
        if model.shares_embedding:
            shared = (
                "the embeddings are tied" if model.tied_embeddings else "layers that predict further tokens copy one"
            )
            return f"{schedule} updates stages apart, and {shared}"
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


def refuse_in_fp8(planner: Planner, configuration: Configuration) -> str | None:
    """The reason why the linear layers of a configuration cannot multiply in FP8."""
    try:
        refuse_fp8(planner.cluster.gpu, planner.cluster.device, planner.model, configuration)
    except ValueError as error:
        return clause(error)
    return None


def refuse_batch(schedule: Schedule, num_microbatches: int) -> str | None:
    """The reason of the schedule or of the checker why a batch of `num_microbatches` cannot run."""
    try:
        schedule.validate(num_microbatches)
    except ValueError as error:
        return clause(error)
    try:
        schedule_demand(schedule, num_microbatches, proved=False)
    except ValueError as error:
        return f"its program is refused at {str(error).splitlines()[0]}"
    full = schedule.weights.full_batches(num_microbatches, 2 * schedule.num_ranks)
    if schedule.balance and not schedule.evicting_ranks(full):
        return f"{num_microbatches} microbatches leave nothing to balance"
    return None


def slow_softmax(model: Architecture, training: Training, choice: Choice) -> str | None:
    """A note if Megatron's fused softmax is unavailable: 4 must divide its sequences times the heads of a rank."""
    if not (training.saves_scores and training.fuses_softmax):
        return None
    heads = model.num_attention_heads // choice.tensor
    if choice.micro_batch_size * heads % 4 == 0:
        return None
    times = f"{choice.micro_batch_size} x " if choice.micro_batch_size > 1 else ""
    return f"fused softmax unavailable: {times}{heads} heads a rank"


def clause(error: ValueError) -> str:
    """The first clause of an error message: the fault, without its reason and the remedy."""
    text = str(error)
    for mark in ("; ", ": "):
        text = text.split(mark)[0]
    return text


def is_hosted(schedule: str) -> bool:
    """Whether the schedule, a name of `offered`, keeps weights on the host."""
    return offer(schedule).residency is not None


def refuse_hosted(cluster: Cluster, choice: Choice) -> str | None:
    """The reason why a schedule with weights on the host is impossible with any microbatch, as a clause."""
    if cluster.host_memory_gib is None:
        return f"{choice.schedule} needs the hosts' memory, which the cluster does not say (host_memory_gib)"
    if choice.distributed_optimizer:
        return f"{choice.schedule} has the optimizer on the host, and shards it over no devices"
    return None


def with_host_update(configuration: Configuration, training: Training) -> Configuration:
    """The configuration with the host update that `--l2l-update auto` chooses: eager unless updates wait for the
    gradient norm or for overflows."""
    waits = training.clips_gradients or training.scales_loss
    return replace(configuration, host_update=EAGER) if configuration.is_hosted and not waits else configuration


def is_shared(choice: Choice) -> bool:
    """Whether ranks share sequences, or the model has experts."""
    return (choice.context or 1) > 1 or choice.expert is not None


def share_ranks(space: Space, planner: Planner, choice: Choice) -> Iterator[Choice | Rejected]:
    """Yield the choice of t and p with each context and expert parallel size, and the replicas that remain for each."""
    ranks = space.num_gpus // (choice.tensor * choice.pipeline)
    for context in space.context:
        given = replace(choice, context=None if space.context == (1,) else context)
        if ranks % context:
            yield Rejected(choice=given, reason=f"{ranks} ranks with the same layers do not divide by cp {context}")
            continue
        given = replace(given, data=ranks // context)
        if planner.model.experts is None:
            yield _refused_shares(given, planner) or given
            continue
        for expert in space.expert:
            trial = replace(given, expert=expert, expert_tensor=space.expert_tensor)
            yield _refused_shares(trial, planner) or trial


def _refused_shares(choice: Choice, planner: Planner) -> Rejected | None:
    """The rejection of a choice whose shared sequences or experts are impossible with any microbatch and schedule."""
    if not is_shared(choice):
        return None
    try:
        smallest = replace(choice, micro_batch_size=1, global_batch_size=choice.data, schedule="flush")
        configuration = smallest.configuration(sequence_parallel=splits_sequences(planner.model, choice))
        if planner.software.overlaps_experts and planner.model.experts is not None and choice.expert in (None, 1):
            raise ValueError("copies of tokens beside another microbatch take ep above 1")
        refuse_shares(planner.model, configuration, replace(planner.software, overlaps_experts=False))
    except ValueError as error:
        return Rejected(choice=choice, reason=clause(error))
    return None


def splits_sequences(model: Architecture, choice: Choice) -> bool:
    """Whether tensor ranks split their part of a sequence (sequence parallelism)."""
    return choice.tensor > 1 and model.sequence_length // (choice.context or 1) % choice.tensor == 0


def refuse_shared_schedule(choice: Choice, training: Training, schedule: str) -> str | None:
    """The reason why a schedule is impossible with shared sequences or experts, as a clause."""
    if not is_shared(choice):
        return None
    if offer(schedule).residency is not None:
        return f"{schedule} is not modelled with ranks that share sequences or experts"
    if (choice.context or 1) > 1 and splits(offer(schedule)) and training.with_halves.saves_scores:
        return f"context parallelism needs flash attention, which the layers of {schedule} do not have"
    return None


def refuse_overlap(choice: Choice, planner: Planner, schedule: str) -> str | None:
    """The reason why a schedule is impossible if copies of tokens are sent beside another microbatch, as a clause."""
    if not planner.software.overlaps_experts or choice.expert is None:
        return None
    taken = OVERLAPPED[choice.pipeline > 1 :]
    if schedule in taken:
        return None
    return f"copies of tokens beside another microbatch take {' or '.join(taken)}, not {schedule}"
