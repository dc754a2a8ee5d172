"""Start-up of a rank: device, process groups and seeds, and checks of host memory and output directories.

Ranks find each other through torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Between
`rendezvous` and `join_process_group`, plan/arrangement.py may reassign ranks. A single process needs no launcher and
opens no port.

Memory: a host with too little memory for the weights on it raises no error early. It maps all requested memory, and the
system kills a process when the last pages are written, with the moments of the first update. So before anything is
built, each rank computes the bytes that it will keep on its host (`memory.hosted`) and asks the system what is
available. The ranks exchange these numbers, and if the ranks of a host need more than is available, all refuse the run
with the same sentence.

Directories: a path that cannot be written would end a run at its first checkpoint, or after its last iteration. If
another job writes into the directory, the checkpoints of both are lost. So rank 0 makes the directories, creates a file
in each, and takes the directory of `--save` for this job (checkpoint/ownership.py). All ranks learn the outcome.
"""

import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.documents.files import problem_with_directory
from megatron.pipeline.placement.topology import this_process
from megatron.pipeline.runtime.failure import agreement
from megatron.pipeline.runtime.failure.agreement import gathered, on_rank_zero
from megatron.pipeline.runtime.failure.errors import environment_ranks, number_of
from megatron.pipeline.runtime.stages.megatron.groups import name_groups_to_come
from megatron.pipeline.runtime.stages.megatron.pipeline_position import embedding_ranks
from megatron.pipeline.start_up.late_weights import engine_keeps_main_grad, engine_puts_off, installed_engine_version
from megatron.planner import GIB
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.hosted import Hosting, host_parts
from megatron.planner.memory.parameters import stage_matrices, stage_parameters
from megatron.trainer.arguments import Platform
from megatron.trainer.arguments.flags.config import TrainConfig, expert_tensor_size, num_places, ranks_of_place
from megatron.trainer.checkpoint import directory
from megatron.trainer.checkpoint.checkpoint import recorded_changes
from megatron.trainer.checkpoint.ownership import BETWEEN_LOOKS, OWNER_PATIENCE, OwnerMark
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.arrangement import arranged, arrangement_to_begin_with, first_arrangement
from megatron.trainer.ranks import set_seeds

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)


def this_platform() -> Platform:
    """The platform of this machine."""
    has_kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return Platform(
        is_cuda=backend.is_cuda(),
        has_transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
        has_deep_ep=importlib.util.find_spec("deep_ep") is not None,
        has_apex=importlib.util.find_spec("apex") is not None and has_kernel,
        engine_keeps_main_grad=engine_keeps_main_grad(installed_engine_version()),
        engine_puts_off=engine_puts_off(installed_engine_version()),
        without_fp8=_without_fp8() if backend.is_cuda() and installed_engine_version() else {},
    )


def _without_fp8() -> dict[str, str]:
    """FP8 recipe -> the reason, for the recipes that Transformer Engine does not support on this GPU."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    names = dict.fromkeys(("delayed", "tensorwise"), "is_fp8_available")
    names |= {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}
    found = {}
    for recipe, name in names.items():
        is_there, reason = getattr(FP8GlobalStateManager, name, lambda: (False, "Transformer Engine is too old"))()
        if not is_there:
            found[recipe] = reason.rstrip(".")
    return found


def initialize(args: TrainConfig) -> TrainConfig:
    """Join the job, unless this process has, and set the process up (`set_up`). Returns the run's configuration.

    Raises ValueError with one sentence if the rendezvous fails or the backend does not fit the machine.
    """
    args = on_this_device(args)
    if not torch.distributed.is_initialized():
        join_process_group(rendezvous(), args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes))
    return set_up(args)


def choose_device(distributed_backend: str | None) -> tuple[int, str]:
    """Set this process's CUDA device, if it computes on one. Returns (local rank, backend of the process group).

    `distributed_backend`: the backend that the user asks for; None: the usual one. Raises ValueError if the machine
    lacks the backend.
    """
    _, _, local_rank = environment_ranks()
    if backend.is_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return local_rank, backend.process_group_backend(distributed_backend)


def on_this_device(args: TrainConfig) -> TrainConfig:
    """Set this process's device (`choose_device`); return the configuration with its local rank and its backend."""
    local_rank, name = choose_device(args.distributed_backend)
    return replace(args, local_rank=local_rank, distributed_backend=name)


def set_up(args: TrainConfig, *, group: Callable[[TrainConfig], None] | None = None) -> TrainConfig:
    """Make megatron.core's process groups, set timeouts, and seed the generators. Collective.

    Returns the configuration; if the pipeline may change during training, in the arrangement in which the run begins.
    Raises CheckpointError if the checkpoint's record does not fit the run.

    `group`: makes the groups of other ranks than all; None: `make_groups` does.
    """
    agreement.set_timeout(timedelta(minutes=args.distributed_timeout_minutes))
    args = replace(args, recorded_changes=recorded_changes(args))
    if args.changes or args.recorded_changes is not None:
        args = replace(args, first_arrangement=first_arrangement(args))
        args = arranged(args, arrangement_to_begin_with(args))
    (group or make_groups)(args)
    set_seeds(args.seed)
    return args


def be_alone(args: TrainConfig, *, rank: int) -> None:
    """Set this process up alone, in its own process group, with the pipeline rank and the layers of `rank`.

    So it can build its part of the model while the job, which it joins later, trains without it.
    """
    be_alone_in_group(args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes))
    parallel_state.initialize_model_parallel()
    size = ranks_of_place(args)
    name_groups_to_come(
        rank % size,
        tensor_size=args.tensor_model_parallel_size,
        context_size=args.context_parallel_size,
        expert_tensor_size=expert_tensor_size(args),
        expert_size=args.expert_model_parallel_size,
    )
    parallel_state.set_pipeline_model_parallel_rank(rank // (size * num_places(args)))
    parallel_state.set_pipeline_model_parallel_world_size(args.pipeline_model_parallel_size)
    set_seeds(args.seed)


def be_alone_in_group(distributed_backend: str, timeout: timedelta) -> None:
    """Become the only rank of a process group, in a process that joins the job later."""
    torch.distributed.init_process_group(
        distributed_backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
    )
    agreement.set_timeout(timeout)


def make_groups(args: TrainConfig) -> None:
    """Make megatron.core's process groups. Collective.

    megatron.core is not told of several stages on a rank (`pipeline.runtime.stages.megatron.pipeline_position`).
    """
    rank_of_stage, arrangement = args.schedule.rank_of_stage, args.arrangement
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(args),
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if arrangement is not None and arrangement.pipelines_in_a_row else "tp-cp-ep-dp-pp",
        get_embedding_ranks=lambda ranks: embedding_ranks(ranks, rank_of_stage, args.schedule.tied_stage),
        get_position_embedding_ranks=lambda ranks: [ranks[rank_of_stage[0]]],
    )


def rendezvous() -> torch.distributed.Store:
    """The store through which the ranks of the job find each other. Raises ValueError if there is none."""
    rank, world_size, _ = environment_ranks()
    if world_size == 1:
        return torch.distributed.HashStore()
    with _finding_job(world_size):
        store = _launchers_store()
        return of_this_start(store, rank=rank, world_size=world_size) if _may_restart() else store


def running_job(takes_in: Callable[[torch.distributed.Store], bool]) -> torch.distributed.Store | None:
    """The store of the running job, if a launcher has restarted this process in the place of a lost one.

    None: this process begins the job with the others; torchrun may have restarted all of them.

    Args:
        takes_in: whether the job with this store still has processes that can take this process in.

    Raises ValueError as `rendezvous` does.
    """
    _, world_size, _ = environment_ranks()
    if world_size == 1 or number_of("TORCHELASTIC_RESTART_COUNT", 0) == 0:
        return None
    with _finding_job(world_size):
        store = _launchers_store()
        if not _may_restart():  # tools/launch.py restarts single processes, never all of them
            return store
        if not store.check([_PART]):
            return None
        part = torch.distributed.PrefixStore(store.get(_PART).decode(), store)
        return part if takes_in(part) else None


def _may_restart() -> bool:
    """Whether torchrun may restart all processes, which then find the keys of the ended processes in the store."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _launchers_store() -> torch.distributed.Store:
    return next(torch.distributed.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))[0]


@contextmanager
def _finding_job(world_size: int) -> Iterator[None]:
    """Turn errors of a rendezvous in the block into ValueError."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise ValueError(
                f"port in use: {where} belongs to another program; choose another --master-port"
            ) from error
        raise ValueError(
            f"found no job at {where} within {RENDEZVOUS_TIMEOUT.seconds} s ({error}); check "
            f"MASTER_ADDR, MASTER_PORT and that all {world_size} processes were started"
        ) from error


_PART = "part"
"""The key that holds the name of the store's part in which the processes of the latest start have met."""


def of_this_start(store: torch.distributed.Store, *, rank: int, world_size: int) -> torch.distributed.Store:
    """The part of a launcher's store in which no earlier processes of the job have keys. Collective.

    torchrun --max-restarts keeps its store when it restarts the processes, with the keys of the killed processes, such
    as their addresses; and nodes count their restarts differently. So rank 0 draws a name for the part. The other ranks
    ask for the name with a word that no earlier process can have used.

    Raises RuntimeError if a rank does not take part within `RENDEZVOUS_TIMEOUT`.
    """
    word = secrets.token_hex(8)
    if rank > 0:
        store.set(f"asks/{rank}", word)
        store.wait([f"answer/{word}"], RENDEZVOUS_TIMEOUT)
        name = store.get(f"answer/{word}").decode()
        store.set(f"{name}/knows/{rank}", "")
        return torch.distributed.PrefixStore(name, store)
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    unknown = set(range(1, world_size))
    while unknown:
        for other in [each for each in unknown if store.check([f"asks/{each}"])]:
            store.set(f"answer/{store.get(f'asks/{other}').decode()}", word)
        unknown = {each for each in unknown if not store.check([f"{word}/knows/{each}"])}
        if unknown and time.monotonic() > deadline:
            raise RuntimeError(f"no word of rank {', '.join(map(str, sorted(unknown)))}")
        time.sleep(0.01)
    store.set(_PART, word)
    return torch.distributed.PrefixStore(word, store)


def join_process_group(store: torch.distributed.Store, distributed_backend: str, timeout: timedelta) -> None:
    """Become a rank of the job's process group. Collective."""
    rank, world_size, _ = environment_ranks()
    store.set_timeout(timeout)
    torch.distributed.init_process_group(
        distributed_backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def shut_down() -> None:
    """Destroy the process groups, if there are any."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def left_in_order() -> Iterator[None]:
    """Destroy the process groups after the block, even after an error, so that the threads of gloo's groups end.

    A thread that still runs while the interpreter exits may abort the process (pytorch/pytorch#190489), and the exit
    status is lost.
    """
    try:
        yield
    finally:
        shut_down()


# --- memory of hosts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """The memory that a rank needs on its host.

    Attributes:
        host: the name of the host.
        available: available bytes of the host's memory.
        part: pipeline, tensor and expert rank. Replicas with the same part on a host share one store.
        store: bytes of weights, gradients and optimizer state.
        stash: bytes of stage inputs; each rank keeps its own.
    """

    host: str
    available: int
    part: tuple[int, int, int]
    store: float
    stash: float


def require_room(args: TrainConfig, layers: Sequence[int]) -> None:
    """Refuse a run for which a host has too little memory. Collective. `layers`: the number of layers of each stage.

    Raises ValueError on all ranks.
    """
    hosting = from_flags.hosting_of(args)
    if hosting is None:
        return
    if (sentence := shortage(gathered(_own_need(args, hosting, layers)))) is not None:
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
    part = (rank, parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank())
    host = this_process().host
    return Need(host, backend.available_host_bytes(), part, parts.total - parts.stash, parts.stash)


def shortage(needs: Sequence[Need]) -> str | None:
    """The error for the host whose ranks lack the most memory; None if all hosts have enough."""
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


def prepare_outputs(args: TrainConfig, *, takes_over: bool = False) -> OwnerMark | None:
    """Make the directories of `--save` and `--pipeline-timeline`, and take the directory of `--save` for this job.

    In `--save`, the leftovers of a killed save are cleaned up. Collective.

    Returns this job's mark on the directory of `--save` on rank 0 (release it in the end); None on other ranks. A run
    that does not train saves nothing, so its `--save` may be read-only.

    `takes_over`: the directory may still have the mark of a process of this job that is lost, and ends soon.

    Raises ValueError on every rank if rank 0 cannot write into a directory, or if another job writes into `--save`.
    """
    save = None if args.skip_train else args.save
    outputs = {"--save": save, "--pipeline-timeline": args.pipeline_timeline}
    problem = on_rank_zero(lambda: _problem_with_directories(outputs))
    if problem is not None:
        raise ValueError(problem)
    if save is None:
        return None
    mark = OwnerMark(save) if torch.distributed.get_rank() == 0 else None
    until = time.monotonic() + OWNER_PATIENCE if takes_over else None
    while not on_rank_zero(lambda: mark.try_to_take(until)):  # in short steps: other ranks wait with a timeout
        time.sleep(BETWEEN_LOOKS)
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
