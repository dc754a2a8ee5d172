"""The plan of a run, made before any rank loads weights: the graph, its stages, the schedule, memory and time.

Each rank captures the model itself, without memory for the parameters. The graph's signature in the partition proves
that all ranks captured the same graph.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import sympy
import torch
from rich.table import Table

from megatron.capture.blocks import Crossings, crossings
from megatron.capture.export import Captured
from megatron.capture.nodes import without_model
from megatron.capture.statistics import counted_in
from megatron.documents import GIB, counted
from megatron.documents.tables import console
from megatron.finetuning.adapter_arguments import has_adapter
from megatron.finetuning.adapter_config import adapter_config
from megatron.finetuning.adapters import Adapter
from megatron.finetuning.arguments import has_masters
from megatron.finetuning.data.lengths import Lengths, Widths
from megatron.finetuning.partition_file import (
    LENGTHS,
    EdgeBytes,
    PartitionFile,
    bytes_of_edges,
    edges_of,
    kept_partition,
    schedule_of,
)
from megatron.finetuning.partitioning import (
    PlannedMachine,
    cut_model,
    num_bytes,
    num_microbatches,
    relay_partition,
    simulated_seconds,
    trained_itemsize,
    weight_bytes,
)
from megatron.finetuning.pretrained import capture_model, open_model
from megatron.finetuning.relay_arguments import RELAY, residency_of
from megatron.finetuning.samples import Data, epochs_of, read_data
from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.failure.agreement import on_rank_zero
from megatron.pipeline.runtime.failure.errors import SameEverywhere
from megatron.pipeline.schedules import Schedule

CHAINS = ("2bw", "pipedream")
"""Schedules that run one stage on each device, in a row."""

EFFORT = 0.2
"""The effort of the partition search when a run cuts its model itself; the default of tools/partition.py is 1."""

GENERATION = "generation_config.json"
"""The file with the settings of text generation, which a run copies unchanged."""

SEPARATES = {
    "codegen", "cohere", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj",
    "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
}  # fmt: skip
"""Kinds of models whose forward, given positions that begin anew, keeps the sequences of a row apart. Others take no
positions, make no mask of them (OPT), or have layers that mix tokens without a mask (Mamba, LFM2)."""


class OpenedModel(NamedTuple):
    """The model of a folder without memory for its parameters, and the adapter in a second such model, or None."""

    model: torch.nn.Module
    adapter: Adapter | None

    @property
    def trained(self) -> torch.nn.Module:
        """The model that is captured."""
        return self.model if self.adapter is None else self.adapter.model


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, which is the same on all ranks.

    Attributes:
        model: the model of the folder without memory for its parameters.
        adapter: the adapter that is trained in place of the model; None: the model itself is trained.
        stage_of_operator: number of an operator -> its stage, in the form that `cut` takes.
        sizes: values for the symbolic dimensions of the captured graph.
        decays: names of the weights to which --weight_decay applies.
        initializer_range: the standard deviation of a new head's weights.
        edge_bytes: bytes of each edge by (source, target).
        save_rest: writes the configuration and the processor into a folder.
        crossing: the tensors that cross between stages, and the stages that have each parameter.
        batch: a microbatch of real samples.
        save_merged_rest: the same for the model with the adapter merged in.
        lengths: the lengths of the rows, if microbatches are padded to several widths; `batch` and `sizes` are of the
            longest.
    """

    model: torch.nn.Module
    adapter: Adapter | None
    captured: Captured
    partition: PartitionFile
    schedule: Schedule
    stage_of_operator: Mapping[int, int]
    sizes: Mapping[sympy.Symbol, int]
    decays: frozenset[str]
    initializer_range: float
    edge_bytes: Mapping[tuple[int, int], EdgeBytes]
    save_rest: Callable[[Path], None]
    crossing: Crossings
    batch: Mapping[str, torch.Tensor]
    save_merged_rest: Callable[[Path], None]
    lengths: Lengths | None = None

    def sizes_at(self, widths: Widths | None) -> Mapping[sympy.Symbol, int]:
        """`sizes` for microbatches of these widths; None: for the longest."""
        return self.sizes if widths is None else self.captured.sizes_of(self.lengths.cut(self.batch, widths))

    @property
    def counted(self) -> frozenset[str]:
        """The names of the statistics of batch norm that training changes, as checkpoints of the model have them."""
        found = map(without_model, counted_in(self.captured.graph_module.graph))
        return frozenset(name for name in found if name in self.captured.persistent)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Name of a trained parameter of which several stages have a copy -> these stages."""
        return _tied(self.captured, self.crossing)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return getattr(torch, self.partition.dtype)

    @property
    def stages_digest(self) -> str:
        """A digest of the assignments of operators to stages and of stages to ranks."""
        content = [sorted(self.stage_of_operator.items()), list(self.schedule.rank_of_stage)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def make_plan(args: argparse.Namespace, data: Data, *, known: PartitionFile | None = None) -> RunPlan:
    """Plan the run that the flags describe. Without --partition the first rank profiles and cuts the model, or takes
    the partition of the checkpoint from which the run resumes.

    `known`: the partition of the job that this process joins.

    Collective in a job: every rank must call it. Raises ValueError for a model that cannot be captured, and for a
    partition of another model.
    """
    captured, batch, opened = captured_model(args, data)
    relays = args.pipeline_schedule == RELAY
    if relays:
        partition = relay_partition(captured, batch, args)
    elif known is not None:
        partition = known
    elif args.partition is not None:
        partition = PartitionFile.read(Path(args.partition))
    else:
        partition = _made_on_first_rank(args, captured, batch, data)
    partition.check(captured, args.partition or "the partition", args)
    stage_of_operator = partition.stage_of_operators(captured)
    crossing = crossings(captured, stage_of_operator, chain=relays)
    sizes = captured.sizes_of(batch)
    num_devices, wanted = len(set(partition.rank_of_stage)), args.devices // args.data_parallel_size
    if num_devices != wanted:
        each = "" if args.data_parallel_size == 1 else f" for each of {args.data_parallel_size} replicas"
        raise ValueError(
            f"{args.partition or 'the partition'} is for {counted(num_devices, 'device')}, and the job has "
            f"{wanted}{each}; start as many processes, or make the partition again"
        )
    schedule = _schedule(args, captured, crossing, partition)
    return RunPlan(
        model=opened.model, adapter=opened.adapter, captured=captured, partition=partition, schedule=schedule,
        stage_of_operator=stage_of_operator, sizes=sizes, decays=decaying(opened.trained),
        initializer_range=float(getattr(opened.model.config, "initializer_range", 0.02) or 0.02),
        edge_bytes=bytes_of_edges(captured, crossing, sizes), crossing=crossing, batch=batch,
        save_rest=lambda folder: _save_rest(folder, opened, data, args),
        save_merged_rest=lambda folder: _save_rest(folder, opened._replace(adapter=None), data, args),
        lengths=next(iter(data.lengths), None),
    )  # fmt: skip


def with_frozen(plan: RunPlan, args: argparse.Namespace, frozen: Set[str]) -> RunPlan:
    """The plan with the same stages, in which only the parameters named in `frozen` are not trained.

    Raises ValueError if the schedule cannot run the stages.
    """
    captured = plan.captured
    for name, parameter in captured.parameters.items():
        parameter.requires_grad_(name not in frozen)
    crossing = crossings(captured, plan.stage_of_operator, chain=plan.schedule.residency is not None)
    schedule = _schedule(args, captured, crossing, plan.partition)
    edge_bytes = bytes_of_edges(captured, crossing, plan.sizes)
    return replace(plan, schedule=schedule, crossing=crossing, edge_bytes=edge_bytes)


def _schedule(args: argparse.Namespace, captured: Captured, crossing: Crossings, partition: PartitionFile) -> Schedule:
    return schedule_of(
        args.pipeline_schedule, edges_of(captured, crossing), partition,
        recompute=not args.no_recompute, norm_decides=bool(args.max_grad_norm),
        predict=args.weight_prediction, provisional=args.provisional_steps, residency=residency_of(args),
        tied=_tied(captured, crossing), data_parallel=args.data_parallel_size > 1, freezes=args.freeze_training,
    )  # fmt: skip


def _tied(captured: Captured, crossing: Crossings) -> dict[str, tuple[int, ...]]:
    return {name: stages for name, stages in crossing.copies.items() if captured.parameters[name].requires_grad}


def captured_model(args: argparse.Namespace, data: Data) -> tuple[Captured, dict[str, torch.Tensor], OpenedModel]:
    """The captured graph, a microbatch of real samples, and the opened model.

    Raises ValueError for a model that cannot be captured or adapted, and for sequences that are longer than the model
    allows.
    """

    def opened() -> torch.nn.Module:
        dtype = getattr(torch, args.dtype)
        return open_model(
            args.model_name_or_path, data.task.auto_model, dtype=dtype, changes=data.changes,
            attention=args.attn_implementation,
        )  # fmt: skip

    model = opened()
    if data.task.auto_model == "AutoModelForCausalLM":
        require_causal(model, args.model_name_or_path)
    if args.packing:
        require_separation(model, args.model_name_or_path)
    most = num_positions(model)
    for name, tasks in LENGTHS.items():
        if most is not None and args.task in tasks and getattr(args, name) > most:
            raise ValueError(
                f"--{name} {getattr(args, name)} is more than the {most} positions of {args.model_name_or_path}; give "
                f"{most} or less"
            )
    batch = data.example(args.per_device_train_batch_size)
    found = OpenedModel(model, Adapter(opened(), adapter_config(args)) if has_adapter(args) else None)
    captured = capture_model(found.trained, batch, data.task.keep, data.forward, lengths=data.lengths)
    return captured, batch, found


def require_causal(model: torch.nn.Module, folder: str) -> None:
    """Check that a model cannot see the tokens that it has to predict.

    Raises ValueError for a bidirectional model, such as a BERT without is_decoder.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = model.config.model_type
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(model.config, "is_decoder", False):
        raise ValueError(
            f"{folder} is a {kind}, whose attention is not causal, so it sees the tokens that it should predict; set "
            "is_decoder to true in its config.json, or give a model of another kind"
        )


def require_separation(model: torch.nn.Module, folder: str) -> None:
    """Check that the sequences of a packed row cannot see each other. Raises ValueError unless `SEPARATES` has the
    kind of the model."""
    if (kind := model.config.model_type) not in SEPARATES:
        raise ValueError(
            f"{folder} is a {kind}, and --packing is only for models in which the samples of a row cannot see "
            f"each other ({', '.join(sorted(SEPARATES))}); leave out --packing"
        )


def num_positions(model: torch.nn.Module) -> int | None:
    """The number of tokens of the longest sequence that a model accepts, or None if there is no limit.

    If padding has a position of its own, as in RoBERTa, the positions of tokens begin after that position.
    """
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in name and module.num_embeddings == most:
            return most if module.padding_idx is None else most - module.padding_idx - 1
    return most


def decaying(model: torch.nn.Module) -> frozenset[str]:
    """The names of the weights to which --weight_decay applies: all except biases and the weights of norms."""
    found = set()
    for path, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False):
            if not is_norm and "bias" not in name:
                found.add(f"{path}.{name}" if path else name)
    return frozenset(found)


def _made_on_first_rank(args, captured: Captured, batch, data: Data) -> PartitionFile:
    def make() -> str:
        kept = kept_partition(args, captured)
        if kept is not None:
            return kept.to_json()
        machine = PlannedMachine(args.devices // args.data_parallel_size, num_bytes(args.memory), args.bandwidth)
        count = num_microbatches(args, data)
        in_a_row = args.pipeline_schedule in CHAINS or args.freeze_training
        methods = ("sequential",) if in_a_row else ("sequential", "mixed")
        choice, *_ = cut_model(captured, batch, machine, args, methods=methods, effort=EFFORT, num_microbatches=count)
        return choice.file.to_json()

    return PartitionFile.from_json(on_rank_zero(make) if torch.distributed.is_initialized() else make())


def _save_rest(folder: Path, opened: OpenedModel, data: Data, args: argparse.Namespace) -> None:
    if opened.adapter is not None:
        opened.adapter.save_config(folder)
    else:
        own = next(opened.model.parameters()).dtype
        dtype = torch.float32 if has_masters(args) else own  # masters are written
        save_model_rest(folder, opened.model, Path(args.model_name_or_path), dtype)
    if data.processor is not None:
        data.processor.save_pretrained(folder)


def save_model_rest(folder: Path, model: torch.nn.Module, source: Path, dtype: torch.dtype) -> None:
    """Write the configurations of a whole model, which was opened from `source`, into a folder."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    generation = source / GENERATION
    if generation.is_file():
        (folder / GENERATION).write_bytes(generation.read_bytes())


# --- memory and time of the plan


def run_dry(args: argparse.Namespace) -> None:
    """Print the job's memory and time on the first rank. Raises SameEverywhere if the job could not run."""
    if args.rank:
        return
    data, plan = planned(args)
    out = console(150, highlight=True)
    for line in first_lines(plan, args):
        out.print(line, highlight=False)
    table = Table("device", "stages", "parameters M", "weights GiB", "activations GiB", "of GiB", "compute ms")
    limit = plan.partition.memory_limit_bytes
    for rank, (parameters, weights, saved, milliseconds) in enumerate(of_devices(plan, args)):
        table.add_row(
            str(rank), " ".join(map(str, plan.schedule.stages_of(rank))), f"{parameters / 1e6:.2f}",
            f"{weights / GIB:.3f}", f"{saved / GIB:.3f}", f"{limit / GIB:.2f}", f"{milliseconds:.2f}",
        )  # fmt: skip
    out.print(table)
    accumulation = args.gradient_accumulation_steps
    replicas = args.data_parallel_size
    seconds = simulated_seconds(plan.schedule, plan.partition, plan.edge_bytes, accumulation, replicas=replicas)
    each = "" if replicas == 1 else f" on each of {replicas} replicas"
    out.print(f"simulated: {1000 * seconds:.2f} ms a microbatch, {accumulation} of them a batch{each}")
    for line in shorter_lines(plan, args, data, seconds):
        out.print(line)


def planned(args: argparse.Namespace) -> tuple[Data, RunPlan]:
    """The data and the plan of a dry run. Raises SameEverywhere if the job could not run."""
    try:
        data = read_data(args)
        return data, make_plan(args, data)
    except ValueError as error:
        raise SameEverywhere(str(error)) from error


def first_lines(plan: RunPlan, args: argparse.Namespace) -> list[str]:
    """The first lines of a run's log: stages of each rank, edges, staleness, memory."""
    schedule = plan.schedule
    graph, accumulation = schedule.graph, args.gradient_accumulation_steps
    edges = " ".join(
        f"{edge} ({plan.edge_bytes[pair].a_microbatch(accumulation, schedule.weights) / 1e6:.2f} MB)"
        for edge in graph.edges
        for pair in [(edge.source, edge.target)]
    )
    ranks = "; ".join(
        f"rank {rank}: {' '.join(map(str, schedule.stages_of(rank)))} ({(of[1] + of[2]) / GIB:.2f} GiB, {of[3]:.1f} ms)"
        for rank, of in enumerate(of_devices(plan, args))
    )
    depth = max(map(graph.depth, range(schedule.num_stages)))
    replicas = "" if args.data_parallel_size == 1 else f"{args.data_parallel_size} replicas, each: "
    lines = [] if plan.adapter is None else [adapter_line(plan)]
    lines += [
        f"{replicas}{plan.captured.model_name}: {counted(schedule.num_stages, 'stage')} on "
        f"{counted(schedule.num_ranks, 'rank')}, {args.pipeline_schedule}; stages, memory and work of a "
        f"microbatch: {ranks}",
        f"edges, with what a microbatch sends over each: {edges or 'none'}",
    ]
    if schedule.weights.refreshes:
        stale = [-(-graph.depth(stage) // accumulation) for stage in range(schedule.num_stages)]
        lines.append(
            f"depth {depth}: the forwards of stages 0 to {schedule.num_stages - 1} use weights that are up to "
            f"{' '.join(map(str, stale))} steps older than those of their backwards"
            + (f", and {schedule.weights.ahead.value} from there" if schedule.weights.ahead else "")
        )
    else:
        delay = schedule.weights.delay
        lines.append(
            f"depth {depth}: "
            + ("weights are never stale" if delay == 0 else "weights are one step old" if delay == 1 else "weights are "
               "stashed: backwards use those of their forwards")
        )  # fmt: skip
    takes, assumed = weight_bytes(args), plan.partition.weight_bytes_per_parameter
    if takes > assumed:
        lines.append(
            f"note: a parameter takes {takes:g} bytes with its optimizer, and the partition assumed {assumed:g}; make "
            "the partition again with this run's --optim, --bf16 and --fp16"
        )
    return lines


def shorter_lines(plan: RunPlan, args: argparse.Namespace, data: Data, seconds: float | None = None) -> list[str]:
    """A sentence on the time that shorter microbatches save; no line if all have one length.

    `seconds`: simulated time of the longest microbatch. Time is assumed to be proportional to the number of tokens.
    """
    if plan.lengths is None or data.training is None:
        return []
    epochs = epochs_of(args, data.training)
    epoch = [indices for batch in islice(epochs.batches(), epochs.batches_per_epoch) for indices in batch]
    share = data.training.lengths.share(epoch)
    longest = " and ".join(map(str, plan.lengths.longest))
    mean = "" if seconds is None else f", so about {1000 * share * seconds:.2f} ms per microbatch on average"
    return [f"memory and times are of microbatches of {longest} tokens; an epoch has {100 * share:.1f}% of these{mean}"]


def adapter_line(plan: RunPlan) -> str:
    config, counts = plan.adapter.config, {True: 0, False: 0}
    for each in plan.adapter.model.parameters():
        counts[each.requires_grad] += each.numel()
    kind = "DoRA" if config.use_dora else "LoRA"
    return (
        f"{kind} of rank {config.r} in {counted(len(plan.adapter.layers), 'layer')}: {counts[True]} parameters are "
        f"trained, {counts[False]} are frozen"
    )


def of_devices(plan: RunPlan, args: argparse.Namespace) -> list[tuple[int, float, float, float]]:
    """The needs of each device, as tuples in the order of devices.

    A tuple has the number of trained parameters, the bytes of weights with gradients and optimizer state, the bytes of
    activations, and the milliseconds of computation of a microbatch. Frozen weights have no gradients, no state and
    one version.
    """
    schedule, found = plan.schedule, []
    work = plan.partition.work(schedule.graph)
    saved_by_stage = schedule.max_saved_microbatches((args.gradient_accumulation_steps,) * 4)
    for rank in range(schedule.num_ranks):
        parameters, weights, saved, seconds = 0, 0.0, 0.0, 0.0
        for stage in schedule.stages_of(rank):
            cost = plan.partition.stages[stage]
            received = [edge for (_, target), edge in plan.edge_bytes.items() if target == stage]
            more = schedule.weights.max_live_versions(stage, schedule.num_stages) - 1  # further weight versions
            more += schedule.weights.max_gradient_buffers - 1
            size = weight_bytes(args) + more * trained_itemsize(args) + _gap_bytes(plan, args, stage)
            parameters += cost.parameters
            weights += cost.parameters * size + cost.frozen_bytes
            in_flight = saved_by_stage[stage]
            recomputes = schedule.recomputes(stage)
            saved += sum(edge.activations for edge in received) * in_flight
            # A shared parameter is held once for each version or step in flight, and once for the sum of gradients.
            is_stepped = schedule.weights.ahead is Ahead.PROVISIONAL_STEP
            held = -(-in_flight // (1 if is_stepped else args.gradient_accumulation_steps)) + 1
            saved += sum(edge.parameters for edge in received) * held
            saved += cost.saved_bytes * (1 if recomputes else in_flight)
            seconds += sum(work[stage])
        found.append((parameters, weights, saved, 1000 * seconds))
    return found


def _gap_bytes(plan: RunPlan, args: argparse.Namespace, stage: int) -> int:
    """Bytes that gap-aware steps add for each parameter; 0 without --gap_aware.

    They are an average of the steps, a copy of the weights for each step by which forwards run ahead, and a temporary
    copy during a step.
    """
    steps_behind = -(-plan.schedule.graph.depth(stage) // args.gradient_accumulation_steps)
    if not args.gap_aware or not steps_behind:
        return 0
    return (steps_behind + 2) * (4 if has_masters(args) else trained_itemsize(args))
