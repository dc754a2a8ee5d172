"""Weights on the host for megatron.core's chunks and optimizers: the relay of L2L (Pudipeddi et al., 2020).

Problem: megatron.core's optimizers own masters and moments, and determine the formats of checkpoints. In FP32 they step
the model's parameters themselves. But here a parameter shows device memory, which is either a slot or NaN.

Solution: megatron.core's optimizer is built over the parameters of the chunks as usual, but its `step` is never called.
Instead the host's optimizer steps tensors on the host, stage by stage, with the optimizer state of the parameters. In
FP32 these tensors are the host's weights. Otherwise they are the optimizer's masters, from which the low-precision
weights are written. When the pipeline is drained, the parameters show the host's weights. So checkpoints are written
and read by the same code as with weights on the device.

The gradients of a stage are reduced over the ranks before they leave the device. Each parameter gives one FP32 norm,
and the norms are added in the same order as under other schedules, so the norm of a rank has the same bits. When the
gradients of a tied embedding must be added up, both have left the device. So they are copied back for the sum.

Where ranks share out experts, those with the same experts and the same other weights share a store.

megatron.core's DDP keeps a `main_grad` for every parameter in flat buffers. Here a stage has gradients on the device
only from its first backward of a batch until they have left. So `RelayChunk` replaces DDP and has no buffers: a hook on
each parameter adds each gradient to the current `main_grad` of the parameter, as in DDP, and drops the gradient.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron import backend
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer
from megatron.pipeline.runtime.relay.host_store import HostStage, HostStore
from megatron.pipeline.runtime.relay.host_update import HostBatch, HostUpdate, NormsOnHost
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from megatron.pipeline.runtime.relay.resident_weights import StageWeights
from megatron.pipeline.runtime.stages.megatron.base_update import BaseUpdate
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup, shares_out_experts, uses_nccl
from megatron.pipeline.runtime.stages.megatron.optimizers import GradientSlot, is_dense, masters_of
from megatron.pipeline.runtime.stages.megatron.pipeline_position import tied_embeddings
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction, warm_up_common


class RelayChunk(DistributedDataParallel):
    """A module with the interface of megatron.core's DDP, without gradient buffers.

    Args:
        config: the configuration of the model.
        ddp_config: as for DDP.
        module: the model chunk.
    """

    def __init__(
        self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, module: torch.nn.Module
    ) -> None:
        super(DistributedDataParallel, self).__init__(config, module)
        self.ddp_config = ddp_config
        self.buffers: list = []
        self.expert_parallel_buffers: list = []
        self.bucket_groups: list = []
        self.expert_parallel_bucket_groups: list = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def show_as_main_grad(parameter: torch.nn.Parameter, view: Tensor | None) -> None:
    """Make backwards add the gradient of `parameter` to `view`, in its dtype; None: no backward follows."""
    parameter.main_grad = view


def _add_to_main_grad(parameter: torch.nn.Parameter) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


class MegatronRelayUpdate(HostUpdate, BaseUpdate):
    """`RelayUpdate` of one rank's chunks and their megatron.core optimizer.

    Args:
        chunks: the model chunks of the rank, in the order of their stages.
        optimizer: the result of `get_megatron_optimizer` for the chunks; not the distributed optimizer.
        scheduler, loss_names, timeout: as for `MegatronWeightUpdate`.
        stages: the stages of the chunks.
        residency: the residency of the schedule.
        rank_metrics: as for `MegatronWeightUpdate`; the metrics of `ledger` are added.
        host: a name of this host; replicas with the same name share one store. None: the host name.
        gathers: each replica of a node fetches a share of the weights, and their devices gather the shares.

    Raises:
        ValueError: an optimizer, chunks or replicas with which this update would not be exact.
    """

    def __init__(
        self,
        chunks: Sequence[RelayChunk],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None = None,
        *,
        stages: Sequence[int],
        residency: Residency,
        loss_names: tuple[str, ...] = ("lm loss",),
        timeout: timedelta | None = None,
        rank_metrics: Mapping[str, Callable[[], float]] | None = None,
        host: str | None = None,
        gathers: bool = False,
    ) -> None:
        BaseUpdate.__init__(self, optimizer, scheduler, chunks, weights=FLUSH, loss_names=loss_names)
        self._connect(timeout, rank_metrics)
        self._check(chunks, residency)
        models = dict(zip(stages, map(unwrap_model, chunks), strict=True))
        self._parameters = {
            stage: {f"{stage}.{name}": each for name, each in model.named_parameters()}
            for stage, model in models.items()
        }
        named = {name: each for of_stage in self._parameters.values() for name, each in of_stage.items()}
        masters = masters_of(self._inner)
        self._sums_in_fp32 = chunks[0].ddp_config.grad_reduce_in_fp32
        device = backend.device()
        store = HostStore(
            self._parameters,
            device=device,
            masters={name: masters[each] for name, each in named.items() if each in masters},
            gradient_dtype=torch.float32 if self._sums_in_fp32 else None,
            replicas=NodeReplicas(_with_the_same_weights(), host=host, device=device, timeout=self._timeout),
            gathers=gathers,
        )  # fmt: skip
        if gathers:
            self._check_gather(store)
        stands_for = {each: store.parameters[name] for name, each in named.items() if each not in masters}
        self._reduction = GradientReduction(list(chunks), self._inner, (), self._groups)
        self._tied = tied_embeddings(chunks)
        self._set_up(
            models, store, HostOptimizer(self._inner.optimizer, store, stands_for=stands_for),
            NormsOnHost(self._reduction.counted, dtype=torch.float32, device=device), residency=residency,
            show=show_as_main_grad, has_tied=bool(self._tied), device=device,
        )  # fmt: skip
        self.rank_metrics |= self.ledger.rank_metrics
        self.reduces_stages = self._groups.data is not None or self._groups.tensor is not None
        self._warm_up(chunks)

    @torch.no_grad()
    def _warm_up(self, chunks: Sequence[RelayChunk]) -> None:
        """Run every collective of training once on zero gradients, before the first batch.

        The docstring of the module `reduction` has the reason.
        """
        for stage in self.store.stages:
            self.gradients.accumulate(stage)
            slot = self._slot(stage)
            self._reduce(stage)
            if any(each in slot.views for each in self._tied):
                self._reduction.over_embedding(slot)
            self.gradients.store(stage)  # frees the buffer; the returned copy is not run
        warm_up_common(chunks, self._groups)

    def _check(self, chunks: Sequence[RelayChunk], residency: Residency) -> None:
        if isinstance(self._inner, DistributedOptimizer):
            raise ValueError("The distributed optimizer keeps its shards on the device: leave it out.")
        for chunk in chunks:
            if chunk.ddp_config.average_in_collective:
                raise ValueError(
                    "average_in_collective is not supported: the chain sums gradients over replicas, so turn it off."
                )
            if chunk.config.gradient_accumulation_fusion:
                raise ValueError(
                    "gradient_accumulation_fusion adds to gradients unseen by the code that copies them to the host: "
                    "turn it off."
                )
        if residency.is_eager and (
            self._inner.config.clip_grad > 0.0 or getattr(self._inner, "grad_scaler", None) or self._per_token
        ):
            raise ValueError(
                "An eager update is made before the norm of all gradients, any overflow and the number of tokens are "
                "known: use deferred updates, or neither clip nor scale the loss nor average it over tokens."
            )

    def _check_gather(self, store: HostStore) -> None:
        if not store.gathers:
            raise ValueError(
                "a fetch of shares is gathered from replicas on the node, and this rank's are on others: fetch whole "
                "stages, or place replicas together."
            )
        if backend.is_cuda() and not uses_nccl():
            raise ValueError("GPUs gather shares of a fetch over NCCL: use it, or fetch whole stages.")

    def versions_of(self, stage: int) -> StageWeights:
        """The weight versions of a stage of the rank."""
        return self.resident.of_stage(stage)

    def _reduce(self, stage: int) -> None:
        """Reduce the gradients of a stage over the tensor ranks and the replicas (mean, or sum with per-token loss)."""
        slot, data = self._slot(stage), self._groups.data
        for group, flat in self._parts(stage, slot.flats) if data is not None else ():
            if not self._per_token:
                flat.mul_(1.0 / data.size)
            if group is not None:
                group.all_reduce(flat)
        self._reduction.over_tensor(slot)

    def _parts(self, stage: int, flats: Sequence[Tensor]) -> Iterator[tuple[ChainGroup | None, Tensor]]:
        """Yield (group, part) for the parts of a stage's flat gradients; each part is reduced over its group.

        A part is a whole flat tensor. But where ranks share out experts, a part has neighbouring parameters of one
        kind, experts or others, and experts are reduced over the ranks with the same experts.
        """
        if not shares_out_experts():
            yield from ((self._groups.data, flat) for flat in flats)
            return
        layout, flat = self.store.stages[stage].gradient_layout, self.gradients.flat(stage)
        for dense, run in itertools.groupby(self._parameters[stage].items(), key=lambda each: is_dense(each[1])):
            spans = layout.spans({name: slice(0, parameter.numel()) for name, parameter in run})
            for dtype, span in spans.items():
                yield self._groups.data if dense else self._groups.expert_data, flat[dtype][span]

    def _norms_of(self, stage: int) -> dict[Parameter, Tensor]:
        return self._reduction.local_norms(self._slot(stage))

    def _places_of_tied(self) -> dict[Parameter, tuple[str, HostStage]]:
        return {
            each: (name, self.store.stages[stage])
            for stage, named in self._parameters.items()
            for name, each in named.items()
            if any(each is tied for tied in self._tied)
        }

    def _add_tied(self, gradients: dict[Parameter, Tensor]) -> dict[Parameter, Tensor]:
        for each in gradients.values():
            self.ledger.note_on_device(each)
        slot = GradientSlot([], gradients)
        self._reduction.over_embedding(slot)
        self._reduction.over_embedding_copies(slot)
        return self._reduction.local_norms(slot)

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Complete the batch's report by one all-reduce of norm, overflow, losses and stop requests over the job."""
        norms = self._norms.take(version)
        assert len(norms) == len(self._reduction.counted), "the program has a REDUCE_GRAD for each stage or none"
        report = self._batches[version].report
        self._complete(report, self._reduction.norm_squared(norms).item(), stop_requests, losses)

    def _slot(self, stage: int) -> GradientSlot:
        """The gradients of a stage on the device, as a slot."""
        views = self.gradients.views(stage)
        flats = list(self.gradients.flat(stage).values())
        return GradientSlot(flats, {each: views[name] for name, each in self._parameters[stage].items()})

    def _decide(self, batch: HostBatch) -> None:
        report = batch.report
        self._note(report)
        if not report.skipped:
            batch.factor = self._factor(report)
        self._advance(report)
        self._last_norm = report.grad_norm

    def close(self) -> None:
        super().close()
        self.resident.close()


def _with_the_same_weights() -> list[int]:
    """The ranks that hold the same weights as this one: the replicas that have the same experts."""
    ranks = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    if not shares_out_experts():
        return ranks
    same = dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())
    return [rank for rank in ranks if rank in same]
