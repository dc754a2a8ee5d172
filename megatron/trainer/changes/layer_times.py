"""Seconds of each layer, from what stages were measured to take.

A stage's time is shared out to its layers by their arithmetic: all layers of a model are alike, and the output layer of
the last stage is as much as some of them. The embedding's, a copy, is not counted apart. What a layer took is kept
until it is measured again, also while it is frozen and has no backward.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

import torch.distributed as dist

from megatron.elastic.stages import Stages
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.runtime.contract.trace import COMPUTE
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import control_group
from megatron.trainer.report.throughput import flops_of_output_layer, flops_per_sample

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


def share_of_output_layer(args: argparse.Namespace) -> float:
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
