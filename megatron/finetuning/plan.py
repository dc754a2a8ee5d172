"""What all ranks agree on before any has a weight: the graph, the stages of its operators, and the schedule.

Each rank opens the model without memory for its parameters and captures it for itself; the graph's signature says that
they speak of the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import sympy
import torch

from megatron.capture.edges import crossings
from megatron.capture.export import Captured
from megatron.documents.numbers import counted
from megatron.finetuning.model import capture_model, open_model
from megatron.finetuning.optimizers import decaying
from megatron.finetuning.partition_file import LENGTHS, PartitionFile
from megatron.finetuning.partitioning import PlannedMachine, cut_model, num_bytes, num_microbatches
from megatron.finetuning.samples import Data
from megatron.finetuning.stage_edges import EdgeBytes, bytes_of_edges, edges_of, schedule_of
from megatron.pipeline.runtime.failure.agreement import on_rank_zero
from megatron.pipeline.schedules import Schedule

EFFORT = 0.2
"""The effort of the search where a run cuts its model itself; tools/partition.py takes 1."""


@dataclass(frozen=True)
class RunPlan:
    """`model`: without memory for its parameters. `stage_of_operator`: for `cut`. `sizes`: what decides the shapes of a
    microbatch. `decays`: names of the weights that decay. `edge_bytes`: by (source, target).
    `save_rest(folder)`: writes the configuration and the tokenizer.
    """

    model: torch.nn.Module
    captured: Captured
    partition: PartitionFile
    schedule: Schedule
    stage_of_operator: Mapping[int, int]
    sizes: Mapping[sympy.Symbol, int]
    decays: frozenset[str]
    initializer_range: float
    edge_bytes: Mapping[tuple[int, int], EdgeBytes]
    save_rest: Callable[[Path], None]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return getattr(torch, self.partition.dtype)

    @property
    def stages_digest(self) -> str:
        """A name for which operators are in which stage, and on which rank."""
        content = [sorted(self.stage_of_operator.items()), list(self.schedule.rank_of_stage)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


GENERATION = "generation_config.json"
"""How transformers generates text with a model: of no concern here, and kept."""


def make_plan(args: argparse.Namespace, data: Data) -> RunPlan:
    """Collective where ranks are connected: without --partition the first one profiles and cuts the model.

    Raises ValueError for a model that cannot be captured, or a partition that is not for it.
    """
    captured, batch, model = captured_model(args, data)
    if args.partition is not None:
        partition = PartitionFile.read(Path(args.partition))
    else:
        partition = _made_on_first_rank(args, captured, batch, data)
    partition.check(captured, args.partition or "the partition", args)
    stage_of_operator = partition.stage_of_operators(captured)
    crossing = crossings(captured, stage_of_operator)
    sizes = captured.sizes_of(batch)
    if (num_devices := len(set(partition.rank_of_stage))) != args.devices:
        raise ValueError(
            f"{args.partition or 'the partition'} is for {counted(num_devices, 'device')}, and the job has "
            f"{args.devices}; start as many processes, or make the partition again"
        )
    schedule = schedule_of(
        args.pipeline_schedule, edges_of(captured, crossing), partition,
        recompute=not args.no_recompute, norm_decides=bool(args.max_grad_norm),
        predict=args.weight_prediction, provisional=args.provisional_steps,
    )  # fmt: skip
    return RunPlan(
        model=model,
        captured=captured,
        partition=partition,
        schedule=schedule,
        stage_of_operator=stage_of_operator,
        sizes=sizes,
        decays=decaying(model),
        initializer_range=float(getattr(model.config, "initializer_range", 0.02) or 0.02),
        edge_bytes=bytes_of_edges(captured, crossing, sizes),
        save_rest=lambda folder: _save_rest(folder, model, data, args),
    )


def captured_model(args: argparse.Namespace, data: Data) -> tuple[Captured, dict[str, torch.Tensor], torch.nn.Module]:
    """(the graph, a microbatch of real samples, the model without memory for its parameters).

    Raises ValueError for a model that cannot be captured.
    """
    dtype = getattr(torch, args.dtype)
    model = open_model(args.model_name_or_path, data.task.auto_model, dtype=dtype, changes=data.changes)
    if args.task == "causal-lm":
        require_causal(model, args.model_name_or_path)
    most = num_positions(model)
    for name, tasks in LENGTHS.items():
        if most is not None and args.task in tasks and getattr(args, name) > most:
            raise ValueError(
                f"--{name} {getattr(args, name)} is more than the {most} positions of {args.model_name_or_path}; give "
                f"{most} or less"
            )
    batch = data.example(args.per_device_train_batch_size)
    return capture_model(model, batch, data.task.keep), batch, model


def require_causal(model: torch.nn.Module, folder: str) -> None:
    """Raises ValueError for a model that sees the tokens that it is to predict, as a BERT does unless it is told."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = model.config.model_type
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(model.config, "is_decoder", False):
        raise ValueError(
            f"{folder} is a {kind}, which reads to both sides and so sees what it is to predict; set is_decoder to "
            "true in its config.json, or give a model of another kind"
        )


def num_positions(model: torch.nn.Module) -> int | None:
    """The longest sequence that a model takes; None: any. Where padding has a position of its own, as in RoBERTa, real
    ones begin behind it.
    """
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in name and module.num_embeddings == most:
            return most if module.padding_idx is None else most - module.padding_idx - 1
    return most


def _made_on_first_rank(args, captured: Captured, batch, data: Data) -> PartitionFile:
    def make() -> str:
        machine = PlannedMachine(args.devices, num_bytes(args.memory), args.bandwidth)
        count = num_microbatches(args, data)
        choice, *_ = cut_model(captured, batch, machine, args, effort=EFFORT, num_microbatches=count)
        return choice.file.to_json()

    return PartitionFile.from_json(on_rank_zero(make) if torch.distributed.is_initialized() else make())


def _save_rest(folder: Path, model: torch.nn.Module, data: Data, args: argparse.Namespace) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32 if args.bf16 else next(model.parameters()).dtype  # masters are written
    model.config.save_pretrained(folder)
    generation = Path(args.model_name_or_path) / GENERATION
    if generation.is_file():
        (folder / GENERATION).write_bytes(generation.read_bytes())
    if data.processor is not None:
        data.processor.save_pretrained(folder)
