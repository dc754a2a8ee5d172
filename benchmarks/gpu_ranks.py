"""A stage of `gpu.py`: the schedules on one device, in turns. Tests run it on a CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.gpt import gpt_stage, mean_loss
from megatron import backend
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.schedules import Schedule

WARM_UP = {"flush": 2, "2bw": 3, "2bw provisional": 3}
"""The number of untimed first batches: they allocate memory, and under 2bw its segments repeat after them."""
CLIP_GRAD = 1.0
TIMEOUT = timedelta(minutes=5)


class Contender:
    """A schedule with a model, an optimizer and an engine of its own. `losses`: the losses of all reported batches."""

    def __init__(self, name: str, model: dict, *, backend_name: str, device: torch.device) -> None:
        self.name, self.losses = name, []
        self._micro_batch_size = model["micro_batch_size"]
        stages, rank = dist.get_world_size(), dist.get_rank()
        preset, _, predicts = name.partition(" ")
        schedule = Schedule.preset(preset, num_stages=stages, predict=bool(predicts))
        chunk, optimizer = chunk_with_optimizer(model, stages)
        self.update = MegatronWeightUpdate(
            [chunk], optimizer, weights=schedule.weights, num_stages=stages, stage=rank, timeout=TIMEOUT
        )
        self.stage = MegatronStage(
            chunk, forward_step(model, device), self.update, seq_length=model["seq_length"],
            micro_batch_size=model["micro_batch_size"], data_iterator=data(model, device),
        )  # fmt: skip
        self.engine = PipelineEngine(
            schedule, self.stage, self.update, backend=backend_name, device=device, timeout=TIMEOUT
        )

    def run(self, num_microbatches: int) -> None:
        reports = self.engine.run_batch(num_microbatches, num_microbatches * self._micro_batch_size)
        self.losses += [report.losses["lm loss"] for report in reports]

    def finish(self) -> None:
        self.losses += [report.losses["lm loss"] for report in self.engine.drain()]

    def close(self) -> None:
        self.engine.close()
        self.update.close()


def chunk_with_optimizer(
    model: dict, num_stages: int, *, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Build this rank's stage in BF16 or FP32, with FP32 gradients, and its Adam. `config`: as for `gpt_stage`."""
    extent = {name: model[name] for name in ("hidden_size", "heads", "vocab_size", "seq_length")}
    gpt = gpt_stage(
        num_layers=num_stages * model["layers"], num_stages=num_stages, dtype=dtype, **extent, **config
    ).to(backend.device())  # fmt: skip
    is_narrow = dtype is torch.bfloat16
    wrapped = Float16Module(gpt.config, gpt) if is_narrow else gpt
    chunk = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-4, weight_decay=0.01, clip_grad=CLIP_GRAD, bf16=is_narrow, params_dtype=dtype
    )
    return chunk, get_megatron_optimizer(options, [chunk])


def data(model: dict, device: torch.device) -> Iterator[torch.Tensor]:
    """An endless iterator over the tokens of microbatches, [micro_batch_size, seq_length + 1]: eight, made in
    advance."""
    generator = torch.Generator().manual_seed(1)
    shape = (8, model["micro_batch_size"], model["seq_length"] + 1)
    return itertools.cycle(torch.randint(model["vocab_size"], shape, generator=generator).to(device))


def forward_step(model: dict, device: torch.device):
    """A forward step in Megatron-LM's form, in which nothing waits for the device."""
    positions = torch.arange(model["seq_length"], device=device).expand(model["micro_batch_size"], -1)
    is_last = parallel_state.is_pipeline_last_stage()
    # True is masked. megatron.core's local attention needs an explicit causal mask.
    mask = torch.ones(1, 1, model["seq_length"], model["seq_length"], dtype=torch.bool, device=device).triu(1)

    def step(data_iterator, chunk):
        tokens = next(data_iterator)
        return chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:] if is_last else None), mean_loss

    return step


def timed(contender: Contender, num_microbatches: int, num_batches: int) -> float:
    """Measure the seconds of a batch in the steady state, on the slowest rank."""
    dist.barrier()
    for _ in range(WARM_UP.get(contender.name, 2)):
        contender.run(num_microbatches)
    backend.synchronize()
    start = time.perf_counter()
    for _ in range(num_batches):
        contender.run(num_microbatches)
    backend.synchronize()
    seconds = torch.tensor([(time.perf_counter() - start) / num_batches], device=backend.device())
    contender.finish()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def compare(job: dict, device: str) -> dict:
    """Run all rounds. Collective: every rank must call it, with the process group initialized."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=job["num_stages"])
    place = torch.device(device)
    names = sorted({name for order in job["orders"] for name in order}, reverse=True)
    contenders = {name: Contender(name, job["model"], backend_name=job["backend"], device=place) for name in names}
    seconds: dict[int, dict[str, list[float]]] = {}
    for num_microbatches in job["microbatches"]:
        table = seconds[num_microbatches] = {name: [] for name in names}
        for order in job["orders"]:
            for name in order:
                table[name].append(timed(contenders[name], num_microbatches, job["batches"]))
    peaks: list = [None] * job["num_stages"]
    dist.all_gather_object(peaks, backend.peak_memory_bytes())
    for contender in contenders.values():
        contender.close()
    model = job["model"]
    return {
        "seconds": seconds,
        "tokens_per_microbatch": model["micro_batch_size"] * model["seq_length"],
        "losses": {name: contender.losses for name, contender in contenders.items()},
        "peak_bytes": peaks,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "backend": job["backend"],
    }
