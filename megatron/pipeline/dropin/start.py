"""The preparation before the process group forms: the check that the schedule can run, and the ranks of processes."""

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from megatron import backend
from megatron.documents import counted
from megatron.pipeline.check.hardware_queues import require_hardware_queues
from megatron.pipeline.dropin.flags import (
    PAIR_ADJACENT,
    STANDARD,
    batches_of,
    flag_of,
    prove,
    schedule_of,
    updated_by_megatron,
)
from megatron.pipeline.dropin.sentences import say
from megatron.pipeline.placement.cost import describe_crossing
from megatron.pipeline.placement.mapping import Degrees, load_mapping, pair_adjacent
from megatron.pipeline.placement.topology import Process, find_slots, this_process
from megatron.pipeline.runtime.failure.errors import OnThisRank, SameEverywhere
from megatron.pipeline.runtime.failure.failure_board import launcher_hosts_store
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.start_up.late_weights import (
    LOOKS_UP_GRADIENTS,
    engine_keeps_main_grad,
    installed_engine_version,
)
from megatron.pipeline.start_up.rank_exchange import exchange_ranks


def prepare(args: argparse.Namespace) -> PipelineSchedule:
    """Prove the schedule that `args` name, give this process its rank, and return the schedule.

    Collective if the ranks change: every rank of the job must call it.

    Raises:
        ValueError: the schedule cannot run with these arguments on this machine.
    """
    schedule = schedule_of(args, tied_embeddings=not getattr(args, "untie_embeddings_and_output_weights", False))
    batches = batches_of(args)
    prove(schedule, batches)
    for name, reason in overlaps_off(args, schedule).items():
        say(f"note: --{name.replace('_', '-')} is off: {flag_of(args)} {reason}")
        if name == "overlap_param_gather":  # `Session` turns overlap_grad_reduce off after the buckets are laid out
            args.overlap_param_gather = False
    if backend.is_cuda() and getattr(args, "distributed_backend", "nccl") == "nccl":
        require_hardware_queues(
            schedule, os.environ, flag=flag_of(args), tensor=args.tensor_model_parallel_size,
            data=args.data_parallel_size, pipeline=args.pipeline_model_parallel_size,
            distributed_optimizer=args.use_distributed_optimizer, max_microbatches=max(batches),
            moves_activations=bool(schedule.evicting_ranks((max(batches),))),
        )  # fmt: skip
    if schedule.splits_backward and getattr(args, "transformer_impl", "local") == "transformer_engine":
        raise ValueError(
            f"{flag_of(args)} splits backwards, and the linears of --transformer-impl "
            "transformer_engine compute both halves at once; give --transformer-impl local, or use flush"
        )
    if not updated_by_megatron(schedule.weights):
        _require_engine_that_follows(args)
    if args.pipeline_rank_mapping != STANDARD:
        _map_ranks(args, schedule, max(batches))
    return schedule


def overlaps_off(args: argparse.Namespace, schedule: PipelineSchedule) -> dict[str, str]:
    """The overlaps that `args` ask for and that the schedule cannot support: name -> reason.

    Under a schedule that drains, with whole backwards and activations that stay on their rank, all overlaps work:
    Megatron-LM's hooks reduce each bucket within the last backward of a batch (`OverlappedStage`), and parameters are
    gathered before the forwards as usual.
    """
    if not updated_by_megatron(schedule.weights):
        why = {
            "overlap_grad_reduce": "reduces gradients beside the next batch anyway",
            "overlap_param_gather": "gathers weights in its step",
        }
    elif schedule.splits_backward:
        why = {"overlap_grad_reduce": "makes gradients in W, behind the backwards in which they would be reduced"}
    elif args.pipeline_log_saved_activations or schedule.evicting_ranks((max(batches_of(args)),)):
        why = {"overlap_grad_reduce": "moves or counts activations, and their backwards do not tell what is complete"}
    else:
        why = {}
    return {name: reason for name, reason in why.items() if getattr(args, name, False)}


def _require_engine_that_follows(args: argparse.Namespace) -> None:
    """Raise ValueError if this Transformer Engine adds gradients to the buffer that was current in the forward.

    Under delayed weights two batches have gradient buffers of their own, so the backward must choose the buffer.
    """
    fuses = getattr(args, "gradient_accumulation_fusion", False)
    if getattr(args, "transformer_impl", None) != "transformer_engine" or not fuses:
        return
    version = installed_engine_version()
    if engine_keeps_main_grad(version):
        raise ValueError(
            f"Transformer Engine {version} adds to the gradient buffer that its forward saw, and {flag_of(args)} "
            f"has two; install {LOOKS_UP_GRADIENTS} or later, or give "
            "--no-gradient-accumulation-fusion"
        )


def _map_ranks(args: argparse.Namespace, schedule: PipelineSchedule, max_microbatches: int) -> None:
    asked = args.pipeline_rank_mapping
    degrees = Degrees(
        tensor=args.tensor_model_parallel_size, pipeline=args.pipeline_model_parallel_size,
        data=args.data_parallel_size, pipelines_in_a_row=getattr(args, "use_tp_pp_dp_mapping", False),
    )  # fmt: skip
    evicting = schedule.evicting_ranks((max_microbatches,))

    def decide(processes: Sequence[Process]) -> tuple[list[int], list[str]]:
        slots = find_slots(processes)
        mapping = pair_adjacent(degrees) if asked == PAIR_ADJACENT else load_mapping(asked, degrees.world_size)
        line = f"--pipeline-rank-mapping {asked} on {counted(len(slots.nodes), 'node')}"
        if evicting:
            line += f": {describe_crossing(mapping, degrees, slots.node_sizes, evicting)}"
        return list(slots.logical_ranks(mapping)), [line]

    if not launcher_hosts_store():  # another store would move with the ranks
        raise ValueError(
            f"--pipeline-rank-mapping {asked} gives processes other ranks over torchrun's store, and "
            "this job has none; start it through torchrun"
        )
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
        timeout=timeout,
    )  # fmt: skip
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        decision = exchange_ranks(
            PrefixStore(f"dropin/{attempt}", store), this_process(), decide, rank=args.rank, world_size=args.world_size,
            timeout=timeout,
        )  # fmt: skip
    except (SameEverywhere, OnThisRank) as error:
        raise ValueError(str(error)) from error
    args.rank = decision.ranks[args.rank]
    os.environ["RANK"] = str(args.rank)
    for line in decision.lines:
        say(line)
