"""Whether a run has room: memory on the hosts for weights that live there, directories that it can write into.

Problem: a host that has too little memory does not say so. It maps what it is asked for, and the system ends a process
when the last pages are written, with the moments of the first update. A path that cannot be written would end a run at
its first checkpoint, or after its last iteration; a directory into which another job writes would end with the
checkpoints of neither.

Solution: before anything is built, each rank computes what it will keep on its host (`memory.hosted`) and asks the
system what there is; all tell each other, and where the ranks of a host need more than is available, all refuse with
one sentence. Rank 0 makes the directories and creates a file in each, and takes that of `--save` for this job
(checkpoint/ownership.py); all ranks learn the verdict.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.documents.files import problem_with_directory
from megatron.pipeline.placement.topology import this_process
from megatron.pipeline.runtime.failure.agreement import on_rank_zero
from megatron.planner import GIB
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.hosted import Hosting, host_parts
from megatron.planner.memory.parameters import stage_matrices, stage_parameters
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.checkpoint import directory
from megatron.trainer.checkpoint.ownership import OwnerMark
from megatron.trainer.plan import from_flags

# --- memory of hosts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """What a rank needs of its host. Attributes:
    host: its name; available: bytes that are to be had there.
    part: pipeline, tensor and expert rank; replicas on a host share one store.
    store, stash: bytes of weights, gradients and optimizer state, and of inputs, which are each rank's own.
    """

    host: str
    available: int
    part: tuple[int, int, int]
    store: float
    stash: float


def require_room(args: TrainConfig, layers: Sequence[int]) -> None:
    """Refuse a run for which a host has too little. Collective. `layers`: how many each stage has.

    Raises ValueError on all ranks alike.
    """
    hosting = from_flags.hosting_of(args)
    if hosting is None:
        return
    needs = [None] * args.world_size
    torch.distributed.all_gather_object(needs, _own_need(args, hosting, layers))
    if (sentence := shortage(needs)) is not None:
        raise ValueError(sentence)


def _own_need(args: TrainConfig, hosting: Hosting, layers: Sequence[int]) -> Need:
    shape, rank = from_flags.architecture(args), parallel_state.get_pipeline_model_parallel_rank()
    tensor, own = args.tensor_model_parallel_size, args.schedule.stages_of(rank)
    degrees = from_flags.expert_degrees(args)
    parameters = stage_parameters(shape, tensor, layers, degrees)
    matrices = stage_matrices(shape, tensor, layers, degrees)
    parts = host_parts(
        rank,
        activations_of(shape, from_flags.activation_setting(args)).boundary,
        from_flags.training_state(args),
        [parameters[stage] for stage in own],
        sum(matrices[stage] for stage in own),
        args.schedule.rank_of_stage,
        hosting,
    )
    part = (
        rank,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    host = this_process().host
    return Need(host, backend.available_host_bytes(), part, parts.total - parts.stash, parts.stash)


def shortage(needs: Sequence[Need]) -> str | None:
    """The error for the host that lacks most memory for its ranks; None where all have enough."""
    lacking = []
    for host in dict.fromkeys(each.host for each in needs):
        own = [each for each in needs if each.host == host]
        stores = sum({each.part: each.store for each in own}.values())
        stash = sum(each.stash for each in own)
        available = min(each.available for each in own)
        lacking.append((stores + stash - available, host, stores, stash, available))
    missing, host, stores, stash, available = max(lacking)
    if missing <= 0:
        return None
    inputs = f" and {stash / GIB:.3g} GiB of inputs (--l2l-stash host)" if stash else ""
    return (
        f"the ranks on {host} would keep {stores / GIB:.3g} GiB of weights, gradients and optimizer state{inputs} in "
        f"its memory, of which {available / GIB:.3g} GiB are available; give it more memory, spread the pipeline over "
        "more hosts, or train a smaller model"
    )


# --- directories ------------------------------------------------------------------------------------------------------

_BETWEEN_LOOKS = 1.0  # seconds between two looks at a job that may be dead


def prepare_outputs(args: TrainConfig) -> OwnerMark | None:
    """Make the directories of `--save` and `--pipeline-timeline`, take the first for this job, and mend what a killed
    save left there. Returns, on rank 0, the mark of that; release it in the end.

    Collective. Raises ValueError on every rank where rank 0 cannot write into one, or another job writes into the
    first. A run that does not train saves nothing, so its `--save` may be read-only.
    """
    save = None if args.skip_train else args.save
    outputs = {"--save": save, "--pipeline-timeline": args.pipeline_timeline}
    problem = on_rank_zero(lambda: _problem_with_directories(outputs))
    if problem is not None:
        raise ValueError(problem)
    if save is None:
        return None
    mark = OwnerMark(save) if torch.distributed.get_rank() == 0 else None
    while not on_rank_zero(lambda: mark.try_to_take()):  # in short steps: ranks wait for each other with a limit
        time.sleep(_BETWEEN_LOOKS)
    try:
        problem = on_rank_zero(lambda: _problem_with_leftovers(save))
        if problem is not None:
            raise ValueError(problem)
    except ValueError:
        if mark is not None:
            mark.release()
        raise
    return mark


def _problem_with_directories(outputs: dict[str, str | None]) -> str | None:
    problems = (problem_with_directory(flag, path) for flag, path in outputs.items() if path is not None)
    return next((problem for problem in problems if problem is not None), None)


def _problem_with_leftovers(save: str) -> str | None:
    try:
        directory.recover(save)
    except OSError as error:
        return f"--save {save} cannot be mended after a killed save: {error}; remove or rename that file yourself"
    return None
