"""Measured times for decisions about a run's pipeline: seconds of each layer, and of links between ranks.

Layers: a stage's time is divided among its layers in proportion to their floating-point operations. All transformer
layers are equal, and the output layer counts as a certain number of them. The embedding, which only copies, is not
counted. The time of a layer is kept until it is measured again, even while the layer is frozen and has no backward.

Links: the times of gradient reductions and of transfers, for decisions about degrees. They are measured by all-reduces
over all ranks of the job, one of a few bytes and one of a layer's gradients. This group always exists, and its slowest
link determines the time; replicas and stages that are closer to each other may be faster.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from megatron import backend
from megatron.backend.streams import streams_of
from megatron.elastic.stages import StageLayers
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.runtime.contract.trace import COMPUTE
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import control_group, gathered, on_rank_zero
from megatron.pipeline.simulate.costs import Costs
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.report.metrics import flops_of_output_layer, flops_per_sample

# --- layers -----------------------------------------------------------------------------------------------------------

Seconds = Mapping[int, tuple[float, float]]
"""Stage -> seconds of the forward and of the backward of a microbatch; the backward includes its recompute."""

_COMPUTED = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)


def seconds_of_stages(engine: PipelineEngine) -> Seconds:
    """For each stage of the pipeline, the medians of its times (`medians_of_stages`) as `Seconds`.

    Collective: every rank of the job must call it.
    """
    result = {}
    for stage, times in medians_of_stages(engine, _COMPUTED).items():
        forward, recompute, backward = (times[kind] for kind in _COMPUTED)
        result[stage] = (forward, recompute + backward)
    return result


def medians_of_stages(
    engine: PipelineEngine, kinds: Sequence[Kind], *, num_batches: int | None = None
) -> dict[int, dict[Kind, float]]:
    """The seconds of a microbatch by stage and kind; 0 for a kind that a stage does not compute.

    They are medians over the last `num_batches` batches of the engine's trace (None: all), then over replicas.

    Collective: every rank of the job must call it.
    """
    trace = engine.trace()
    first = 0 if num_batches is None else trace.batches[-num_batches].first_microbatch
    found: dict[int, dict[Kind, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in trace.spans:
        each = span.instruction
        if span.track == COMPUTE and each.kind in kinds and each.microbatch >= first:
            found[each.stage][each.kind].append(span.end - span.start)
    own = {stage: {kind: statistics.median(times) for kind, times in times.items()} for stage, times in found.items()}
    of_ranks = gathered(own, control_group())
    return {
        stage: {
            kind: statistics.median([each[stage].get(kind, 0.0) for each in of_ranks if stage in each])
            for kind in kinds
        }
        for stage in sorted({stage for each in of_ranks for stage in each})
    }


def measured_costs(engine: PipelineEngine, *, num_batches: int, num_bytes: float) -> Costs:
    """The costs of computations (`medians_of_stages`), and of a transfer of `num_bytes` between stages.

    Collective: every rank of the job must call it. The pipeline must be drained.
    """
    own = measure_links(num_bytes)
    links = on_rank_zero(lambda: own)
    kinds = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    medians = medians_of_stages(engine, kinds, num_batches=num_batches).values()
    forward, again, whole, first, second = ([each[kind] for each in medians] for kind in kinds)
    backward = [sum(parts) for parts in zip(whole, first, second, strict=True)]  # whole, or in two halves
    recompute = [each or once for each, once in zip(again, forward, strict=True)]  # if not run: a forward's
    return Costs(
        forward=forward, recompute=recompute, backward=backward, backward_input=first, backward_weight=second,
        latency=links.message, forward_bytes=num_bytes, bandwidth=1 / links.byte if links.byte else math.inf,
    )  # fmt: skip


def share_of_output_layer(args: TrainConfig) -> float:
    """The ratio of the output layer's floating-point operations to those of one transformer layer."""
    output = flops_of_output_layer(args)
    return output / ((flops_per_sample(args) - output) / args.num_layers)


class LayerTimes:
    """The times of a model's layers; the last layer includes the output layer.

    Attributes:
        forward, backward: seconds of a microbatch, by layer.
    """

    def __init__(self, num_layers: int, *, output_layer: float) -> None:
        """`output_layer`: the output layer's time in layers. Before any measurement, a layer's forward takes 1 s."""
        self._output_layer = output_layer
        parts = self._parts(range(num_layers), num_layers)
        self.forward, self.backward = list(parts), [2 * each for each in parts]

    def note(self, stages: StageLayers, seconds: Seconds, *, cached: bool = False) -> None:
        """Record the measured times of stages. `cached`: frozen stages have read their output from the cache."""
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
"""Largest size of the measured all-reduce, in bytes; the time of a larger one is taken to be proportional."""


@dataclass(frozen=True)
class LinkTimes:
    """The seconds of an empty message (`message`), and of each byte that a rank sends in a ring (`byte`)."""

    message: float = 0.0
    byte: float = 0.0

    def of_message(self, num_ranks: int) -> float:
        """The seconds of an all-reduce of a few bytes over `num_ranks` ranks."""
        return 2 * (num_ranks - 1) * self.message

    def of_reduction(self, num_bytes: float) -> float:
        """The seconds of an all-reduce with any number of members: in a ring, each byte is sent at most twice."""
        return 2 * num_bytes * self.byte

    def of_transfer(self, num_bytes: float) -> float:
        """The seconds for which a transfer occupies its link."""
        return num_bytes * self.byte


def measure_links(num_bytes: float) -> LinkTimes:
    """Measure links by all-reduces of a few bytes and of up to `num_bytes`.

    Collective: every rank must call it. The pipeline must be drained.
    """
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return LinkTimes()
    size = max(4, int(min(num_bytes, _MOST_BYTES)))
    least, most = _seconds(4), _seconds(size)
    steps = 2 * (num_ranks - 1)
    return LinkTimes(least / steps, max(0.0, most - least) / (steps / num_ranks * size))


def measure_copies(num_bytes: int) -> tuple[float, float]:
    """Measure the seconds to copy a byte to the host, and back, on the slowest rank while all ranks copy.

    Collective: every rank must call it. The pipeline must be drained.
    """
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=backend.device())
    there = streams_of(here.device).host_buffer((num_bytes,), torch.uint8)
    own = [_median_seconds(lambda: there.copy_(here), here), _median_seconds(lambda: here.copy_(there), here)]
    own = [seconds / num_bytes for seconds in own]
    out, back = map(max, zip(*gathered(own, control_group()), strict=True))
    return out, back


def _seconds(num_bytes: int) -> float:
    """The median seconds of an all-reduce of `num_bytes`."""
    values = torch.zeros(num_bytes // 4, dtype=torch.float32, device=backend.device())
    return _median_seconds(lambda: dist.all_reduce(values), values)


def _median_seconds(call: Callable[[], object], on_device: torch.Tensor) -> float:
    """The median seconds of calls that all ranks begin together; the first one is not counted."""
    found = []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        call()
        on_device[0].item()  # waits until a device has finished
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
