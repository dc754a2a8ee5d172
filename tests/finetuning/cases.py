"""What ranks of the tests of fine-tuning run: whole runs of the tiny models, on partitions made by hand."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from megatron.capture.blocks import blocks_of
from megatron.capture.export import signature
from megatron.finetuning import job
from megatron.finetuning.arguments import changed, has_masters, parse_args
from megatron.finetuning.optimizers import make_optimizer, make_scheduler
from megatron.finetuning.partition_file import FORM, PartitionFile, StageCost
from megatron.finetuning.plan import captured_model, decaying
from megatron.finetuning.pretrained import open_model
from megatron.finetuning.samples import epochs_of, read_data
from megatron.trainer.ranks import StopSignal
from megatron.trainer.report.metrics import read_metrics
from tests.finetuning import tiny
from tests.finetuning.captures import remembered
from tests.full_disk import largest_file


@dataclass
class Outcome:
    """`lines`: of the metrics file. `weights`: of the folder that was written."""

    lines: list[dict]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if "loss" in line]

    def evaluation(self) -> dict[str, float]:
        (line,) = [line for line in self.lines if "eval_loss" in line]
        return line


def partition(folder: Path, task: str, rank_of_stage: Sequence[int], *argv: object, dropout: float = 0.0) -> Path:
    """Contiguous stages of about as many blocks each."""
    args = tiny.arguments(folder, task, *argv, dropout=dropout)
    with remembered():
        captured, _, _ = captured_model(args, read_data(args))
    blocks, first, num_stages = blocks_of(captured), len(captured.inputs), len(rank_of_stage)
    stage_of_node = dict.fromkeys(range(first), 0)
    for place in range(len(blocks)):
        stage_of_node[first + place] = place * num_stages // len(blocks)
    cost = StageCost(1.0, 3.0, 1.0, 2.0, 0, 0)
    file = PartitionFile(
        form=FORM, model=captured.model_name, task=task, signature=signature(captured),
        micro_batch_size=args.per_device_train_batch_size, sequence=(args.max_seq_length, args.max_target_length),
        dtype=args.dtype, method="by hand", objective_ms=0.0, stage_of_node=stage_of_node,
        rank_of_stage=tuple(rank_of_stage), stages=(cost,) * num_stages, bandwidth_gigabytes_per_second=10.0,
        memory_limit_bytes=2.0**34, weight_bytes_per_parameter=16.0,
    )  # fmt: skip
    path = folder / f"{task}-{'-'.join(map(str, rank_of_stage))}-{dropout}.json"
    file.write(path)
    return path


def finetune(
    folder: Path,
    task: str,
    *,
    argv: Sequence[object] = (),
    dropout: float = 0.0,
    name: str,
    weights: str = "weights_of",
    stop_at: int | None = None,
) -> Outcome:
    """One run of all ranks. `weights`: name of the function here that reads what the run has written. `stop_at`: number
    of the batch at whose beginning the last rank is told to stop; then no model is written, and none is read.
    """
    folder = Path(folder)
    metrics, output = folder / f"{name}.jsonl", folder / name
    ranks = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    with mock.patch.dict(os.environ, ranks), remembered():  # later cases of these processes find their own ranks
        args = parse_args(
            [*tiny.command(folder, task, *argv, dropout=dropout), "--output_dir", str(output), "--metrics_file",
             str(metrics), "--logging_steps", "1000"]
        )  # fmt: skip
        args = changed(args, distributed_backend="gloo", resumed_from=job.checkpoint_to_resume(args))
        dist.barrier()
        stops = stop_at is not None and dist.get_rank() == dist.get_world_size() - 1
        job.run(args, StopAt(stop_at) if stops else StopSignal())
    if dist.get_rank():
        return Outcome([])
    writes = args.do_train and stop_at is None
    return Outcome(read_metrics(str(metrics)), globals()[weights](output, task) if writes else {})


class StopAt:
    """A `StopSignal` that has received its signal once `batches` batches have asked."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    @property
    def received(self) -> bool:
        self._left -= 1
        return self._left < 0


def held(folder: Path, task: str, *, weights: str = "adapter_of", **options: object) -> dict[str, object]:
    """What a rank of a run holds at its end, in bytes or names, from what the run itself has built."""
    built = []

    def kept(pipeline, *arguments):
        built.append(pipeline)
        return save_model(pipeline, *arguments)

    save_model = job.checkpoint.save_model
    with mock.patch.object(job.checkpoint, "save_model", kept):
        finetune(folder, task, weights=weights, **options)
    (pipeline,) = built
    updates = pipeline.updates.values()
    slots = [slot for update in updates for slot in update.versions._slots]
    states = [state for update in updates for state in update.optimizer.state.values()]
    with_buffers = [update for update in updates if hasattr(update, "_gradients")]  # a frozen rank has none
    buffers = [buffer for update in with_buffers for buffer in update._gradients._free]  # all: the run has drained
    parameters = [pair for module in pipeline.modules.values() for pair in module.stage.named_parameters()]
    frozen = {name: each for name, each in parameters if not each.requires_grad}
    return {
        "trained": {name: each.nbytes for name, each in parameters if each.requires_grad},
        "frozen": {name: each.nbytes for name, each in frozen.items()},
        "frozen_places": len({each.data_ptr() for _, each in parameters if not each.requires_grad}),
        "with_gradients": [name for name, each in frozen.items() if each.grad is not None],
        "slots": [sum(each.nbytes for each in slot.values()) for slot in slots],
        "states": sum(each.nbytes for state in states for each in state.values() if each.numel() > 1),
        "buffers": [sum(each.nbytes for each in buffer.views.values()) for buffer in buffers],
        "sent": {
            (index, other): [sum(spec.num_bytes for spec in way.specs) for way in (edge.activations, edge.gradients)]
            for index, stage in zip(pipeline.modules, pipeline.engine._stages, strict=True)
            for other, edge in stage.edges.items()
        },
    }


def weights_of(folder: Path, task: str) -> dict[str, torch.Tensor]:
    """As `from_pretrained` has them, every name of the model."""
    model = loaded(folder, task)
    return {name: each.detach() for name, each in model.state_dict().items()}


def adapter_of(folder: Path, task: str) -> dict[str, torch.Tensor]:
    """As PEFT's file has them."""
    return load_file(folder / "adapter_model.safetensors")


def nothing_of(folder: Path, task: str) -> dict[str, torch.Tensor]:
    return {}


def loaded(folder: Path, task: str, **options: object) -> torch.nn.Module:
    from megatron.finetuning.samples import TASKS

    auto_model = getattr(transformers, TASKS[task].auto_model)
    model, found = auto_model.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(found.values()), found
    return model


def plain(folder: Path, task: str, *, argv: Sequence[object] = ()) -> Outcome:
    """The same training in one process, with nothing but torch and transformers."""
    args = parse_args(tiny.command(Path(folder), task, *map(str, argv)))
    data = read_data(args)
    torch.manual_seed(args.seed)
    model = masters = loaded(Path(args.model_name_or_path), task, attn_implementation=args.attn_implementation).train()
    if has_masters(args):
        model = copy.deepcopy(masters).to(getattr(torch, args.dtype))
    scaler = torch.amp.GradScaler(
        "cpu", args.initial_loss_scale, args.loss_scale_growth, args.loss_scale_backoff, args.loss_scale_window,
        enabled=args.fp16,
    )  # fmt: skip
    pairs = [*zip(model.parameters(), masters.parameters(), strict=True)] if has_masters(args) else ()
    opened = open_model(args.model_name_or_path, data.task.auto_model, changes=data.changes)
    decays = decaying(opened)
    for own, made in zip(model.parameters(), opened.parameters(), strict=True):
        own.requires_grad_(made.requires_grad)  # from_pretrained forgets what the model's code freezes (Whisper)
    optimizer = make_optimizer(dict(masters.named_parameters()), args, decays=decays)
    epochs = epochs_of(args, data.training)
    num_steps = int(args.num_train_epochs * epochs.batches_per_epoch)
    scheduler = make_scheduler(optimizer, args, num_steps=num_steps)
    options = {"return_loss": True} if data.task.couples_rows else {}
    lines = []
    for step, batch in zip(range(1, num_steps + 1), epochs.batches(), strict=False):
        losses, terms = [], [data.training.num_terms(indices) for indices in batch]
        for indices, count in zip(batch, terms, strict=True):
            loss = model(**data.training.batch(indices, len(indices)), **options).loss * (
                count * len(batch) / sum(terms)
            )
            scaler.scale(loss / len(batch)).backward()
            losses.append(loss.item())
        for weight, master in pairs if args.fp16 else ():
            master.grad = weight.grad.float()
        scaler.unscale_(optimizer)
        scale, is_finite = (
            scaler.get_scale(),
            all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None),
        )
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_((masters if args.fp16 else model).parameters(), args.max_grad_norm)
        lines.append({"step": step, "loss": sum(losses) / len(losses), "learning_rate": scheduler.get_last_lr()[0]})
        if args.fp16:
            lines[-1] |= {"loss_scale": scale, "skipped": int(not is_finite)}
        for weight, master in pairs if args.bf16 else ():
            master.grad = weight.grad.float()
        scaler.step(optimizer)
        scaler.update()
        for weight, master in pairs:
            weight.data.copy_(master.data)
        model.zero_grad()
        if is_finite:
            scheduler.step()
    return Outcome(lines, {name: each.detach() for name, each in masters.state_dict().items()})


def refused(folder: Path, argv: Sequence[str], *, room: int | None = None) -> str:
    """The sentence with which a run ends. `room`: bytes that the last rank can write into a file."""
    is_full = room is not None and dist.get_rank() == dist.get_world_size() - 1
    try:
        with largest_file(room) if is_full else contextlib.nullcontext():
            finetune(folder, "sequence-classification", argv=argv, name="refused")
    except ValueError as error:
        return str(error)
    return ""
