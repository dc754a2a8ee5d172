"""Measured times for decisions about a run's pipeline: seconds of each layer, and of links between ranks.

Layers: a stage's time is divided among its layers by their arithmetic. All layers of a model are alike, and the output
layer of the last stage counts as some number of them. The embedding, a copy, is not counted. The time of a layer is
kept until it is measured again, also while the layer is frozen and has no backward.

Links: the time of reducing gradients and of sending, for decisions about degrees. It is measured by all-reduces over
all ranks of the job, of a few bytes and of a layer's gradients: this group exists, and its slowest link decides.
Replicas and stages that are nearer to each other may be faster.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from megatron import backend
from megatron.elastic.stages import Stages
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.runtime.contract.trace import COMPUTE
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import control_group
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.report.metrics import flops_of_output_layer, flops_per_sample

# --- layers -----------------------------------------------------------------------------------------------------------

Seconds = Mapping[int, tuple[float, float]]
"""Stage -> forward and backward of a microbatch, recompute with the backward."""

_COMPUTED = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)


def seconds_of_stages(engine: PipelineEngine) -> Seconds:
    """Times of all stages of the pipeline: medians over what was traced last, then over replicas. Collective over the
    job.
    """
    found: dict[int, dict[Kind, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in engine.trace().spans:
        if span.track == COMPUTE and span.instruction.kind in _COMPUTED:
            found[span.instruction.stage][span.instruction.kind].append(span.end - span.start)
    own = {stage: {kind: statistics.median(times) for kind, times in kinds.items()} for stage, kinds in found.items()}
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own, group=control_group())
    result = {}
    for stage in sorted({stage for each in gathered for stage in each}):
        forward, recompute, backward = (
            statistics.median([each[stage].get(kind, 0.0) for each in gathered if stage in each]) for kind in _COMPUTED
        )
        result[stage] = (forward, recompute + backward)
    return result


def share_of_output_layer(args: TrainConfig) -> float:
    """The arithmetic of the output layer over that of one transformer layer."""
    output = flops_of_output_layer(args)
    return output / ((flops_per_sample(args) - output) / args.num_layers)


class LayerTimes:
    """The times of a model's layers, the output layer counted to the last one.

    Attributes:
        forward, backward: seconds of a microbatch, by layer.
    """

    def __init__(self, num_layers: int, *, output_layer: float) -> None:
        """`output_layer`: how many layers' time it takes. Until layers are measured, a forward of one is a second."""
        self._output_layer = output_layer
        parts = self._parts(range(num_layers), num_layers)
        self.forward, self.backward = list(parts), [2 * each for each in parts]

    def note(self, stages: Stages, seconds: Seconds, *, cached: bool = False) -> None:
        """Take over what the stages were measured to take. `cached`: the frozen one has read its output."""
        num_layers = len(self.forward)
        ends = list(accumulate(stages.layers, initial=0))
        for stage, (forward, backward) in seconds.items():
            if cached and stage < stages.num_frozen:
                continue
            layers = range(ends[stage], ends[stage + 1])
            parts = self._parts(layers, num_layers)
            for layer, part in zip(layers, parts, strict=True):
                self.forward[layer] = forward * part / sum(parts)
                if stage >= stages.num_frozen:
                    self.backward[layer] = backward * part / sum(parts)

    def _parts(self, layers: range, num_layers: int) -> list[float]:
        return [1.0 + self._output_layer * (layer == num_layers - 1) for layer in layers]


# --- links ------------------------------------------------------------------------------------------------------------

_REPEATS = 5
_MOST_BYTES = 32 << 20
"""The size of the all-reduce that is measured; a larger one takes longer in proportion."""


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of a message, and of each byte that a rank sends in a ring."""

    message: float = 0.0
    byte: float = 0.0

    def of_message(self, num_ranks: int) -> float:
        """The time of an all-reduce of next to nothing over so many ranks."""
        return 2 * (num_ranks - 1) * self.message

    def of_reduction(self, num_bytes: float) -> float:
        """The time of an all-reduce, whatever the number of its members: a ring sends all bytes up to twice."""
        return 2 * num_bytes * self.byte

    def of_transfer(self, num_bytes: float) -> float:
        """The time for which a transfer holds its link."""
        return num_bytes * self.byte


def measure_links(num_bytes: float) -> LinkTimes:
    """Times taken by an all-reduce of up to so many bytes. Collective, drained."""
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return LinkTimes()
    size = max(4, int(min(num_bytes, _MOST_BYTES)))
    least, most = _seconds(4), _seconds(size)
    steps = 2 * (num_ranks - 1)
    return LinkTimes(least / steps, max(0.0, most - least) / (steps / num_ranks * size))


def _seconds(num_bytes: int) -> float:
    """The median of the times; the first call is not counted."""
    values, found = torch.zeros(num_bytes // 4, dtype=torch.float32, device=backend.device()), []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        values[0].item()  # on a device: when it has been done
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
