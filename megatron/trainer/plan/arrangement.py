"""How the ranks of a job share a model, and the assignment of ranks to processes.

The arrangement: the ranks of a pipeline, the number of pipelines, the layers of each rank, and the frozen layers. A run
begins in the arrangement that its flags give. When the arrangement changes during training, the run continues with the
configuration of a run that began in the new arrangement (`arranged`).

The processes (`--rank-mapping`): before the process group forms, the process with physical rank 0 reads the files and
decides for all (`megatron.pipeline.start_up.rank_exchange`). Then each process rewrites its RANK; LOCAL_RANK, and with
it the device, stays. The store also stays, with torchrun's agent or with the process of physical rank 0, whichever
process becomes logical rank 0. When the pipeline changes during training, processes keep their ranks, and
`pipelines_in_a_row` decides anew whether the ranks of a pipeline are consecutive, or the replicas of a stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from torch.distributed import Store

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.documents import counted
from megatron.elastic.stages import Arrangement
from megatron.pipeline.placement.cost import (
    count_crossing,
    describe_crossing,
    describe_need,
    fits_under_forward,
    pair_transfers,
    placement_cost,
)
from megatron.pipeline.placement.mapping import Degrees, Mapping, load_mapping, pair_adjacent, standard
from megatron.pipeline.placement.optimize import optimized
from megatron.pipeline.placement.topology import (
    Bandwidth,
    JobSlots,
    Node,
    Process,
    Topology,
    find_slots,
    load_topology,
    this_process,
)
from megatron.pipeline.placement.traffic import Traffic, count_transfers
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.pipeline.start_up.rank_exchange import exchange_ranks
from megatron.planner.time.traffic import CutModel
from megatron.trainer.arguments.flags.config import (
    TrainConfig,
    assumed_vocabulary,
    choice_of,
    num_replicas,
    padded_vocabulary,
)
from megatron.trainer.arguments.rules.schedule import settled_schedule
from megatron.trainer.models import core_config
from megatron.trainer.plan import from_flags


@dataclass(frozen=True)
class Outlook:
    """Simulated seconds of a batch without and with a change.

    `missed`: a clause about an arrangement that the user asked for and that is impossible; None without one.
    """

    before: float
    after: float
    missed: str | None = None


@dataclass(frozen=True)
class Change:
    """The outcome of a change of arrangement.

    Attributes:
        before, after: the old and the new arrangement.
        num_layers: number of layers of the model.
        num_bytes: bytes of the new state, over all ranks.
        bytes_moved: how many of these bytes came from other ranks.
        seconds: time from the end of the old engine to the start of the new one.
    """

    before: Arrangement
    after: Arrangement
    num_layers: int
    num_bytes: int
    bytes_moved: int
    seconds: float

    def describe(self, outlook: Outlook | None = None) -> str:
        """One line about the change for the log."""
        text = (
            f"frozen layers: {self.after.num_frozen} of {self.num_layers} (before {self.before.num_frozen}) | "
            f"pipeline: {self.after.pipeline} (before {self.before.pipeline}) | data: {self.after.data} (before "
            f"{self.before.data}) | layers by rank: {self.after} | state: {self.num_bytes / 2**20:.1f} MiB, "
            f"{self.bytes_moved / 2**20:.1f} from other ranks | change took {self.seconds:.2f} s"
        )
        if self.after.pipelines_in_a_row:
            text += " | the ranks of a pipeline in a row"
        if self.after.micro_batch_size != self.before.micro_batch_size:
            text += f" | microbatch: {self.after.micro_batch_size} (before {self.before.micro_batch_size})"
        if outlook is not None and outlook.before > 0:
            text += f" | predicted seconds of a batch: {outlook.after:.4g} ({outlook.before:.4g} without another cut)"
        return text


def batch_size(args: TrainConfig, arrangement: Arrangement) -> int:
    """The number of samples in a training batch after any ramp-up.

    The batches of an evaluation keep the size that the flags give.
    """
    if args.elastic_batch == "constant":
        return args.global_batch_size
    return args.global_batch_size * arrangement.data // args.first_arrangement.data


def iterations_to_the_end(args: TrainConfig, *, iteration: int, consumed_samples: int) -> int:
    """The last iteration of a run at this position: larger batches use up `--train-samples` in fewer iterations."""
    if args.elastic_batch == "constant":
        return args.train_iters
    return iteration + (args.train_samples - consumed_samples) // args.batch_sizes.global_batch_size


def arranged(args: TrainConfig, arrangement: Arrangement) -> TrainConfig:
    """The configuration of the run in `arrangement`.

    Raises:
        ValueError: a rank has no layer, the batches cannot be divided among so many replicas, or the schedule does not
            run so few microbatches.
    """
    per_microbatch = arrangement.micro_batch_size * arrangement.data
    sizes = replace(
        args.batch_sizes, samples_per_microbatch=per_microbatch, global_batch_size=batch_size(args, arrangement)
    )
    if args.global_batch_size % per_microbatch:
        raise ValueError(
            f"an evaluation's batch of {args.global_batch_size} samples is not divisible by micro batch size x data "
            f"parallel size ({per_microbatch})"
        )
    stages = arrangement.stages  # also refuses a first arrangement with a rank without layers
    changed = replace(
        args, arrangement=arrangement, pipeline_model_parallel_size=arrangement.pipeline,
        data_parallel_size=arrangement.data, micro_batch_size=arrangement.micro_batch_size, batch_sizes=sizes,
        frozen_stages=None if arrangement == args.first_arrangement else stages,
    )  # fmt: skip
    schedule, moves_activations = settled_schedule(changed)
    return replace(changed, schedule=schedule, moves_activations=moves_activations)


def as_at_first(args: TrainConfig) -> dict[str, int]:
    """The values that the flags gave to the arguments that `arranged` changes."""
    first = args.first_arrangement
    return {
        "pipeline_model_parallel_size": first.pipeline,
        "data_parallel_size": first.data,
        "micro_batch_size": first.micro_batch_size,
    }


@contextmanager
def reading_changes(args: TrainConfig) -> Iterator[None]:
    """Raise CheckpointError if the block, which reads a checkpoint's record of changes, finds the record invalid."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"--load {args.load}: the checkpoint's record of frozen layers is damaged ({type(error).__name__}: "
            f"{error}); choose another with --ckpt-step, or add --finetune to begin anew with its weights"
        ) from error


def first_arrangement(args: TrainConfig) -> Arrangement:
    """The arrangement that the flags give."""
    layers = from_flags.layers_of_stages(core_config.transformer_config(args))
    return Arrangement(args.pipeline_model_parallel_size, args.data_parallel_size, args.micro_batch_size, tuple(layers))


def model_config(args: TrainConfig) -> TransformerConfig:
    """The model's configuration for the pipeline that the flags give.

    The flags may say how to split the model.
    """
    if args.arrangement is None:
        return core_config.transformer_config(args)
    first = args.first_arrangement.pipeline
    return core_config.transformer_config(replace(args, pipeline_model_parallel_size=first))


def arrangement_to_begin_with(args: TrainConfig) -> Arrangement:
    """The arrangement in which a run is built, at its start or from a checkpoint (`args.recorded_changes`).

    This is the checkpoint's arrangement if the job has the same number of ranks and the flags give the same first
    arrangement as when the checkpoint was saved; otherwise the arrangement of the flags. Frozen layers stay frozen,
    unless the optimizer's state is not loaded and --freeze-training is not given.

    Raises:
        CheckpointError: the checkpoint has frozen layers and the run would train them, or its record is damaged.
    """
    first, recorded = args.first_arrangement, args.recorded_changes
    if recorded is None:
        return first
    with reading_changes(args):
        wanted, asked_for = (Arrangement.from_state(recorded[name]) for name in ("wanted", "first"))
        if sum(wanted.layers_of_rank) != sum(asked_for.layers_of_rank):
            raise ValueError(f"{wanted.layers_of_rank} are fewer or more layers than {asked_for.layers_of_rank}")
    if args.no_load_optim and not args.freeze_training:
        return first
    if wanted.num_frozen and not (args.freeze_training or args.skip_train):
        raise CheckpointError(
            f"--load {args.load}: {wanted.num_frozen} layers of the checkpoint are frozen, and their optimizer state "
            "is gone; add --freeze-training, or to train all --no-load-optim, or --finetune to begin anew with its "
            "weights"
        )
    if sum(wanted.layers_of_rank) != args.num_layers:
        return first  # a checkpoint of another model, whose differences the loading reports
    unchanged = first.with_frozen(wanted.num_frozen)
    if asked_for != first or (wanted.pipeline != first.pipeline and not args.elastic_pipeline):
        return unchanged
    if wanted.cached and args.activation_cache is None:
        return unchanged
    try:
        arranged(args, wanted)
    except ValueError:  # the flags give other batches or another schedule
        return unchanged
    return wanted


# --- which process is which rank --------------------------------------------------------------------------------------


_NOTHING_BUT_THE_NETWORK = Bandwidth(within_node=1e12, between_nodes=1.0)
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RankAssignment:
    """This process's rank, the rank of the process that hosts the store without torchrun, and lines for the log."""

    rank: int
    store_host: int
    lines: tuple[str, ...] = ()


def assign_rank(args: TrainConfig, store: Store, *, rank: int, world_size: int, timeout: timedelta) -> RankAssignment:
    """Find this process's logical rank and write it to RANK. Collective over the job's `store`.

    If the flags ask for no mapping, nothing is exchanged, and ranks stay as the launcher gave them.

    Raises:
        SameEverywhere: a file, the hosts or the mapping is wrong.
        OnThisRank: another process has ended.
    """
    if args.rank_mapping == "standard" and args.rank_topology is None:
        return RankAssignment(rank, 0, tuple(_advice_without_hosts(args)))
    decision = exchange_ranks(
        store, this_process(), partial(decide, args), rank=rank, world_size=world_size, timeout=timeout
    )
    os.environ["RANK"] = str(decision.ranks[rank])
    return RankAssignment(decision.ranks[rank], decision.ranks[0], decision.lines)


def decide(args: TrainConfig, processes: Sequence[Process]) -> tuple[list[int], list[str]]:
    """Find the logical rank of each physical rank, and lines for the log. Raises ValueError."""
    topology = load_topology(args.rank_topology) if args.rank_topology else None
    slots = find_slots(processes, topology)
    if topology is not None:
        topology = topology.restricted(dict(slots.nodes))
    degrees = degrees_of(args)
    traffic = None if topology is None else estimated_traffic(args)
    mapping = _mapping(args, degrees, slots, topology, traffic)
    lines = _describe_mapping(args, mapping, degrees, slots)
    if topology is not None:
        seconds = placement_cost(mapping, degrees, traffic, topology).total_seconds
        usual = placement_cost(standard(degrees), degrees, traffic, topology).total_seconds
        lines[0] += f"; an iteration's transfers take {seconds:.4g} s in sum (standard: {usual:.4g} s)"
        if args.schedule.balance:
            lines += _judge_bandwidth(args, mapping, degrees, topology)
    return list(slots.logical_ranks(mapping)), lines


def degrees_of(args: TrainConfig) -> Degrees:
    """The degrees of the job in its current arrangement."""
    return Degrees(
        tensor=args.tensor_model_parallel_size, pipeline=args.pipeline_model_parallel_size,
        data=num_replicas(args),
        pipelines_in_a_row=args.arrangement is not None and args.arrangement.pipelines_in_a_row,
    )  # fmt: skip


def evictors(args: TrainConfig) -> tuple[int, ...]:
    """The ranks of a pipeline that move activations to their pair in a batch of the largest size."""
    return args.schedule.evicting_ranks((max(args.batch_sizes.all_num_microbatches()),))


def _mapping(
    args: TrainConfig, degrees: Degrees, slots: JobSlots, topology: Topology | None, traffic: Traffic | None
) -> Mapping:
    if args.rank_mapping == "standard":
        return slots.process_of_slot  # the launcher's ranks, whatever their order over the hosts
    if args.rank_mapping == "pair-adjacent":
        return pair_adjacent(degrees)
    if args.rank_mapping == "optimized":
        assert topology is not None and traffic is not None, "the rules refuse it"
        return optimized(degrees, traffic, topology)
    return load_mapping(args.rank_mapping, degrees.world_size)


def estimated_traffic(args: TrainConfig) -> Traffic:
    """The bytes and messages of an iteration of the largest batch."""
    counts = count_transfers(args.schedule, max(args.batch_sizes.all_num_microbatches()))
    return cut_model(args).traffic(counts, gradient_bytes=from_flags.training_state(args).gradient_bytes)


def cut_model(args: TrainConfig) -> CutModel:
    """The job's model split into stages; in its first arrangement each stage counts with the mean number of layers."""
    schedule, frozen, rows = args.schedule, args.frozen_stages, args.padded_vocab_size
    if rows is None and args.architecture != "vit":  # tokenizers are read after the group has formed
        rows = padded_vocabulary(args, assumed_vocabulary(args))
    return CutModel(
        model=from_flags.architecture(replace(args, padded_vocab_size=rows or 0)),
        setting=from_flags.activation_setting(args),
        schedule=schedule,
        layers=frozen.layers if frozen else (args.num_layers / schedule.num_stages,) * schedule.num_stages,
    )


def pipelines_in_a_row(args: TrainConfig, processes: Sequence[Process]) -> bool:
    """Whether transfers take less time if the ranks of each pipeline are consecutive, not the replicas of each stage.

    Without `--rank-topology`: whether fewer bytes cross nodes.

    Args:
        args: the configuration in the arrangement with which the job continues.
        processes: the job's processes, by rank.
    """
    topology = load_topology(args.rank_topology) if args.rank_topology else None
    slots = find_slots(processes, topology)
    if topology is None:
        nodes = tuple(Node(name=name, gpus=count) for name, count in slots.nodes)
        topology = Topology(nodes=nodes, bandwidth=_NOTHING_BUT_THE_NETWORK)
    else:
        topology = topology.restricted(dict(slots.nodes))
    traffic = estimated_traffic(args)
    replicas, pipelines = (
        placement_cost(
            slots.process_of_slot, replace(degrees_of(args), pipelines_in_a_row=each), traffic, topology
        ).total_seconds
        for each in (False, True)
    )
    return pipelines < replicas * (1 - _ROUNDING)


def _describe_mapping(args: TrainConfig, mapping: Mapping, degrees: Degrees, slots: JobSlots) -> list[str]:
    first = f"rank mapping {args.rank_mapping} on {counted(len(slots.nodes), 'node')}"
    if args.schedule.balance:
        moving = evictors(args)
        lines = [f"{first}: {describe_crossing(mapping, degrees, slots.node_sizes, moving)}"]
        if args.rank_topology is None and count_crossing(mapping, degrees, slots.node_sizes, moving):
            num_bytes = max(cut_model(args).moved_bytes[rank] for rank in moving)
            lines.append(
                f"warning: pairs that cross a node move {num_bytes / 1e9:.3g} GB for each microbatch; give "
                "--rank-topology with teraflops_per_gpu to see whether the network is fast enough"
            )
        return lines
    if args.rank_mapping == "pair-adjacent":
        flag = choice_of(args).flag
        note = f"note: --rank-mapping pair-adjacent brings pairs together, between which {flag} moves no activations"
        return [first, note]
    return [first]


def _judge_bandwidth(args: TrainConfig, mapping: Mapping, degrees: Degrees, topology: Topology) -> list[str]:
    cut, teraflops = cut_model(args), topology.teraflops_per_gpu
    transfers = pair_transfers(mapping, degrees, topology, cut.moved_bytes, evictors(args))
    if not transfers:
        return []
    forward = None if teraflops is None else cut.forward_seconds(teraflops=teraflops)
    is_late = forward is not None and not fits_under_forward(transfers, forward)
    head = "warning: compute will wait for pairs" if is_late else "pairs"
    return [f"{head}: {describe_need(transfers, forward_seconds=forward)}"]


def _advice_without_hosts(args: TrainConfig) -> list[str]:
    """Advice about pairs of ranks on different nodes, from the launcher's environment alone."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not evictors(args) or not local.isdecimal() or int(local) >= args.world_size:
        return []
    if args.tensor_model_parallel_size >= int(local):
        return [
            f"warning: tensor parallel size {args.tensor_model_parallel_size} fills a node of {local} GPUs, so all "
            "pairs cross nodes; give --rank-topology to see whether the network is fast enough"
        ]
    return [
        "note: under --rank-mapping standard pairs lie on different nodes where a pipeline spans several; "
        "--rank-mapping pair-adjacent keeps them together"
    ]
