"""The measurements of a profile: a single stage, transfers and all-reduces, the host, and a description of the machine.

The costs of a layer, the embedding and the head can be measured without the other stages of a pipeline, if the stage
runs as in training: megatron.core's chunk in DDP, its seeded dropout, its data, its gradients and its optimizer's step.
So a job with only tensor parallel ranks builds the model, optimizer and data iterator of a training run for one
`StagePosition`. A stage without an embedding receives a constant activation, a stage without a head a constant
gradient. The last stage's output layer is not tied, since the stage has no embedding; its cost is the same.

A single stage: the measured steps are the forward and backward of microbatches, the backward whole or in halves, and
the update of a batch. The calls and their order are those of the executor (contract/stage.py), batch by batch, so that
a forward finds the caches as a backward and an optimizer step leave them. A batch gives one sample, the mean over its
microbatches, since an iteration takes their sum; if some microbatches are interrupted, the median of single
microbatches would be too small. On CUDA, events on the compute stream mark the times, so that the device's work is
timed in the order of training without extra waits.

Between ranks: the links and groups are the same as in training.

The host, which may hold the weights: copies go between the runtime's own buffers. On CUDA these are pinned memory and
the GPU's memory. On a CPU the host's buffer is a shared mapping and the device's buffer private memory, so the copies
are copies in memory. The optimizer is the runtime's, for a single stage: AdamW with each kernel, with FP32 master
weights for 16-bit weights, and with gradients in FP32, as they arrive.
"""

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

import megatron.core
from megatron import backend
from megatron.backend.streams import streams_of
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.contract.stage import BatchInfo, Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.contract.trace import CudaClock, HostClock
from megatron.pipeline.runtime.relay.host_optimizer import HostOptimizer
from megatron.pipeline.runtime.relay.host_store import LOW_PRECISION, HostStore
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.runtime.transport.links import LINKS
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import HALVES
from megatron.planner.memory.architecture import Architecture
from megatron.planner.time.profile import Machine, StagePosition
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.data.microbatches import MicrobatchIterator
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, vocab_size
from megatron.trainer.models.core_config import params_dtype
from megatron.trainer.models.gpt import num_parameters
from megatron.trainer.plan import from_flags
from megatron.trainer.start_up.optimizer import KERNELS, choose_kernel
from megatron.trainer.start_up.run import TrainingProgram, Update, setup_model_and_optimizer

_NUM_STAGES = 3
_STAGE_OF_POSITION = {
    StagePosition.ONLY: (0, 1),
    StagePosition.FIRST: (0, _NUM_STAGES),
    StagePosition.MIDDLE: (1, _NUM_STAGES),
    StagePosition.LAST: (_NUM_STAGES - 1, _NUM_STAGES),
}


@dataclass
class LoneStage:
    """A stage with its constant inputs. `deferred_bytes`: bytes of a microbatch between I and W, set when measured."""

    stage: MegatronStage
    update: Update
    iterator: MicrobatchIterator
    input: Tensor | None
    output_grad: Tensor | None
    num_parameters: int
    deferred_bytes: int = 0

    def close(self) -> None:
        """End the processes that load the stage's samples, and release its model.

        The dispatcher of megatron.core's experts keeps a tensor with its graph, which refers to the model through the
        hooks of its weights. Garbage collection does not find this cycle, and a process measures several stages.
        """
        self.iterator.close()
        self.stage.model._modules.clear()


def build_lone_stage(
    args: TrainConfig, program: TrainingProgram, position: StagePosition, weights: WeightPolicy
) -> LoneStage:
    """Build a stage of `args.num_layers` layers at `position`.

    Collective: every tensor rank, which is every rank of the job, must call it. Raises ValueError for arguments that a
    training run would refuse.
    """
    index, num_stages = _STAGE_OF_POSITION[position]
    tokenizer = build_tokenizer(args)
    args = replace(
        args, padded_vocab_size=padded_vocab_size(args, tokenizer),
        untie_embeddings_and_output_weights=args.untie_embeddings_and_output_weights or position is StagePosition.LAST,
    )  # fmt: skip
    datasets = program.datasets_provider(args, tokenizer)
    args = replace(args, schedule=Schedule(order="1f1b", weights=weights, num_stages=num_stages))
    layers = [args.num_layers if stage == index else 0 for stage in range(num_stages)]
    built = setup_model_and_optimizer(args, program, rank=index, layers=layers)
    choose_kernel(built.optimizer, args.optimizer_kernel)
    [stage] = built.stages
    iterator = MicrobatchIterator(
        args, datasets.parts[0], fields=_fields(program.fields_provider(args), position), name="training",
        consumed_samples=0, vocab_size=vocab_size(args, tokenizer), repeats=True,
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
    """The fields that a stage at `position` reads, marked for all stages, since the job has only this stage."""
    here = {"all"} | ({"first"} if position in (StagePosition.ONLY, StagePosition.FIRST) else set())
    here |= {"last"} if position in (StagePosition.ONLY, StagePosition.LAST) else set()
    return tuple(replace(field, stages="all") for field in fields if field.stages in here)


def _constant(spec, scale: float) -> Tensor | None:
    if spec is None:
        return None
    return scale * torch.randn(spec.shape, device=backend.device()).to(spec.dtype)


# --- a single stage ---------------------------------------------------------------------------------------------------

Samples = dict[str, list[float]]
"""Name of a measurement -> seconds in each batch.

The names are forward and backward (means over microbatches), zero, norm and step; with halves also backward_input and
backward_weight."""


def time_stage(
    lone: LoneStage,
    *,
    num_microbatches: int,
    num_batches: int,
    num_warmup: int,
    start: Callable[[], None],
    halves: bool = False,
) -> Samples:
    """Run batches of `num_microbatches` and time the last `num_batches` of them.

    Args:
        num_warmup: number of batches before the timed ones.
        start: called before the first batch; waits for other processes that work at the same time.
        halves: after each batch, run another batch with split backwards, each W after its I, and time these halves, so
            that both are measured under the same conditions. Sets `deferred_bytes` of `lone`.
    """
    clock = CudaClock() if backend.is_cuda() else HostClock()
    if halves:
        lone.stage.split_backward()
    start()
    batches = []
    for batch in range(num_warmup + num_batches):
        if halves:
            whole = _run_batch(lone, 2 * batch, num_microbatches, clock.now)
            split = _run_batch(lone, 2 * batch + 1, num_microbatches, clock.now, split=True)
            batches.append([*whole, *(mark for mark in split if mark[0] in HALVES)])
        else:
            batches.append(_run_batch(lone, batch, num_microbatches, clock.now))
    seconds_at = clock.reader()
    samples: Samples = defaultdict(list)
    for marks in batches[num_warmup:]:
        times = defaultdict(list)
        for name, first, last in marks:
            times[name].append(seconds_at(last) - seconds_at(first))
        for name, seconds in times.items():
            samples[name].append(fmean(seconds))
    return dict(samples)


def _run_batch(
    lone: LoneStage, batch: int, num_microbatches: int, now: Callable, *, split: bool = False
) -> list[tuple]:
    """Run a batch. Returns (name, mark before, mark after) for each of its steps, with marks of the clock."""
    marks = []
    stage, update = lone.stage, lone.update
    info = BatchInfo(batch, num_microbatches, num_microbatches)
    version = max(batch - (update.weights.delay or 0), 0)
    update.begin_batch(info)
    for position in range(num_microbatches):
        microbatch = Microbatch(batch * num_microbatches + position, batch, position, num_microbatches)
        begin = now()
        stage.load_version(version)
        stage.forward(microbatch, lone.input)
        stage.free_output(microbatch)
        marks.append(("forward", begin, now()))
        if position == 0:
            begin = now()
            update.begin_backward(info)
            marks.append(("zero", begin, now()))
        begin = now()
        stage.load_version(version)
        if split:
            stage.backward_input(microbatch, lone.output_grad)
            marks.append(("backward_input", begin, now()))
            lone.deferred_bytes = stage.deferred_bytes(microbatch)
            begin = now()
            stage.load_version(version)
            stage.backward_weights(microbatch)
            marks.append(("backward_weight", begin, now()))
        else:
            stage.backward(microbatch, lone.output_grad)
            marks.append(("backward", begin, now()))
    begin = now()
    update.reduce_norm(batch + 1, 0, stage.take_losses(batch))
    middle = now()
    update.step(batch + 1)
    return [*marks, ("norm", begin, middle), ("step", middle, now())]


# --- between two ranks ------------------------------------------------------------------------------------------------

_TIMEOUT = timedelta(minutes=5)
_FLOAT = 4


def time_transfers(sizes: Sequence[int], *, num_iterations: int, num_warmup: int) -> dict[int, list[float]]:
    """Number of bytes -> seconds in one direction, half of each of `num_iterations` round trips between ranks 0 and 1.

    Collective: both ranks must call it.
    """
    rank, name = dist.get_rank(), backend.process_group_backend()
    link_class = LINKS[name, backend.device().type]
    options = {"timeout": _TIMEOUT, "device": backend.device(), "store": dist.distributed_c10d._get_default_store()}
    links = [
        link_class(f"profile/{source}", sends=rank == source, on_error=lambda error: None, **options)
        for source in (0, 1)
    ]  # one link for each direction
    outward, homeward = links[rank], links[1 - rank]
    found: dict[int, list[float]] = {}
    for size in sizes:
        spec = TensorSpec((max(size // _FLOAT, 1),))
        tensor = torch.ones(spec.shape, device=backend.device())
        dist.barrier()
        samples = []
        for index in range(num_warmup + num_iterations):
            receive = homeward.receive(spec, index)
            start = time.perf_counter()
            if rank == 0:
                outward.send(tensor, index)
            receive.wait(_TIMEOUT)
            backend.synchronize()
            if rank == 1:
                outward.send(tensor, index)
            samples.append((time.perf_counter() - start) / 2)
        found[size] = samples[num_warmup:]
    dist.barrier()
    for link in links:
        link.close(_TIMEOUT.total_seconds())
    return found


def time_all_reduces(sizes: Sequence[int], *, num_iterations: int, num_warmup: int) -> dict[int, list[float]]:
    """Number of bytes -> seconds of each all-reduce of FP32 numbers over all ranks.

    Collective: every rank must call it.
    """
    group = ChainGroup(
        "profile", list(range(dist.get_world_size())), backend_name=backend.process_group_backend(), timeout=_TIMEOUT
    )
    found: dict[int, list[float]] = {}
    for size in sizes:
        tensor = torch.ones(max(size // _FLOAT, 1), device=backend.device())
        samples = []
        for _ in range(num_warmup + num_iterations):
            dist.barrier()  # so that the time includes no wait for a late rank
            backend.synchronize()
            start = time.perf_counter()
            group.all_reduce(tensor)
            backend.synchronize()
            samples.append(time.perf_counter() - start)
            tensor.fill_(1.0)
        found[size] = samples[num_warmup:]
    return found


# --- copies, and the host's optimizer ---------------------------------------------------------------------------------

TO_DEVICE, FROM_DEVICE = "to device", "from device"
_LARGEST = 2**22  # elements of a matrix larger than all caches; in a larger matrix an element takes the same time


def time_copies(sizes: Sequence[int], *, num_iterations: int, num_warmup: int) -> dict[tuple[str, int], list[float]]:
    """(direction, number of bytes) -> seconds of each copy between host and device."""
    device = backend.device()
    found = {}
    for size in sizes:
        host = streams_of(device).host_buffer((size,), torch.uint8)
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        for direction, target, source in ((TO_DEVICE, there, host), (FROM_DEVICE, host, there)):
            samples = []
            for _ in range(num_warmup + num_iterations):
                backend.synchronize()
                start = time.perf_counter()
                target.copy_(source, non_blocking=True)
                backend.synchronize()
                samples.append(time.perf_counter() - start)
            found[direction, size] = samples[num_warmup:]
    return found


def time_updates(
    model: Architecture, dtype: str, *, num_iterations: int, num_warmup: int
) -> tuple[int, dict[str, list[float]]]:
    """Time updates of a layer by the host's optimizer. Returns the number of parameters, and kernel -> seconds.

    `dtype`: dtype of the weights.
    """
    kind = getattr(torch, dtype)
    found, num_parameters = {}, 0
    for kernel in KERNELS:
        parameters = {str(index): torch.nn.Parameter(torch.full(shape, 0.5, dtype=kind))
                      for index, shape in enumerate(shapes_of_layer(model))}  # fmt: skip
        store = HostStore(
            {0: parameters}, device=backend.device(), masters=kind in LOW_PRECISION, gradient_dtype=torch.float32
        )
        optimizer = torch.optim.AdamW(store.parameters.values(), fused=True if kernel == "fused" else None)
        host, samples = HostOptimizer(optimizer, store), []
        for gradient in store.stages[0].flat_gradients.values():
            gradient.fill_(1e-3)
        for _ in range(num_warmup + num_iterations):
            start = time.perf_counter()
            host.update(0, host.settings())
            samples.append(time.perf_counter() - start)
        found[kernel] = samples[num_warmup:]
        num_parameters = sum(each.numel() for each in parameters.values())
    return num_parameters, found


def shapes_of_layer(model: Architecture) -> list[tuple[int, ...]]:
    """The shapes of a layer's matrices, with fewer rows if they are very large, and of one vector for each matrix."""
    h, wide = model.hidden_size, model.ffn_hidden_size * (2 if model.gated else 1)
    matrices = [*model.attention_matrices, (wide, h), (h, model.ffn_hidden_size)]
    cut = [(min(rows, max(1, _LARGEST // columns)), columns) for rows, columns in matrices]
    return [*cut, *((rows,) for rows, _ in cut)]


# --- the model and the machine ----------------------------------------------------------------------------------------


def describe(args: TrainConfig) -> dict:
    """The fields `model`, `dtype`, `transformer_impl`, `shares_processor` and `machine` of a `Profile`.

    `args` must be complete.
    """
    args = replace(args, padded_vocab_size=padded_vocab_size(args, build_tokenizer(args)))
    return {
        "model": from_flags.architecture(args),
        "dtype": str(params_dtype(args)).removeprefix("torch."),
        "transformer_impl": args.transformer_impl,
        "shares_processor": not backend.is_cuda(),
        "machine": Machine(
            device=torch.cuda.get_device_name() if backend.is_cuda() else _processor(),
            num_devices=torch.cuda.device_count() if backend.is_cuda() else os.cpu_count(),
            threads=torch.get_num_threads(),
            system=f"{platform.system()} {platform.release()}",
            torch=torch.__version__,
            megatron_core=megatron.core.__version__,
        ),
    }


def _processor() -> str:
    """The name of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
