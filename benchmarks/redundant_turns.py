"""The processes of `redundant_optimizer.py`, which train in turns with copies of shards and without."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.stages.megatron.redundant_shards import RedundantShards
from megatron.pipeline.runtime.stages.megatron.shard_copies import ShardCopy
from megatron.trainer.arguments import parse_args
from megatron.trainer.programs.pretrain_gpt import program
from megatron.trainer.run.pretraining import assemble, complete
from megatron.trainer.start_up import initialize

if TYPE_CHECKING:
    from benchmarks.redundant_optimizer import Job


class Stopwatch:
    """Adds up the seconds of the calls of a method."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, method = 0.0, getattr(owner, name)

        def timed(*arguments: object) -> object:
            start = time.perf_counter()
            result = method(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        setattr(owner, name, timed)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def slowest(seconds: float) -> float:
    """Collective: the most of all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def take_turns(job: Job) -> dict:
    """Run all turns of a job on this rank. The default process group is initialized."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK=str(dist.get_rank()))
    args, _ = complete(parse_args(job.flags.split()))
    run = assemble(initialize.set_up(args), program())
    for stage, iterator in zip(run.stages, run.samples(0, "training", 0), strict=True):
        stage.data_iterator = iterator
    sends, steps = Stopwatch(RedundantShards, "exchange"), Stopwatch(ShardCopy, "_step")
    size = args.global_batch_size
    num_microbatches = args.batch_sizes.num_microbatches(0)
    shards = run.update.shards
    host_bytes = sum(each.num_bytes + sum(flat.numel() * 4 for flat in each.copy_of("param")) for each in shards.kinds)
    found: dict[str, list[float]] = {
        "with": [], "without": [], "processor with": [], "processor without": [], "sends": [], "steps": []
    }  # fmt: skip

    def batch() -> float:
        start = time.perf_counter()
        run.engine.run_batch(num_microbatches, size)
        return time.perf_counter() - start

    def turn(begin: Callable[[], None]) -> tuple[float, ...]:
        begin()
        run.engine.run_batch(num_microbatches, size)
        dist.barrier()
        sends.take(), steps.take()
        processor = time.process_time()
        seconds = statistics.median(batch() for _ in range(job.iterations))
        used = time.process_time() - processor
        of_turn = [slowest(each / job.iterations) for each in (used, sends.take(), steps.take())]
        run.engine.drain()
        return slowest(seconds), *of_turn

    def without() -> None:
        run.update.shards = None

    for number in range(job.turns + 1):
        alone, used_alone, *_ = turn(without)
        copied, used, sent, stepped = turn(run.update.keep_shards)
        if number:
            values = (copied, alone, used, used_alone, sent, stepped)
            for each, value in zip(found.values(), values, strict=True):
                each.append(value)
    parameters = sum(each.numel() for chunk in run.chunks for each in chunk.parameters())
    run.engine.close()
    run.update.close()
    initialize.shut_down()
    return {"parameters": parameters, "host_bytes": host_bytes, **found}
