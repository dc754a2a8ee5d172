"""A tiny GPT for the tests of the megatron.core stage, the same for every layout, and its single-process reference.

`Case` holds one configuration. `build` makes a rank's stage and update; weights depend on the parameter's global name
only, so every (t, p, d) starts alike. `reference` computes what plain torch makes of the case in one process:
W(t+1) = W(t) - AdamW(g(W(t-1))) under 2bw, g(W(t)) under flush, on the same GPTModel without DDP, optimizers or
schedules of megatron.core. Results carry full-size tensors under global names.
"""

import copy
import gc
import hashlib
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.pipeline.runtime.megatron_stage import MegatronStage
from megatron.pipeline.runtime.megatron_update import MegatronWeightUpdate
from megatron.pipeline.runtime.megatron_weights import unwrap
from megatron.pipeline.runtime.stage import BatchInfo

SEQUENCE, VOCABULARY, HEADS = 16, 64, 4


@dataclass(frozen=True)
class Case:
    """One configuration; the model is tiny, the rest is what Megatron's flags say."""

    schedule: str = "flush"
    p: int = 1
    t: int = 1
    d: int = 1
    batches: tuple[int, ...] = (4, 4, 4, 4, 4, 4)  # microbatches of the whole job, over all replicas
    drains: tuple[int, ...] = ()  # drain after these batches
    layers: int = 4
    hidden: int = 32
    micro_batch_size: int = 2
    tied: bool = False
    swiglu: bool = False
    normalization: str = "LayerNorm"
    position: str = "learned_absolute"
    dropout: float = 0.0
    dtype: str = "float32"
    lr: float = 1.0e-2
    warmup: int = 0  # samples
    clip: float = 0.0
    weight_decay: float = 0.01
    optimizer: str = "adam"
    adam_eps: float = 1.0e-5  # large enough that the noise of gradients that should be zero stays noise
    distributed_optimizer: bool = False
    sequence_parallel: bool = False
    recompute_granularity: str | None = None
    recompute: bool = False  # R instructions
    single_gradient_buffer: bool = False
    token_form: bool = False  # the loss function returns (sum, num_tokens, numbers)
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**10
    hysteresis: int = 1
    overflow_batches: tuple[int, ...] = ()
    extra_warmup: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


# The model and its data, the same everywhere.


def transformer_config(case: Case) -> TransformerConfig:
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=HEADS,
        ffn_hidden_size=2 * case.hidden,
        tensor_model_parallel_size=case.t,
        pipeline_model_parallel_size=case.p,
        pipeline_dtype=case.torch_dtype,
        params_dtype=case.torch_dtype,
        fp16=case.dtype == "float16",
        bf16=case.dtype == "bfloat16",
        sequence_parallel=case.sequence_parallel,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        normalization=case.normalization,
        gated_linear_unit=case.swiglu,
        activation_func=torch.nn.functional.silu if case.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not case.swiglu,
        recompute_granularity=case.recompute_granularity,
        recompute_method="uniform" if case.recompute_granularity == "full" else None,
        recompute_num_layers=1 if case.recompute_granularity == "full" else None,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def gpt_model(case: Case) -> GPTModel:
    """This rank's chunk, with the weights that its global names imply."""
    model = GPTModel(
        config=transformer_config(case),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=case.normalization),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.position,
    )
    with torch.no_grad():
        for name, param in global_names(model).items():
            param.copy_(shard(case, name, param, full_weight(case, name, param)))
    return model


def global_names(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Global name -> parameter: layers numbered over the pipeline, a tied output weight named as the embedding."""
    named = {}
    for name, param in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            position = parts.index("layers") + 1
            parts[position] = str(model.decoder.layers[int(parts[position])].layer_number)
        name = ".".join(parts)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        named[name] = param
    return named


def full_weight(case: Case, name: str, param: torch.nn.Parameter) -> torch.Tensor:
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= case.t
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    is_norm_weight = "norm" in name and name.endswith("weight")
    return 1 + noise if is_norm_weight else noise


def shard(case: Case, name: str, param: torch.nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """The part of a full tensor that this tensor rank holds; for a gated MLP of each of its halves."""
    if not getattr(param, "tensor_model_parallel", False) or case.t == 1:
        return full
    rank = parallel_state.get_tensor_model_parallel_rank()
    if case.swiglu and "linear_fc1" in name:
        return torch.cat([half.chunk(case.t)[rank] for half in full.chunk(2)])
    return full.chunk(case.t, dim=param.partition_dim)[rank]


def sample_tokens(case: Case, sample: int) -> torch.Tensor:
    """Tokens of one sample of the run, [sequence + 1]."""
    generator = torch.Generator().manual_seed(1000 + sample)
    return torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)


def samples_before(case: Case, batch: int) -> int:
    return sum(case.batches[:batch]) * case.micro_batch_size


def loss_factor(case: Case, first_sample: int) -> float:
    """A factor that makes the gradients of the batches that are to overflow infinite."""
    for batch in case.overflow_batches:
        if samples_before(case, batch) <= first_sample < samples_before(case, batch + 1):
            return 1.0e30
    return 1.0


def microbatch_data(case: Case, first_sample: int) -> dict:
    tokens = torch.stack([sample_tokens(case, first_sample + i) for i in range(case.micro_batch_size)])
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "factor": loss_factor(case, first_sample)}


def training_data(case: Case, replica: int):
    """This replica's microbatches in the order of the run: sample by sample dealt out as Megatron's sampler does."""
    for microbatch in range(sum(case.batches) // case.d):
        yield microbatch_data(case, (microbatch * case.d + replica) * case.micro_batch_size)


def evaluation_data(case: Case, replica: int):
    microbatch = 0
    while True:
        yield microbatch_data(case, 1_000_000 + (microbatch * case.d + replica) * case.micro_batch_size)
        microbatch += 1


def causal_mask() -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)


def forward_step(case: Case):
    def step(data_iterator, model):
        # The middle stages read the data too: only its position matters, as in Megatron's own step without broadcast.
        data = next(data_iterator)
        position_ids = torch.arange(SEQUENCE).expand_as(data["tokens"])
        output = model(data["tokens"], position_ids, causal_mask(), labels=data["labels"])

        def loss_function(losses):
            total = losses.float().sum() * data["factor"]
            count = torch.tensor(losses.numel())
            if case.token_form:
                return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}
            return total / count, {"lm loss": (total / count).detach()}

        return output, loss_function

    return step


# A rank of the pipeline.


@contextmanager
def parallel(case: Case):
    """megatron.core's groups and seeds for the case."""
    parallel_state.initialize_model_parallel(case.t, case.p)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        destroy_groups()


def destroy_groups() -> None:
    """End all groups but the default one: their threads poll, and hundreds of them slow a worker down."""
    world = torch.distributed.distributed_c10d._world
    for group in [group for group in world.pg_map if group is not torch.distributed.group.WORLD]:
        torch.distributed.destroy_process_group(group)
    gc.collect()


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


def build(case: Case) -> tuple[MegatronStage, MegatronWeightUpdate]:
    """Stage and update of this rank."""
    model = gpt_model(case)
    config = model.config
    wrapped = Float16Module(config, model) if config.fp16 or config.bf16 else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=case.distributed_optimizer
    )
    chunk = DistributedDataParallel(config, ddp_config, wrapped)
    optimizer = get_megatron_optimizer(optimizer_config(case), [chunk])
    weights = {"flush": "flush", "gpipe": "flush", "2bw": "2bw", "pipedream": "stash"}[case.schedule]
    update = MegatronWeightUpdate(
        [chunk],
        optimizer,
        scheduler(case, optimizer),
        weights=weights,
        num_stages=case.p,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        single_gradient_buffer=case.single_gradient_buffer,
    )
    replica = parallel_state.get_data_parallel_rank()
    stage = MegatronStage(
        chunk,
        forward_step(case),
        update,
        seq_length=SEQUENCE,
        micro_batch_size=case.micro_batch_size,
        data_iterator=training_data(case, replica),
        evaluation_iterator=evaluation_data(case, replica),
        recompute=case.recompute,
    )
    return stage, update


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
        if getattr(param, "tensor_model_parallel", False) and case.t > 1:
            parts = [torch.empty_like(value) for _ in range(case.t)]
            torch.distributed.all_gather(parts, value, group=group)
            if case.swiglu and "linear_fc1" in name:
                halves = [part.chunk(2) for part in parts]
                value = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
            else:
                value = torch.cat(parts, dim=param.partition_dim)
        result[name] = value
    return result


# The reference: one process, plain torch.


def reference(case: Case) -> dict:
    """Losses, norms and final weights (both versions) of the case, computed without any of the project's runtime."""
    single = replace(case, p=1, t=1, d=1, sequence_parallel=False, distributed_optimizer=False)
    with parallel(single):
        return _reference(single, case)


def _reference(case: Case, original: Case) -> dict:
    model = gpt_model(case)
    half = case.dtype != "float32"
    module = Float16Module(model.config, model) if half else model
    seeded = original.dropout > 0
    if seeded:
        from megatron.pipeline.runtime.dropout import SeededDropout

        dropout = SeededDropout(model, seed=1234)
    params = global_names(model)
    masters = {name: param.detach().clone().float() for name, param in params.items()}
    groups = [
        {"params": [m for m in masters.values() if m.dim() > 1], "weight_decay": case.weight_decay},
        {"params": [m for m in masters.values() if m.dim() == 1], "weight_decay": 0.0},
    ]
    if case.optimizer == "adam":
        optimizer = torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.999), eps=case.adam_eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=case.lr, momentum=0.9)
    delay = 1 if case.schedule == "2bw" else 0
    versions = [{name: master.clone() for name, master in masters.items()}]
    scale = case.loss_scale or (case.initial_loss_scale if case.dtype == "float16" else 1.0)
    scales_after, growth = [], 0
    initial_scale, samples_done, results = scale, 0, []
    step, data = forward_step(case), training_data(case, 0)
    microbatch_index = 0
    for batch, count in enumerate(case.batches):
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(versions[version_used(original, batch, name)][name])
        batch_scale = initial_scale if batch < delay + 1 else scales_after[batch - delay - 1]
        gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
        replicas = [dict.fromkeys(gradients) for _ in range(original.d)]
        losses = []
        for position in range(count):
            if seeded:
                context = dropout.microbatch(microbatch_index * case.micro_batch_size)
            else:
                from contextlib import nullcontext

                context = nullcontext()
            with context:
                output, loss_function = step(data, module)
                result = loss_function(output)
                loss = result[0] / result[1] if len(result) == 3 else result[0]
                losses.append(float(loss.detach()))
                (loss / (count // original.d)).backward(torch.tensor(batch_scale))
            replica = replicas[position % original.d]
            for name, param in params.items():
                gradient = param.grad.float()
                replica[name] = gradient.clone() if replica[name] is None else replica[name] + gradient
                param.grad = None
            microbatch_index += 1
        for name in gradients:
            gradients[name] = sum(replica[name] * (1.0 / original.d) for replica in replicas)
        norm = math.sqrt(sum(float(g.norm().double() ** 2) for g in gradients.values())) / batch_scale
        overflow = case.dtype == "float16" and not math.isfinite(norm)
        lr = _learning_rate(case, samples_done)
        if not overflow:
            coefficient = 1.0 / batch_scale
            clip_norm = results[-1]["norm"] if case.single_gradient_buffer and batch > 0 else norm
            if case.clip > 0 and case.clip / (clip_norm + 1e-6) < 1:
                coefficient *= case.clip / (clip_norm + 1e-6)
            for name, master in masters.items():
                master.grad = gradients[name] * coefficient
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            samples_done += count * case.micro_batch_size
        if case.dtype == "float16" and not case.loss_scale:
            if overflow and batch_scale <= scale:
                scale, growth = max(scale / 2, 1.0), 0
            elif overflow:
                growth = 0
            else:
                growth += 1
                if growth == 3:
                    scale, growth = scale * 2, 0
        scales_after.append(scale)
        versions.append({name: master.clone() for name, master in masters.items()})
        results.append(
            {
                "loss": sum(losses) / len(losses),
                "norm": norm,
                "lr": lr,
                "overflow": overflow,
                "scale": batch_scale,
            }
        )
    newest, older = versions[-1], versions[-2]
    cast = {name: tensor.to(case.torch_dtype).float() for name, tensor in newest.items()}
    cast_older = {name: tensor.to(case.torch_dtype).float() for name, tensor in older.items()}
    return {"batches": results, "newest": cast, "older": cast_older}


def version_used(case: Case, batch: int, name: str) -> int:
    """The version with which a batch computes the parameter `name`: flush, 2bw, or PipeDream's per-stage delays."""
    if case.schedule == "2bw":
        return max(batch - 1, 0)
    if case.schedule != "pipedream":
        return batch
    if ".layers." in name:
        stage = (int(name.split(".layers.")[1].split(".")[0]) - 1) // (case.layers // case.p)
    else:
        stage = 0 if name.startswith("embedding") else case.p - 1
    return max(batch - (case.p - 1 - stage), 0)


def _learning_rate(case: Case, samples: int) -> float:
    if case.warmup and samples <= case.warmup:
        return case.lr * samples / case.warmup
    total = 4 * sum(case.batches) * case.micro_batch_size
    return case.lr * (1 - (samples - case.warmup) / (total - case.warmup))


# The pipeline of one stage, driven by hand: what the engine does for p=1, without it.


def drive_locally(case: Case) -> dict:
    """p=1: batch by batch, the chain in line, the STEP where the program puts it (2bw: before the batch after next)."""
    from megatron.pipeline.runtime.stage import Microbatch

    with parallel(case):
        stage, update = build(case)
        reports, pending, index = [], [], 0
        for batch in range(len(case.batches)):
            info = batch_info(case, batch)
            if case.schedule == "2bw" and len(pending) == 2:
                reports.append(update.step(pending.pop(0)))
            update.begin_batch(info)
            version = max(batch - 1, 0) if case.schedule == "2bw" else batch
            for position in range(info.num_microbatches):
                microbatch = Microbatch(index, batch, position, info.num_microbatches)
                stage.load_version(version)
                stage.forward(microbatch, None)
                if position == 0:
                    update.begin_backward(info)
                if case.recompute:
                    stage.load_version(version)
                    stage.recompute(microbatch)
                if case.schedule == "2bw":
                    stage.load_version(update.versions.newest)  # what a STEP between F and B would do
                stage.load_version(version)
                stage.backward(microbatch, None)
                index += 1
            if case.d > 1:
                update.reduce_grad(batch + 1)
            update.reduce_norm(batch + 1, 0, stage.take_losses(batch))
            if case.schedule == "2bw":
                pending.append(batch + 1)
                if len(pending) == 2:
                    reports.append(update.step(pending.pop(0)))
            else:
                reports.append(update.step(batch + 1))
        reports += [update.step(version) for version in pending]
        return _result(case, stage, update, reports)


def _result(case: Case, stage: MegatronStage, update: MegatronWeightUpdate, reports: list) -> dict:
    model = unwrap(stage.model)
    live = update.versions.live()
    newest = full_tensors(case, model, update.versions.tensors(live[-1]))
    older = full_tensors(case, model, update.versions.tensors(live[0]))
    return {
        "batches": [
            {
                "loss": r.losses["lm loss"],
                "norm": r.grad_norm,
                "lr": r.learning_rate,
                "overflow": r.overflow,
                "scale": r.loss_scale,
            }
            for r in reports
        ],
        "newest": newest,
        "older": older,
        "reports": reports,
        "num_gradient_slots": update._gradients.num_slots,
        "num_weight_slots": update.versions.num_slots,
    }


# A rank of the pipeline, driven by the engine.


def train(cases: list[dict]) -> list[dict]:
    """Train each case on this rank's place in it; results as `reference` gives them."""
    return [_train(Case(**case)) for case in cases]


def references(cases: list[dict]) -> list[dict]:
    return [reference(Case(**case)) for case in cases]


def engine_of(case: Case, stage: MegatronStage, update: MegatronWeightUpdate, **options):
    from megatron.pipeline.runtime.engine import PipelineEngine
    from megatron.pipeline.schedules import Schedule

    schedule = Schedule.preset(
        case.schedule,
        num_stages=case.p,
        recompute=case.recompute,
        tied_embeddings=case.tied,
        data_parallel=case.d > 1,
        extra_warmup=case.extra_warmup,
    )
    ranks = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return PipelineEngine(schedule, stage, update, ranks=ranks, **options)


def _train(case: Case) -> dict:
    with parallel(case):
        stage, update = build(case)
        engine = engine_of(case, stage, update)
        reports, evaluations = [], []
        for batch in range(len(case.batches)):
            info = batch_info(case, batch)
            reports += engine.run_batch(info.num_microbatches, info.num_samples)
            if batch in case.drains:
                reports += engine.drain()
                evaluations.append(engine.evaluate(2))
        reports += engine.drain()
        engine.close()
        result = _result(case, stage, update, reports)
        result["evaluations"] = evaluations
        result["saved_peak"] = engine.saved_microbatches_peak
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
            worst.loss = max(worst.loss, _relative(ours["loss"], theirs["loss"]))
            if not theirs["overflow"]:
                worst.norm = max(worst.norm, _relative(ours["norm"], theirs["norm"]))
    for version in ("newest", "older") if case.schedule == "2bw" else ("newest",):
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


def resume(cases: list[dict], border: int) -> list[dict]:
    """Each case stopped after `border` batches, its state carried into everything built anew, and gone on with."""
    return [_resume(Case(**case), border) for case in cases]


def _resume(case: Case, border: int) -> dict:
    reports = []
    with parallel(case):
        stage, update = build(case)
        engine = engine_of(case, stage, update)
        for batch in range(border):
            info = batch_info(case, batch)
            reports += engine.run_batch(info.num_microbatches, info.num_samples)
        reports += engine.drain()
        engine.close()
        names = {version: update.versions.tensors(version) for version in update.versions.live()}
        saved = copy.deepcopy(
            {
                "versions": {version: dict(tensors) for version, tensors in names.items()},
                "optimizer": update.optimizer.state_dict(),
                "scheduler": update.scheduler.state_dict(),
                "update": update.state_dict(),
            }
        )
        next_microbatch = engine.next_microbatch
    with parallel(case):
        stage, update = build(case)
        update.restore(saved["versions"])
        update.optimizer.load_state_dict(saved["optimizer"])
        update.scheduler.load_state_dict(saved["scheduler"])
        update.load_state_dict(saved["update"])
        for _ in range(next_microbatch):
            next(stage.data_iterator)
        engine = engine_of(case, stage, update, first_batch=border, first_microbatch=next_microbatch)
        for batch in range(border, len(case.batches)):
            info = batch_info(case, batch)
            reports += engine.run_batch(info.num_microbatches, info.num_samples)
        reports += engine.drain()
        engine.close()
        return _result(case, stage, update, reports)
