"""Cases of the tiny GPT on the ranks of a pipeline: built, trained, stopped and resumed, compared with the reference.

Results carry full-size tensors under global names, gathered over the tensor ranks.
"""

import copy
from dataclasses import dataclass

import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from megatron.pipeline.program.weight_policies import predicting
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import BatchInfo
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.auxiliary import loss_names
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules import PRESETS, Schedule
from tests.pipeline.runtime.stages.megatron.megatron_model import (
    SEQUENCE,
    VOCABULARY,
    Case,
    causal_mask,
    evaluation_data,
    forward_step,
    global_names,
    gpt_model,
    is_cut,
    microbatch_data,
    own_stages,
    parallel,
    training_data,
)

__all__ = ["SEQUENCE", "VOCABULARY", "causal_mask", "microbatch_data"]  # for the tests, beside what is here


# Building.


def optimizer_config(case: Case) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=case.optimizer,
        lr=case.lr,
        min_lr=0.0,
        weight_decay=case.weight_decay,
        clip_grad=case.clip,
        adam_eps=case.adam_eps,
        bf16=case.dtype == "bfloat16",
        fp16=case.dtype == "float16",
        params_dtype=case.torch_dtype,
        use_distributed_optimizer=case.distributed_optimizer,
        loss_scale=case.loss_scale,
        initial_loss_scale=case.initial_loss_scale,
        min_loss_scale=1.0,
        loss_scale_window=3,
        hysteresis=case.hysteresis,
        sgd_momentum=0.9,
    )


def scheduler(case: Case, optimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=case.lr,
        min_lr=0.0,
        lr_warmup_steps=case.warmup,
        lr_decay_steps=4 * sum(case.batches) * case.micro_batch_size,
        lr_decay_style="linear",
        start_wd=case.weight_decay,
        end_wd=case.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def build(
    case: Case, memory: ActivationMemory | None = None, copies: CopyRanks | None = None
) -> tuple[list[MegatronStage], MegatronWeightUpdate]:
    """Stages and update of this rank; with `memory`, activations are captured. `copies`: see the update."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=case.distributed_optimizer
    )
    chunks = []
    for number in range(len(own_stages(case))):
        model = gpt_model(case, number)
        config = model.config
        wrapped = Float16Module(config, model) if config.fp16 or config.bf16 else model
        chunks.append(DistributedDataParallel(config, ddp_config, wrapped))
    optimizer = get_megatron_optimizer(optimizer_config(case), chunks)
    indices = own_stages(case)
    update = MegatronWeightUpdate(
        chunks,
        optimizer,
        scheduler(case, optimizer),
        weights=predicting(PRESETS[case.schedule].policy) if case.predict else PRESETS[case.schedule].policy,
        num_stages=case.p,
        stage=indices[0],
        loss_names=("lm loss", *loss_names(case.further)),
        single_gradient_buffer=case.single_gradient_buffer,
        reduce_partial=case.reduce_partial,
        provisional_microbatches=case.provisional_microbatches,
        copies=copies,
    )
    replica = parallel_state.get_data_parallel_rank()
    stages = [
        MegatronStage(
            chunk,
            forward_step(case),
            update,
            index=index,
            num_stages=case.p * case.v,
            seq_length=case.edge_length,
            micro_batch_size=case.micro_batch_size,
            data_iterator=training_data(case, replica),
            evaluation_iterator=evaluation_data(case, replica),
            recompute=case.recompute,
            activation_memory=memory,
            loss_names=("lm loss", *loss_names(case.further)),
        )
        for index, chunk in zip(indices, chunks, strict=True)
    ]
    return stages, update


def batch_info(case: Case, batch: int) -> BatchInfo:
    num = case.batches[batch]
    return BatchInfo(index=batch, num_microbatches=num // case.d, num_samples=num * case.micro_batch_size)


def full_tensors(case: Case, model: GPTModel, values: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Global name -> full tensor, gathered over the tensor ranks, of the weights or of other values by local name."""
    local = {param: name for name, param in model.named_parameters()}
    group = parallel_state.get_tensor_model_parallel_group()
    result = {}
    for name, param in global_names(model).items():
        value = (param.data if values is None else values[local[param]]).detach().float().clone()
        if is_cut(case, name, param):
            parts = [torch.empty_like(value) for _ in range(case.t)]
            torch.distributed.all_gather(parts, value, group=group)
            if case.swiglu and "linear_fc1" in name:
                halves = [part.chunk(2) for part in parts]
                value = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
            else:
                value = torch.cat(parts, dim=param.partition_dim)
        result[name] = value
    return result


def _weights(case: Case, stages: list[MegatronStage], tensors: dict[str, torch.Tensor]) -> dict:
    """Global name -> full tensor of a version, of all chunks."""
    result = {}
    for number, stage in enumerate(stages):
        prefix = f"model{number}." if len(stages) > 1 else ""
        local = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        found = full_tensors(case, unwrap_model(stage.model), local)
        assert all(torch.equal(found[name], result[name]) for name in found.keys() & result), "tied copies differ"
        result |= found
    return result


def _result(case: Case, stages: list[MegatronStage], update: MegatronWeightUpdate, reports: list) -> dict:
    live = update.versions.live()
    if case.predict:
        newest = _weights(case, stages, update.versions.newest_tensors())
        older = _weights(case, stages, update.versions.tensors(live[-1]))  # the prediction that goes on
    else:
        newest, older = (_weights(case, stages, update.versions.tensors(version)) for version in (live[-1], live[0]))
    return {
        "batches": [
            {
                "loss": r.losses["lm loss"],
                "further": [r.losses[name] for name in loss_names(case.further)],
                "norm": r.grad_norm,
                "lr": r.learning_rate,
                "overflow": r.overflow,
                "scale": r.loss_scale,
                "tokens": [[float(each) for each in row] for row in r.tokens_per_expert if any(row)],
            }
            for r in reports
        ],
        "newest": newest,
        "older": older,
        "reports": reports,
        "num_gradient_slots": update._gradients.num_slots,
        "num_weight_slots": update.versions.num_slots,
        "peak_versions": update.versions.peak_live,
    }


# Training.


def engine_of(case: Case, stages: list[MegatronStage], update: MegatronWeightUpdate, **options):
    schedule = Schedule.preset(
        case.schedule,
        num_stages=case.p * case.v,
        num_virtual_stages=case.v,
        recompute=case.recompute,
        balance=case.balance,
        tied_embeddings=case.tied or case.further > 0,
        data_parallel=case.d * case.cp > 1,
        extra_warmup=case.extra_warmup,
        predict=case.predict,
        provisional_microbatches=case.provisional_microbatches,
        reduce_partial=case.reduce_partial,
    )
    ranks = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return PipelineEngine(schedule, stages, update, ranks=ranks, **options)


def train(**options) -> dict:
    """Train one case on this rank's place in it; the result is as `reference` gives it, and more."""
    case = Case(**options)
    with parallel(case):
        memory = ActivationMemory() if case.balance else None
        stages, update = build(case, memory)
        engine = engine_of(case, stages, update, activation_memory=memory)
        reports, evaluations = [], []
        for batch in range(len(case.batches)):
            info = batch_info(case, batch)
            reports += engine.run_batch(info.num_microbatches, info.num_samples)
            if batch in case.drains:
                reports += engine.drain()
                evaluations.append(engine.evaluate(2))
        reports += engine.drain()
        engine.close()
        result = _result(case, stages, update, reports)
        result["evaluations"] = evaluations
        result["saved_peak"] = engine.saved.peaks
        return result


# Comparison.


@dataclass
class Deviation:
    """Largest deviations of a run from its reference: relative for losses and norms, absolute for weights."""

    loss: float = 0.0
    norm: float = 0.0
    newest: float = 0.0
    older: float = 0.0


def deviation(case: Case, expected: dict, ranks: list[dict]) -> Deviation:
    """Compare every rank's result with the reference; all batches, both versions and all names must be there."""
    worst = Deviation()
    for result in ranks:
        assert len(result["batches"]) == len(expected["batches"])
        for ours, theirs in zip(result["batches"], expected["batches"], strict=True):
            assert (ours["overflow"], ours["scale"], ours["lr"]) == (theirs["overflow"], theirs["scale"], theirs["lr"])
            if "tokens" in theirs and case.t == 1:  # tensor ranks round otherwise, so a token may take another expert
                # So do replicas in bf16: a token in a hundred.
                moved = 0.01 if case.dtype == "bfloat16" and case.d > 1 else 0.0
                for our, their in zip(ours["tokens"], theirs["tokens"], strict=True):
                    assert sum(our) == sum(their)
                    assert sum(abs(a - b) for a, b in zip(our, their, strict=True)) <= 2 * moved * sum(their)
            assert len(ours["further"]) == case.further
            for our, their in zip((ours["loss"], *ours["further"]), (theirs["loss"], *theirs["further"]), strict=True):
                worst.loss = max(worst.loss, _relative(our, their))
            if not theirs["overflow"]:
                worst.norm = max(worst.norm, _relative(ours["norm"], theirs["norm"]))
    for version in ("newest", "older") if case.schedule in ("2bw", "3bw", "4bw") else ("newest",):
        seen = set()
        for result in ranks:
            for name, tensor in result[version].items():
                seen.add(name)
                difference = (tensor - expected[version][name]).abs().max().item()
                setattr(worst, version, max(getattr(worst, version), difference))
        assert seen == set(expected[version])
    return worst


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


# Stopping and going on.


def _shards(update: MegatronWeightUpdate) -> DistributedOptimizer:
    """The optimizer that holds this replica's share of masters and moments; its state is gathered on replica 0."""
    [optimizer] = update.optimizer.chained_optimizers
    return optimizer


TRUE = -1
"""In place of a version's number: the true weights, where computations use predictions."""


def loaded_clip_factor(clip_factor: float | None, **options) -> float | None:
    """By what predictions clip behind a checkpoint that says this."""
    case = Case(**options)
    with parallel(case):
        _, update = build(case)
        update.load_state_dict(update.state_dict() | {"clip_factor": clip_factor})
        update.close()
        return update.state_dict()["clip_factor"]


def resume(border: int, **options) -> dict:
    """A case stopped after `border` batches, its state carried into everything built anew, and gone on with."""
    case = Case(**options)
    reports = []
    with parallel(case):
        stages, update = build(case)
        engine = engine_of(case, stages, update)
        for batch in range(border):
            info = batch_info(case, batch)
            reports += engine.run_batch(info.num_microbatches, info.num_samples)
        reports += engine.drain()
        engine.close()
        update.show_newest()
        names = {version: update.versions.tensors(version) for version in update.versions.live()}
        if case.predict:
            names[TRUE] = update.versions.newest_tensors()
        saved = copy.deepcopy(
            {
                "versions": {version: dict(tensors) for version, tensors in names.items()},
                "optimizer": update.optimizer.state_dict(),
                "shards": _shards(update).get_parameter_state_dp_zero() if case.distributed_optimizer else None,
                "scheduler": update.scheduler.state_dict(),
                "update": update.state_dict(),
            }
        )
        next_microbatch = engine.next_microbatch
    with parallel(case):
        stages, update = build(case)
        if case.predict:
            update.show_newest()
            for name, tensor in update.versions.newest_tensors().items():
                tensor.copy_(saved["versions"][TRUE][name])
            update.versions.restart(border, saved["versions"][border])
        else:
            update.versions.restore(saved["versions"])
        update.optimizer.load_state_dict(saved["optimizer"])
        if case.distributed_optimizer:
            _shards(update).load_parameter_state_from_dp_zero(saved["shards"])
        update.scheduler.load_state_dict(saved["scheduler"])
        update.load_state_dict(saved["update"])
        for _ in range(next_microbatch):
            for stage in stages:
                next(stage.data_iterator)
        engine = engine_of(case, stages, update, first_batch=border, first_microbatch=next_microbatch)
        for batch in range(border, len(case.batches)):
            info = batch_info(case, batch)
            reports += engine.run_batch(info.num_microbatches, info.num_samples)
        reports += engine.drain()
        engine.close()
        return _result(case, stages, update, reports)
