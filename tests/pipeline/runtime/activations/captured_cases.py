"""Microbatches in flight on a megatron.core stage that leave and come back, in the processes of `tests.workers`."""

import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.activations.saved_tensors import SavedTensors, storages_of
from megatron.pipeline.runtime.contract.stage import BatchInfo, Microbatch
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

NUM_MICROBATCHES = 3
MICROBATCHES = [Microbatch(index, 0, index, NUM_MICROBATCHES) for index in range(NUM_MICROBATCHES)]

CASES = {
    "dropout": {"dropout": 0.1},
    "bf16": {"dropout": 0.1, "dtype": "bfloat16"},
    "tied": {"tied": True},
    "gated": {"swiglu": True, "normalization": "RMSNorm", "position": "rope"},
    "selective": {"dropout": 0.1, "recompute_granularity": "selective"},
    "full": {"dropout": 0.1, "recompute_granularity": "full"},
    "full bf16": {"dropout": 0.1, "dtype": "bfloat16", "recompute_granularity": "full"},
    "recompute instruction": {"dropout": 0.1, "recompute": True},
}
PLACES = ("whole", "middle")
DATA = {((1, 1, 16, 16), "torch.bool"), ((2, 16), "torch.int64"), ((2, 16), "torch.float32")}
"""What a microbatch's forward is given: the attention mask, token and position ids, the mask of the losses."""


def run_all() -> dict:
    return {(name, place): megatron_case(place, **CASES[name]) for name in CASES for place in PLACES}


def megatron_case(place: str, **options) -> dict:
    case = cases.Case(schedule="2bw", batches=(NUM_MICROBATCHES,), layers=2, **options)
    with cases.parallel(case):
        outcomes = [in_flight(case, place, moved) for moved in (None, False, True)]
    expected, kept, moved = (outcome.pop("gradients") for outcome in outcomes)
    result = outcomes[2]
    result["num_gradients"] = len(expected)
    result["differences"] = [
        (a.float() - b.float()).abs().max().item()
        for other in (kept, moved)
        for a, b in zip(expected, other, strict=True)
    ]
    return result


def in_flight(case: cases.Case, place: str, moved: bool | None) -> dict:
    """All microbatches forward, then backward. `moved`: None does not capture, True moves all but one meanwhile."""
    _, update = cases.build(case)
    memory = None if moved is None else ActivationMemory()
    stage = megatron_stage(case, update, place, memory)
    stage.load_version(0)
    update.begin_batch(BatchInfo(0, NUM_MICROBATCHES, NUM_MICROBATCHES * case.micro_batch_size))
    torch.manual_seed(3)
    result, traces, edges = {}, [], []
    for microbatch in MICROBATCHES:
        edges.append(torch.randn(stage.input_spec.shape, dtype=stage.input_spec.dtype) if place == "middle" else None)
        with watched(traces):
            output = stage.forward(microbatch, None if edges[-1] is None else edges[-1].clone())
        if output is not None:
            edges[-1] = torch.randn_like(output)
            stage.free_output(microbatch)
        del output
    with update.versions.making(1):
        for parameter in stage.model.parameters():
            parameter.add_(1.0)  # another version, which nothing here may see
    if moved:
        sizes = [stage.saved_bytes(microbatch) for microbatch in MICROBATCHES]
        peak = memory.peak_bytes
        away = {microbatch: stage.evict(microbatch).pack().clone() for microbatch in MICROBATCHES[:2]}
        gone = [entry for entry in traces[: traces.index(None, traces.index(None) + 1)] if entry is not None]
        result = {
            "sizes": sizes,
            "peak": peak,
            "left": what_stays_alive(gone, held_storages(stage)),
            "num_saved": len(gone),
            "after": [stage.saved_bytes(microbatch) for microbatch in MICROBATCHES],
            "in_graphs": memory.current_bytes,
        }
        for microbatch in reversed(away):
            stage.load(microbatch, away[microbatch])
    stage.load_version(0)
    update.begin_backward(BatchInfo(0, NUM_MICROBATCHES, NUM_MICROBATCHES * case.micro_batch_size))
    gradients = []
    for microbatch, edge in zip(MICROBATCHES, edges, strict=True):
        if case.recompute:
            stage.recompute(microbatch)
        gradients.append(stage.backward(microbatch, edge))
    if moved:
        result["at_end"] = memory.current_bytes
    result["gradients"] = [grad for grad in gradients if grad is not None]
    result["gradients"] += [parameter.main_grad.clone() for parameter in stage.model.parameters()]
    return result


def megatron_stage(case: cases.Case, update, place: str, memory: ActivationMemory | None) -> MegatronStage:
    options = {"seq_length": cases.SEQUENCE, "micro_batch_size": case.micro_batch_size, "activation_memory": memory}
    if place == "whole":  # first and last at once: embedding, layers, loss
        data = cases.training_data(case, 0)
        return MegatronStage(
            update.chunks[0], cases.forward_step(case), update, data_iterator=data, recompute=case.recompute, **options
        )
    inner = unwrap_model(update.chunks[0])
    inner.pre_process = inner.post_process = inner.decoder.pre_process = inner.decoder.post_process = False

    def step(data_iterator, chunk):
        return chunk(None, None, cases.causal_mask()), None

    return MegatronStage(update.chunks[0], step, update, index=1, num_stages=4, recompute=case.recompute, **options)


class watched:
    """While it is open, (storage, shape) of every packed tensor goes to the list; None ends a microbatch."""

    def __init__(self, trace: list) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        self._pack = SavedTensors.pack

        def pack(saved, tensor):
            self._trace.append((StorageWeakRef(tensor.untyped_storage()), (tuple(tensor.shape), str(tensor.dtype))))
            return self._pack(saved, tensor)

        SavedTensors.pack = pack

    def __exit__(self, *exception) -> None:
        SavedTensors.pack = self._pack
        self._trace.append(None)


def held_storages(stage: MegatronStage) -> set[int]:
    """The storages of the weights of every version, and of the module's buffers."""
    tensors = list(unwrap_model(stage.model).buffers())
    for version in stage._update.versions.live():
        tensors += stage._update.versions.tensors(version).values()
    return storages_of(tensors)


def what_stays_alive(trace: list, held: set[int], seconds: float = 5.0) -> set:
    """`alive`, once a collective's thread that still held something has let it go."""
    deadline = time.monotonic() + seconds
    while not (left := alive(trace, held)) <= DATA and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def alive(trace: list, held: set[int]) -> set:
    """(shape, dtype) of what has memory still, but for what is held elsewhere."""
    left = set()
    for reference, kind in trace:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is not None and storage.nbytes() and storage._cdata not in held:
            left.add(kind)
    return left


def refusals() -> dict:
    """Messages of stages that cannot move their activations."""
    messages = {}
    case = cases.Case(layers=1, recompute_granularity="selective", recompute_modules=("core_attn", "layernorm"))
    with cases.parallel(case):
        _, update = cases.build(case)
        megatron_stage(case, update, "middle", None)
        try:
            megatron_stage(case, update, "middle", ActivationMemory())
        except ValueError as error:
            messages["recomputed norms"] = str(error)
    case = cases.Case(layers=1)
    with cases.parallel(case):
        _, update = cases.build(case)
        stage = megatron_stage(case, update, "middle", None)
        stage.load_version(0)
        stage.forward(MICROBATCHES[0], torch.randn(stage.input_spec.shape))
        try:
            stage.evict(MICROBATCHES[0])
        except RuntimeError as error:
            messages["not captured"] = str(error)
    return messages
