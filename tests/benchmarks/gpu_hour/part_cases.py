"""Rehearsals of the parts that train on one device, in the processes of `tests.workers`."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
import threading
from argparse import Namespace
from contextlib import ExitStack, nullcontext
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from benchmarks.gpu_hour.process import begin
from benchmarks.gpu_hour.result import Result
from tests.pipeline.runtime.stages.megatron import fused_accumulation

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def rehearse(part: str, *, exhausts: tuple[str, ...] = ()) -> dict:
    """The file that a rehearsal leaves. `exhausts`: functions of the part that find no memory for the small size."""
    begin()
    module = import_module(f"benchmarks.gpu_hour.{part}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        for name in exhausts:
            whole = getattr(module, name)

            def with_much_memory(result, size, *arguments, whole=whole):
                if size == "small":
                    raise torch.OutOfMemoryError(OUT_OF_MEMORY)
                return whole(result, size, *arguments)

            patches.enter_context(mock.patch.object(module, name, with_much_memory))
        path = Path(folder) / "found.json"
        result = Result(Namespace(json=path, rehearse=True))
        module.run(result)
        found = json.loads(path.read_text())
        assert found == result.content, "the last measurement was not written"
        return found


def stage_without_memory() -> tuple[dict, int, list[str]]:
    """A rehearsal of `one_stage` in which an engine finds no memory in the middle of a batch of the small size: the
    file, the engines that are still there, and the names of their threads."""
    begin()
    from benchmarks.gpu_hour import one_stage
    from megatron.pipeline.runtime.engine import PipelineEngine
    from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage

    measure, forward, calls = one_stage.measure_times, MegatronStage.forward, itertools.count()

    def without_memory(stage, microbatch, input):
        if next(calls) == 5:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return forward(stage, microbatch, input)

    def measure_small(result, size, *arguments):
        with mock.patch.object(MegatronStage, "forward", without_memory) if size == "small" else nullcontext():
            measure(result, size, *arguments)

    with mock.patch.object(one_stage, "measure_times", measure_small):
        found = rehearse("one_stage")
    gc.collect()
    engines = sum(isinstance(each, PipelineEngine) for each in gc.get_objects())
    return found, engines, [each.name for each in threading.enumerate() if each.name.startswith("pipeline")]


def start_of_precisions() -> dict[str, float]:
    """Precision -> how far its weights are from BF16's before the first step."""
    begin()
    from benchmarks.gpu_hour.one_device import TINY
    from benchmarks.gpu_hour.precision import in_plain_layers

    made = in_plain_layers({**TINY["small"], "vocab_size": 64})
    weights = {name: list(each.chunk.parameters()) for name, each in made.items()}
    return {
        name: max((a.float() - b.float()).abs().max().item() for a, b in zip(each, weights["bf16"], strict=True))
        for name, each in weights.items()
    }


def fused_with_apex() -> dict:
    """A rehearsal of `fused` where a stand-in of Apex is installed: its accumulation, and its Adam by torch's."""

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, params, lr, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                     weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False,
                     master_weights=False):  # fmt: skip
            assert adam_w_mode and bias_correction
            super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    with fused_accumulation.stand_in() as kernel:
        module = ModuleType("fused_weight_gradient_mlp_cuda")
        module.__spec__, module.wgrad_gemm_accum_fp32 = ModuleSpec(module.__name__, None), kernel.wgrad_gemm_accum_fp32
        modules = {module.__name__: module, "apex": ModuleType("apex"), "apex.optimizers": optimizers}
        with mock.patch.dict(sys.modules, modules):
            return rehearse("fused") | {"num_calls": kernel.num_calls}


def fused_with_torchs_product() -> dict:
    """A rehearsal of `fused` where a CPU has the product that only a GPU has, called as torch's schema says."""

    def addmm(buffer, left, right, out_dtype, beta=1, alpha=1, *, out):
        assert out_dtype is torch.float32 and out is buffer
        return out.add_(left.float() @ right.float())

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    try:
        return rehearse("fused")
    finally:
        library._destroy()
