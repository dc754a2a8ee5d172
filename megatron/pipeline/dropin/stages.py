"""The engine of a run over the model chunks that Megatron-LM has built, with stages, activation memory and tracer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron import backend
from megatron.core import parallel_state
from megatron.pipeline.dropin.flags import batches_of
from megatron.pipeline.dropin.updates import ForwardStep, MegatronUpdate
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.trace import CudaClock, HostClock, Tracer
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.groups import uses_nccl
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule


class OverlappedStage(MegatronStage):
    """The stage of a chunk whose hooks begin to reduce gradients within the last backward of a batch."""

    _num_backwards = 0  # of the running batch

    def backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        self._num_backwards = (self._num_backwards + 1) % microbatch.num_microbatches
        with self.model.no_sync() if self._num_backwards else nullcontext():
            return super().backward(microbatch, output_grad)


_TRACED_EXTRA = 8  # segments traced beyond those that a timeline shows: drains, and batches that a drain cuts


@dataclass
class RankStages:
    """The engine and the stages of one rank."""

    engine: PipelineEngine
    stages: Sequence[MegatronStage]
    forward_steps: Sequence[ForwardStep]
    memory: ActivationMemory | None

    def feed(self, call: Mapping[str, Any]) -> None:
        """Give the stages the data and the forward step of the next batch, which `call` has.

        `call`: the arguments with which Megatron-LM calls its schedule.
        """
        iterators = call["data_iterator"]
        if not isinstance(iterators, list):
            iterators = [iterators] * len(self.stages)
        for stage, step, data in zip(self.stages, self.forward_steps, iterators, strict=True):
            stage.data_iterator = data
            step.begin_batch(call["forward_step_func"])

    def let_go(self) -> None:
        """Drop all references to the user's objects.

        The objects of an engine refer to one another in a circle and live until garbage collection. They would keep
        alive the processes that load samples.
        """
        for stage, step in zip(self.stages, self.forward_steps, strict=True):
            stage.data_iterator = None
            step.let_go()

    @property
    def losses(self) -> list[Any]:
        """The results of the loss function for each microbatch of the batch; [] on all stages but the last."""
        return self.forward_steps[-1].losses


def require_ordinary_call(call: Mapping[str, Any]) -> None:
    """Raise ValueError if Megatron-LM calls its schedule with arguments that the project's schedules do not support."""
    if call.get("adjust_tensor_shapes_fn") is not None:
        raise ValueError(
            "adjust_tensor_shapes_fn, which this program hands to its schedule, changes the shapes of what travels; "
            "train it without the drop-in"
        )
    communicator, groups = call.get("p2p_communicator"), call.get("pg_collection")
    if communicator is not None:
        _require_global("p2p_communicator", {"pp_group": _GROUPS["pp"]}, communicator)
    if groups is not None:
        _require_global("pg_collection", _GROUPS, groups)
    decoder = call.get("decoder_seq_length")
    if decoder not in (None, call["seq_length"]):
        raise ValueError(
            f"this program's stages have sequences of {call['seq_length']} and, behind them, of {decoder}, and a "
            "schedule knows one length; train it without the drop-in"
        )


_GROUPS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "dp_cp": partial(parallel_state.get_data_parallel_group, with_context_parallel=True),
}


def _require_global(name: str, expected: Mapping[str, Callable[[], Any]], given: Any) -> None:
    """Raise ValueError if `given` has other groups than Megatron-LM's global groups, which the runtime uses."""
    for attribute, get in expected.items():
        group = getattr(given, attribute, None)
        ranks = None if group is None else torch.distributed.get_process_group_ranks(group)
        if ranks != torch.distributed.get_process_group_ranks(get()):
            raise ValueError(
                f"{name}, which this program hands to its schedule, has another {attribute} than megatron.core's "
                "parallel_state, whose groups a schedule uses; train it without the drop-in"
            )


def build_stages(
    args: argparse.Namespace,
    schedule: PipelineSchedule,
    chunks: Sequence[torch.nn.Module],
    update: MegatronUpdate | MegatronWeightUpdate,
    call: Mapping[str, Any],
) -> RankStages:
    """Build this rank's engine and stages for the shapes in `call`, the arguments of Megatron-LM's schedule.

    Collective: every rank of the job must call it.
    """
    rank = parallel_state.get_pipeline_model_parallel_rank()
    own = list(schedule.stages_of(rank))
    steps = [
        ForwardStep(
            chunk, chunk=number if len(own) > 1 else None, is_last=stage == schedule.num_stages - 1
        )
        for number, (stage, chunk) in enumerate(zip(own, chunks, strict=True))
    ]  # fmt: skip
    moves = schedule.swaps or bool(schedule.evicting_ranks((max(batches_of(args)),)))
    memory = ActivationMemory(backend.device()) if moves or args.pipeline_log_saved_activations else None
    kind = OverlappedStage if chunks[0].ddp_config.overlap_grad_reduce else MegatronStage
    stages = [
        kind(
            chunk, step, update, index=stage, num_stages=schedule.num_stages, seq_length=call["seq_length"],
            micro_batch_size=call["micro_batch_size"], seed=None, is_at_own_place=True, loss_names=(),
            activation_memory=memory,
        )
        for stage, chunk, step in zip(own, chunks, steps, strict=True)
    ]  # fmt: skip
    clock = CudaClock() if backend.is_cuda() else HostClock()
    traced = 0 if args.pipeline_timeline is None else 2 * args.pipeline_timeline_iterations + _TRACED_EXTRA
    engine = PipelineEngine(
        schedule, stages, update,
        ranks=torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        backend="nccl" if uses_nccl() else "gloo",
        device=backend.device(),
        tracer=Tracer(num_batches=traced, clock=clock) if traced else None,
        first_batch=args.iteration,
        activation_memory=memory if moves else None,
    )  # fmt: skip
    return RankStages(engine, stages, steps, memory)
