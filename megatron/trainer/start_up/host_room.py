"""Whether hosts have the memory for weights that live there, before anything is made of them.

Problem: a host that has too little does not say so. It maps what it is asked for, and the system ends a process when
the last pages are written, with the moments of the first update.

Solution: each rank computes what it will keep on its host (`memory.hosted`) and asks the system what there is; all
tell each other, and where the ranks of a host need more than is available, all refuse with one sentence.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.placement.hosts import this_process
from megatron.planner import GIB, Activations
from megatron.planner.memory.hosted import Hosting, host_parts
from megatron.planner.memory.parameters import stage_parameters
from megatron.trainer.plan import from_flags


@dataclass(frozen=True)
class Need:
    """What a rank needs of its host. Attributes:
    host: its name; available: bytes that are to be had there.
    part: pipeline and tensor rank; replicas on a host share one store.
    store, stash: bytes of weights, gradients and optimizer state, and of inputs, which are each rank's own.
    """

    host: str
    available: int
    part: tuple[int, int]
    store: float
    stash: float


def require_room(args: argparse.Namespace, layers: Sequence[int]) -> None:
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


def _own_need(args: argparse.Namespace, hosting: Hosting, layers: Sequence[int]) -> Need:
    shape, rank = from_flags.architecture(args), parallel_state.get_pipeline_model_parallel_rank()
    parameters = stage_parameters(shape, args.tensor_model_parallel_size, layers)
    parts = host_parts(
        rank,
        Activations(shape, from_flags.activation_setting(args)).boundary,
        from_flags.training_state(args),
        [parameters[stage] for stage in args.schedule.stages_of(rank)],
        args.schedule.rank_of_stage,
        hosting,
    )
    part = rank, parallel_state.get_tensor_model_parallel_rank()
    host = this_process().host
    return Need(host, backend.available_host_bytes(), part, parts.total - parts.stash, parts.stash)


def shortage(needs: Sequence[Need]) -> str | None:
    """What to tell where a host has too little for its ranks; the one that lacks most."""
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
