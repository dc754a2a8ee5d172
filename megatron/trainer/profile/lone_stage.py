"""One stage of a pipeline in a job that has no pipeline: what a rank computes there, and nothing around it.

Problem: what a layer, the embedding and the head cost can be measured without the other stages of a pipeline, but only
if the stage runs as in training: megatron.core's chunk in DDP, its seeded dropout, its data, its gradients and its
optimizer's step.

Solution: the model, optimizer and data iterator of a training run, for one `StagePosition`, in a job of tensor ranks
alone. A stage without an embedding is fed a constant activation, one without a head a constant gradient. The last
stage's output layer is untied from the embedding, which it does not have here; that costs the same.
"""

import argparse
import copy
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron import backend
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.schedules import Schedule
from megatron.planner.time.profile import StagePosition
from megatron.trainer.data.microbatches import MicrobatchIterator
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, vocab_size
from megatron.trainer.models.gpt import num_parameters
from megatron.trainer.start_up.model_and_optimizer import Update, setup_model_and_optimizer
from megatron.trainer.start_up.optimizer import choose_kernel
from megatron.trainer.start_up.program import TrainingProgram

_NUM_STAGES = 3
_STAGE_OF_POSITION = {
    StagePosition.ONLY: (0, 1),
    StagePosition.FIRST: (0, _NUM_STAGES),
    StagePosition.MIDDLE: (1, _NUM_STAGES),
    StagePosition.LAST: (_NUM_STAGES - 1, _NUM_STAGES),
}


@dataclass
class LoneStage:
    """A stage, with what it is fed. `deferred_bytes`: what a microbatch keeps between I and W, once it is measured."""

    stage: MegatronStage
    update: Update
    iterator: MicrobatchIterator
    input: Tensor | None
    output_grad: Tensor | None
    num_parameters: int
    deferred_bytes: int = 0

    def close(self) -> None:
        """End the processes that load samples."""
        self.iterator.close()


def build_lone_stage(
    args: argparse.Namespace, program: TrainingProgram, position: StagePosition, weights: WeightPolicy
) -> LoneStage:
    """Build `args.num_layers` layers at `position`. Collective over the tensor ranks, which are the whole job.

    Raises ValueError for what a training run would refuse.
    """
    args = copy.copy(args)
    if position is StagePosition.LAST:
        args.untie_embeddings_and_output_weights = True
    tokenizer = build_tokenizer(args)
    args.padded_vocab_size = padded_vocab_size(args, tokenizer)
    datasets = program.datasets_provider(args, tokenizer)
    index, num_stages = _STAGE_OF_POSITION[position]
    args.schedule = Schedule(order="1f1b", weights=weights, num_stages=num_stages)
    layers = [args.num_layers if stage == index else 0 for stage in range(num_stages)]
    built = setup_model_and_optimizer(args, program, rank=index, layers=layers)
    choose_kernel(built.optimizer, args.optimizer_kernel)
    [stage] = built.stages
    iterator = MicrobatchIterator(
        args, datasets[0], fields=_fields(program.fields_provider(args), position), name="training", consumed_samples=0,
        vocab_size=vocab_size(args, tokenizer), repeats=True,
    )  # fmt: skip
    stage.data_iterator = iterator
    return LoneStage(
        stage=stage,
        update=built.update,
        iterator=iterator,
        input=_constant(stage.input_spec, 1.0),
        output_grad=_constant(stage.output_spec, 1e-4),
        num_parameters=num_parameters(built.chunks),
    )


def _fields(fields: tuple, position: StagePosition) -> tuple:
    """Those that a stage at `position` reads; the job's only stage reads what is wanted by all."""
    here = {"all"} | ({"first"} if position in (StagePosition.ONLY, StagePosition.FIRST) else set())
    here |= {"last"} if position in (StagePosition.ONLY, StagePosition.LAST) else set()
    return tuple(dataclasses.replace(field, stages="all") for field in fields if field.stages in here)


def _constant(spec, scale: float) -> Tensor | None:
    if spec is None:
        return None
    return scale * torch.randn(spec.shape, device=backend.device()).to(spec.dtype)
