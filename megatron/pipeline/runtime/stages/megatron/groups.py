"""Process groups that only the reduction chain uses.

Problem: the chain runs on its own thread, while forwards and backwards use megatron.core's groups (tensor parallelism).
If two threads used one group, the order of its collectives could differ between ranks.

Solution: duplicates of the groups for the chain. They are built directly on the job's store, under names that all
members compute alike. Every rank makes its groups in the same order (data, experts' data, tensor, embedding, world),
and only the members of a group take part. So start-up cannot deadlock, and its time does not grow with the number of
groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron import backend
from megatron.backend.streams import shut_down, streams_of
from megatron.core import parallel_state
from megatron.pipeline.communicators import COMMUNICATOR_CTAS
from megatron.pipeline.runtime.contract.meetings import forget_names, fresh_name
from megatron.pipeline.runtime.copied_stages import CopyRanks

DEFAULT_TIMEOUT = timedelta(minutes=10)


class ChainGroup:
    """One group of the chain. Its collectives block until they are done; with NCCL the current stream waits instead.

    Args:
        name: part of the group's prefix in the store.
        ranks: global ranks of the members, in the order of their ranks in the group.
        backend_name: "nccl" or "gloo".
        timeout: the timeout of a collective; doubled with NCCL.
    """

    def __init__(self, name: str, ranks: list[int], *, backend_name: str, timeout: timedelta) -> None:
        store = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(fresh_name(f"reduction_chain/{name}", ranks), store)
        self.rank = ranks.index(dist.get_rank())
        self.size = len(ranks)
        self.uses_nccl = backend_name == "nccl"
        if self.uses_nccl:
            self.process_group = streams_of(backend.device()).communicator(
                store,
                self.rank,
                self.size,
                max_ctas=COMMUNICATOR_CTAS["chain"],
                timeout=2 * timeout,  # the wait for the chain times out first, and names the reduction
            )
        else:
            self.process_group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def all_reduce(self, tensor: Tensor, operation: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
        """All-reduce `tensor` in place over the group."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        with _Staged(tensor, self.uses_nccl) as staged:
            self.process_group.allreduce([staged], options).wait()

    def reduce_scatter(self, tensor: Tensor) -> None:
        """Sum a flat `tensor` over the group in place.

        Afterwards only this rank's share is valid: part `rank` of `size` equal parts.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM
        with _Staged(tensor, self.uses_nccl) as staged:
            share = staged.chunk(self.size)[self.rank]
            self.process_group._reduce_scatter_base(share, staged, options).wait()

    def pass_on(self, tensor: Tensor, distance: int = 1) -> Tensor:
        """Send a tensor on the host to the rank `distance` places further in the ring. Not with NCCL.

        Returns the tensor, with the same shape and dtype, that the rank `distance` places before sends to this rank.
        """
        assert not self.uses_nccl, "tensors on the host"
        received = torch.empty_like(tensor)
        works = [
            self.process_group.send([tensor], (self.rank + distance) % self.size, 0),
            self.process_group.recv([received], (self.rank - distance) % self.size, 0),
        ]
        for work in works:
            work.wait()
        return received

    def close(self) -> None:
        """End the group after all its work. Collective over its members."""
        if self.uses_nccl:
            shut_down(self.process_group)
        self.process_group = None  # gloo's sockets and threads end with the last reference


class _Staged:
    """A context with a tensor on which the group can work: with gloo a copy on the host, copied back at the end."""

    def __init__(self, tensor: Tensor, uses_nccl: bool) -> None:
        self._tensor = tensor
        self._staged = tensor if uses_nccl or not tensor.is_cuda else tensor.cpu()

    def __enter__(self) -> Tensor:
        return self._staged

    def __exit__(self, *exception) -> None:
        if self._staged is not self._tensor:
            self._tensor.copy_(self._staged)


@dataclass
class ChainGroups:
    """The groups of the chain; None for a group that has one member or to which this rank does not belong.

    `copies`: in a program with copies, the ranks of `data` (the ranks with copies), `expert_data`, `embedding` and
    `world`.
    """

    data: ChainGroup | None
    expert_data: ChainGroup | None  # replicas of the same experts; under expert parallelism alone
    tensor: ChainGroup | None
    embedding: ChainGroup | None
    world: ChainGroup | None
    copies: CopyRanks | None = None

    @classmethod
    def create(cls, *, timeout: timedelta = DEFAULT_TIMEOUT, copies: CopyRanks | None = None) -> "ChainGroups":
        """Duplicate megatron.core's groups, except where `copies` names other ranks.

        Collective: every rank of the job calls it once.
        """
        backend_name = "nccl" if uses_nccl() else "gloo"

        def duplicate(name: str, ranks: list[int]) -> ChainGroup | None:
            if len(ranks) < 2 or dist.get_rank() not in ranks:
                return None
            return ChainGroup(name, ranks, backend_name=backend_name, timeout=timeout)

        if copies is None:
            ranks = {
                "data": _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)),
                "expert_data": _expert_data_ranks(),
                "embedding": _ranks(parallel_state.get_embedding_group(check_initialized=False)),
                "world": list(range(dist.get_world_size())),
            }
        else:
            ranks = {
                "data": list(copies.copies),
                "expert_data": list(copies.same_experts),
                "embedding": list(copies.tied),
                "world": list(copies.job),
            }
        ranks["tensor"] = _ranks(parallel_state.get_tensor_model_parallel_group())
        order = ("data", "expert_data", "tensor", "embedding", "world")
        return cls(**{name: duplicate(name, ranks.get(name, [])) for name in order}, copies=copies)

    @property
    def num_replicas(self) -> int:
        """The number of ranks over which gradients are reduced."""
        return 1 if self.data is None else self.data.size

    @property
    def adds_embedding(self) -> bool:
        """Whether this rank's gradient of a shared embedding enters the sum: of copies only the first one's does."""
        return self.copies is None or self.copies.is_first(dist.get_rank())

    @property
    def spans_default(self) -> bool:
        """Whether the job has all ranks of the default group. It has fewer after ranks were lost."""
        return self.copies is None or len(self.copies.job) == dist.get_world_size()

    def meet(self) -> None:
        """Wait for all ranks of the job."""
        if self.spans_default:
            dist.barrier()
        elif self.world is not None:
            self.world.all_reduce(torch.zeros(1, device=backend.device()))
            streams = streams_of(backend.device())
            streams.finish(streams.record())

    def close(self) -> None:
        """End all groups. Call it while drained. Collective over all ranks."""
        for group in (self.data, self.expert_data, self.tensor, self.embedding, self.world):
            if group is not None:
                group.close()


def uses_nccl() -> bool:
    """Whether the collectives of the job use NCCL."""
    return "nccl" in dist.get_backend() and backend.is_cuda()


def _expert_data_ranks() -> list[int]:
    """The ranks that hold the same experts as this one; empty where the replicas do not share out experts."""
    if not shares_out_experts():
        return []
    return _ranks(parallel_state.get_expert_data_parallel_group())


def shares_out_experts() -> bool:
    """Whether ranks share out the experts of a layer, so that their gradients have groups of their own."""
    return parallel_state.get_expert_model_parallel_world_size() > 1


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None or not is_formed(group) else dist.get_process_group_ranks(group)


def is_formed(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group are in the job; False for a group that `name_groups_to_come` has made."""
    return group.size() <= dist.get_world_size()


def name_groups_to_come(
    index: int, *, tensor_size: int, context_size: int, expert_tensor_size: int, expert_size: int
) -> None:
    """Give megatron.core groups with a rank and a size, but without a connection.

    So a process that is still alone can build the layers for its place in groups that are formed later. `rebind` then
    replaces these groups.

    Args:
        index: the place of this process among the ranks that compute these layers together.
        tensor_size, context_size, expert_tensor_size, expert_size: the parallel degrees.
    """
    tensor_and_context, of_experts = tensor_size * context_size, expert_tensor_size * expert_size
    expert, expert_tensor = divmod(index % of_experts, expert_tensor_size)
    for name, rank, size in (
        ("_TENSOR_MODEL_PARALLEL_GROUP", index % tensor_size, tensor_size),
        ("_CONTEXT_PARALLEL_GROUP", index % tensor_and_context // tensor_size, context_size),
        ("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", index % tensor_and_context, tensor_and_context),
        ("_EXPERT_MODEL_PARALLEL_GROUP", expert, expert_size),
        ("_EXPERT_TENSOR_PARALLEL_GROUP", expert_tensor, expert_tensor_size),
        ("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", index % of_experts, of_experts),
    ):
        if size > 1:
            setattr(parallel_state, name, dist.ProcessGroup(rank, size))


def name_groups_of_survivors(
    places: Sequence[Sequence[int]],
    *,
    tensor_size: int,
    context_size: int,
    expert_tensor_size: int,
    expert_size: int,
    pipeline_rank: int,
    num_pipeline_ranks: int,
) -> None:
    """Give megatron.core the groups of a job that has lost ranks. Collective over the default group.

    megatron.core can only make the groups of a whole grid of ranks, so its variables are set here.

    Args:
        places: the ranks that are left with the same stages as this rank, ascending: for each place, this rank's
            included, those that compute the stages together, of one replica or of those that share out experts.
        tensor_size, context_size, expert_tensor_size, expert_size: the parallel degrees. Ranks of a group are in a
            row, tensor ranks first, and expert tensor ranks first.
        pipeline_rank, num_pipeline_ranks: this rank's place in the pipeline of its replica.
    """
    forget_groups()
    own = dist.get_rank()

    def in_rows(size: int) -> tuple[list[list[int]], list[int], int]:
        """The places cut into rows of `size` ranks, the row with this rank, and this rank's index there."""
        rows = [[*place[start : start + size]] for place in places for start in range(0, len(place), size)]
        row = next(each for each in rows if own in each)
        return rows, row, row.index(own)

    replicas, replica, index = in_rows(tensor_size * context_size)
    experts, sharing, expert = in_rows(expert_tensor_size * expert_size)
    tensor, expert_tensor = index % tensor_size, expert % expert_tensor_size
    row = slice(index - tensor, index - tensor + tensor_size)
    within = (
        (replica[row], _TENSOR), (replica[tensor::tensor_size], _CONTEXT), (replica, _TENSOR_AND_CONTEXT),
        (sharing[expert_tensor::expert_tensor_size], _EXPERT),
        (sharing[expert - expert_tensor : expert - expert_tensor + expert_tensor_size], _EXPERT_TENSOR),
        (sharing, _EXPERT_TENSOR_AND_EXPERT),
    )  # fmt: skip
    across = (
        ([each[index] for each in replicas], _PEERS),
        ([rank for each in replicas for rank in each[tensor::tensor_size]], _PEERS_WITH_CONTEXT),
        ([rank for each in replicas for rank in each[row]], _TENSOR_AND_PEERS),
        ([rank for each in replicas for rank in each], _TENSOR_AND_PEERS_WITH_CONTEXT),
        ([each[expert] for each in experts], _PEERS_OF_EXPERTS),
    )
    for groups in (within, across, (([own], _PIPELINE),)):  # names share a group only where their ranks always agree
        made: dict[tuple, dist.ProcessGroup] = {}
        for ranks, names in groups:
            if tuple(ranks) not in made:
                made[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
            _name(made[tuple(ranks)], ranks, names)
    _name(dist.group.WORLD, None, _WORLD)
    parallel_state.set_pipeline_model_parallel_rank(pipeline_rank)
    parallel_state.set_pipeline_model_parallel_world_size(num_pipeline_ranks)
    parallel_state._set_global_memory_buffer()


def _name(group: dist.ProcessGroup, ranks: list[int] | None, names: Sequence[str]) -> None:
    for name in names:
        assert hasattr(parallel_state, name), name
        setattr(parallel_state, name, ranks if name.endswith("RANKS") or "GLOBAL_RANKS" in name else group)


def forget_groups() -> None:
    """Forget megatron.core's groups and the names of the chain's groups, before groups are made on a new store."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    forget_names()  # a rank whose recovery was cut short has made more groups than others


def groups_of_layers() -> dict[str, dist.ProcessGroup]:
    """The groups that layers and optimizer keep, by megatron.core's names."""
    return {name: getattr(parallel_state, name) for name in _OF_LAYERS}


def rebind(chunks: Sequence[Module], optimizer: object, before: Mapping[str, dist.ProcessGroup]) -> None:
    """Replace the groups in `before`, which layers and optimizer keep, by megatron.core's present groups.

    `before`: an earlier result of `groups_of_layers`. Where names share a group, so do their ranks, whoever is lost.
    """
    now = groups_of_layers()
    found = {id(group): now[name] for name, group in before.items()}
    seen: set[int] = set()
    for holder in (optimizer, *(module for chunk in chunks for module in chunk.modules())):
        _rebind(holder, found, seen)


def _rebind(holder: object, found: Mapping[int, dist.ProcessGroup], seen: set[int]) -> None:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for name, value in vars(holder).items():
        if id(value) in found:
            vars(holder)[name] = found[id(value)]
            continue
        for each in value if isinstance(value, list) else (value,):
            if type(each).__module__.startswith("megatron.") and hasattr(each, "__dict__"):  # a collection of groups
                _rebind(each, found, seen)


_PIPELINE = ("_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS")
_TENSOR = ("_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")
_CONTEXT = ("_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS")
_TENSOR_AND_CONTEXT = ("_TENSOR_AND_CONTEXT_PARALLEL_GROUP",)
_EXPERT = ("_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS")
_EXPERT_TENSOR = ("_EXPERT_TENSOR_PARALLEL_GROUP",)
_EXPERT_TENSOR_AND_EXPERT = ("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",)
_PEERS = ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS")
_PEERS_WITH_CONTEXT = (
    "_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
)  # fmt: skip
_PEERS_OF_EXPERTS = (
    "_EXPERT_DATA_PARALLEL_GROUP", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
)  # fmt: skip
_TENSOR_AND_PEERS = ("_TENSOR_AND_DATA_PARALLEL_GROUP",)
_TENSOR_AND_PEERS_WITH_CONTEXT = ("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",)
_OF_LAYERS = (
    "_TENSOR_MODEL_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_TENSOR_PARALLEL_GROUP", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
)  # fmt: skip
_WORLD = (
    "_MODEL_PARALLEL_GROUP", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
)  # fmt: skip
