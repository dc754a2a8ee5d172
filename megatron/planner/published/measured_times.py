"""The part `measured` of an entry: the time of an iteration, converted where a rate was published in its place."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.memory.architecture import Architecture

TIMES = (
    "iteration_s", "iteration_ms", "mfu", "model_tflops_per_gpu", "tflops_per_gpu_incl_recompute", "tflops_per_gpu",
    "tokens_per_s_per_gpu", "forward_ms", "backward_ms", "throughput",
)  # fmt: skip
"""What becomes a time. The rest of `MEASURED` is for the reader, and for facts about memory."""
MEASURED = (
    *TIMES, "unit", "chosen_by_planner", "feasible", "feasible_without_bpipe", "hfu", "mfu_from_time", "pct_peak",
    "aggregate_pflops", "memory_GiB", "peak_memory_GiB", "transfer_ms", "days_for_300B_tokens",
)  # fmt: skip
_AGREE = 0.02


def is_measured(value: object) -> bool:
    """Whether it was measured; for a run that failed some tables have 0."""
    return type(value) in (int, float) and 0 < value < math.inf


@dataclass(frozen=True)
class MeasuredRun:
    """What turns a rate into a time. `peak`: operations per second of a GPU in the run's precision."""

    model: Architecture
    configuration: Configuration
    peak: float

    def seconds(self, measured: Mapping[str, float], assume: Callable[[str], None]) -> tuple[float | None, bool]:
        """The time of an iteration, and whether it follows from an MFU.

        Args:
            measured: numbers above 0.
            assume: is told what was converted.
        Raises ValueError for an MFU above 1, and for two times that differ.
        """
        if "iteration_s" in measured or "iteration_ms" in measured:
            return _time(measured), False
        if "mfu" in measured:
            if measured["mfu"] > 1:
                raise ValueError(f"measured.mfu is {measured['mfu']}; give a part of 1")
            return self._operations / (measured["mfu"] * self.peak * self._gpus), True
        for name, work in (
            ("model_tflops_per_gpu", self._operations),
            ("tflops_per_gpu_incl_recompute", self._operations_with_recompute),
            ("tflops_per_gpu", self._operations if self._recomputes_nothing else None),
        ):
            if name in measured and work is not None:
                seconds = work / (1e12 * measured[name] * self._gpus)
                if 1e12 * measured[name] > self.peak:
                    raise ValueError(f"measured.{name} is {measured[name]}, above the GPU's peak of "
                                     f"{self.peak / 1e12:g}; give TFLOP/s of one GPU")  # fmt: skip
                assume(f"{seconds:.4g} s an iteration, of {measured[name]:g} TFLOP/s a GPU")
                return seconds, False
        if "tokens_per_s_per_gpu" in measured:
            tokens = self.configuration.global_batch_size * self.model.sequence_length
            seconds = tokens / (measured["tokens_per_s_per_gpu"] * self._gpus)
            assume(f"{seconds:.4g} s an iteration, of {measured['tokens_per_s_per_gpu']:g} tokens/s a GPU")
            return seconds, False
        return None, False

    def unread(self, measured: Mapping[str, float]) -> str | None:
        """The rate that is there and says too little, in words."""
        read = {"iteration_s", "iteration_ms", "mfu", "model_tflops_per_gpu", "tflops_per_gpu_incl_recompute"}
        if "tflops_per_gpu" not in measured or self._recomputes_nothing or read & set(measured):
            return None
        return (
            f"measured.tflops_per_gpu is {measured['tflops_per_gpu']}, which does not say whether what is recomputed "
            "counts; give model_tflops_per_gpu or tflops_per_gpu_incl_recompute"
        )

    @property
    def _gpus(self) -> int:
        return self.configuration.num_gpus

    @property
    def _operations(self) -> float:
        return self.model.operations(self.configuration.global_batch_size)

    @property
    def _recomputes_nothing(self) -> bool:
        return self.configuration.recompute is RecomputeScope.NONE

    @property
    def _operations_with_recompute(self) -> float | None:
        """As Narayanan et al. 2021 count: the layers' forward once more, where whole layers are recomputed."""
        if self._recomputes_nothing:
            return self._operations
        if self.configuration.recompute is not RecomputeScope.LAYER:
            return None
        batch = self.configuration.global_batch_size
        return self._operations + self.model.forward_operations(self.model.num_layers, batch)


def _time(measured: Mapping[str, float]) -> float:
    given = [measured[name] / unit for name, unit in (("iteration_s", 1), ("iteration_ms", 1e3)) if name in measured]
    if max(given) > (1 + _AGREE) * min(given):
        raise ValueError(
            f"measured.iteration_s is {measured['iteration_s']} and iteration_ms {measured['iteration_ms']}, which are "
            "two times; leave one out"
        )
    return given[0]
