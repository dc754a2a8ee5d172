"""Weights on the host for megatron.core's chunks and optimizers: the relay of L2L (Pudipeddi et al., 2020).

Problem: megatron.core's optimizers own masters and moments, and with them the formats of all checkpoints; in FP32 they
own the model's parameters themselves, which show the device's memory: a slot, or NaN.

Solution: megatron.core's optimizer is made of the chunks' parameters as usual, and its `step` is never called. The
host's optimizer steps other tensors, stage by stage, with the state of the parameters for which they stand: the host's
weights in FP32, else the optimizer's masters, from which the low-precision weights are then written. When the pipeline
is drained, parameters show the host's weights, so the same code writes and reads checkpoints as where weights live on
the device.

A stage's gradients are averaged and summed over ranks before they leave the device. Each parameter gives one FP32 norm,
and the norms are added in the same order as under other schedules, so that the norm of a rank is equal to the last bit.
Both gradients of a tied embedding have left by then: they are copied back for a moment to be added up.

megatron.core's DDP gives every parameter a `main_grad` in one flat buffer for as long as it lives. Here a stage has
gradients on the device only from its first backward of a batch until they have left. So `RelayChunk` stands in for DDP
without buffers: a hook on each parameter adds each gradient to the parameter's current `main_grad`, as DDP's does, and
drops it.
"""

from collections.abc import Callable, Mapping, Sequence
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
from megatron.pipeline.runtime.relay.host_update import HostBatch, HostUpdate
from megatron.pipeline.runtime.relay.ledger import RelayLedger
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from megatron.pipeline.runtime.relay.resident_weights import HostVersions, ResidentWeights, StageWeights
from megatron.pipeline.runtime.relay.stage_gradients import NormsOnHost, StageGradients
from megatron.pipeline.runtime.stages.megatron.core_update import CoreUpdate
from megatron.pipeline.runtime.stages.megatron.groups import uses_nccl
from megatron.pipeline.runtime.stages.megatron.optimizers import GradientSlot, masters_of
from megatron.pipeline.runtime.stages.megatron.pipeline_position import tied_embeddings
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction, warm_up_common


class RelayChunk(DistributedDataParallel):
    """`module` with the interface of megatron.core's DDP, without buffers."""

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
    """Make backwards add to `view`, in its dtype; None: no backward follows."""
    parameter.main_grad = view


def _add_to_main_grad(parameter: torch.nn.Parameter) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


class MegatronRelayUpdate(HostUpdate, CoreUpdate):
    """`RelayUpdate` of one rank's chunks and their megatron.core optimizer.

    Args:
        chunks: the rank's model chunks, in the order of their stages.
        optimizer: what `get_megatron_optimizer` returned for them; not the distributed optimizer.
        scheduler, loss_names, timeout, rank_metrics: as for `MegatronWeightUpdate`; `ledger` adds its own.
        stages: those of the chunks.
        residency: that of the schedule.
        host: name of this host; replicas with the same name share one store. None: its host name.
        gathers: replicas fetch shares of weights, which their devices gather.

    Raises:
        ValueError: an optimizer or chunks that this update cannot drive exactly.
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
        CoreUpdate.__init__(self, optimizer, scheduler, weights=FLUSH, loss_names=loss_names)
        self.residency = residency
        self._connect(timeout, rank_metrics)
        self._check(chunks)
        models = dict(zip(stages, map(unwrap_model, chunks), strict=True))
        self._parameters = {
            stage: {f"{stage}.{name}": each for name, each in model.named_parameters()}
            for stage, model in models.items()
        }
        named = {name: each for of_stage in self._parameters.values() for name, each in of_stage.items()}
        masters = masters_of(self._inner)
        self._sums_in_fp32 = chunks[0].ddp_config.grad_reduce_in_fp32
        device = backend.device()
        self.store = HostStore(
            self._parameters,
            device=device,
            masters={name: masters[each] for name, each in named.items() if each in masters},
            gradient_dtype=torch.float32 if self._sums_in_fp32 else None,
            replicas=NodeReplicas(
                dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)),
                host=host, device=device, timeout=self._timeout,
            ),
            gathers=gathers,
        )  # fmt: skip
        if gathers:
            self._check_gather()
        stands_for = {each: self.store.parameters[name] for name, each in named.items() if each not in masters}
        self._host = HostOptimizer(self._inner.optimizer, self.store, stands_for=stands_for)
        self.resident = ResidentWeights(models, self.store, num_resident=residency.stages, device=device)
        self.versions = HostVersions(self.store, self.resident)
        self.gradients = StageGradients(self.store.stages, self._parameters, show=show_as_main_grad, device=device)
        self.ledger = RelayLedger(
            always_on_device=self.resident.num_bytes + self.gradients.num_bytes,
            on_host=lambda: self.store.num_bytes + self._host.moments.num_bytes,
        )
        self._decisions.rank_metrics |= self.ledger.rank_metrics
        self._reduction = GradientReduction(list(chunks), self._inner, (), self._groups)
        self._norms = NormsOnHost(self._reduction.counted, dtype=torch.float32, device=device)
        self._tied = tied_embeddings(chunks)
        self.reduces_stages = self._groups.data is not None or self._groups.tensor is not None
        self._keep_tied(has_tied=bool(self._tied), device=device)
        self._warm_up(chunks)

    @torch.no_grad()
    def _warm_up(self, chunks: Sequence[RelayChunk]) -> None:
        """Run every collective of training once, on zero gradients (see `warm_up`)."""
        for stage in self.store.stages:
            self.gradients.accumulate(stage)
            slot = self._slot(stage)
            self._reduce(stage)
            if any(each in slot.views for each in self._tied):
                self._reduction.over_embedding(slot)
            self.gradients.store(stage)  # which leaves the buffer; nothing is copied
        warm_up_common(chunks, self._groups.world)

    def _check(self, chunks: Sequence[RelayChunk]) -> None:
        if isinstance(self._inner, DistributedOptimizer):
            raise ValueError("The distributed optimizer keeps its shards on the device: leave it out.")
        for chunk in chunks:
            if chunk.config.calculate_per_token_loss or chunk.ddp_config.average_in_collective:
                raise ValueError(
                    "calculate_per_token_loss and average_in_collective are not supported: gradients are averaged over "
                    "microbatches and replicas, so turn both off."
                )
            if chunk.config.gradient_accumulation_fusion:
                raise ValueError(
                    "gradient_accumulation_fusion adds to gradients behind the back of what carries them to the host: "
                    "turn it off."
                )
        if self.residency.is_eager and (
            self._inner.config.clip_grad > 0.0 or getattr(self._inner, "grad_scaler", None)
        ):
            raise ValueError(
                "An eager update is made before the norm of all gradients and any overflow are known: use deferred "
                "updates, or neither clip nor scale the loss."
            )

    def _check_gather(self) -> None:
        if not self.store.gathers:
            raise ValueError(
                "a fetch of shares is gathered from replicas on the node, and this rank's are on others: fetch whole "
                "stages, or place replicas together."
            )
        if backend.is_cuda() and not uses_nccl():
            raise ValueError("GPUs gather shares of a fetch over NCCL: use it, or fetch whole stages.")

    def versions_of(self, stage: int) -> StageWeights:
        """The weight versions that a stage of the rank uses."""
        return self.resident.of_stage(stage)

    def _reduce(self, stage: int) -> None:
        """Average a stage's gradients over the replicas, and sum those of which tensor ranks have parts."""
        slot, group = self._slot(stage), self._groups.data
        for flat in slot.flats if group is not None else ():
            flat.mul_(1.0 / group.size)
            group.all_reduce(flat)
        self._reduction.over_tensor(slot)

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
        """Complete the batch's report by one float64 all-reduce over the job: norm, overflow, losses, stop requests."""
        norms = self._norms.take(version)
        assert len(norms) == len(self._reduction.counted), "the program has a REDUCE_GRAD for each stage or none"
        report = self._batches[version].report
        self._decisions.complete(report, self._reduction.norm_squared(norms).item(), stop_requests, losses)

    def _slot(self, stage: int) -> GradientSlot:
        """The stage's gradients on the device."""
        views = self.gradients.views(stage)
        flats = list(self.gradients.flat(stage).values())
        return GradientSlot(flats, {each: views[name] for name, each in self._parameters[stage].items()})

    def _decide(self, batch: HostBatch) -> None:
        report = batch.report
        self._decisions.note(report)
        if not report.skipped:
            batch.factor = self._decisions.coefficient(report)
        self._decisions.advance(report)
        self._last_norm = report.grad_norm

    def close(self) -> None:
        super().close()
        self.resident.close()
