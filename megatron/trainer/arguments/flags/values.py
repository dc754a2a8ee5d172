"""Values that several flags give together: batch sizes, and the layout of layers. Only `parse_layout` imports torch.

The size of a batch is constant, grows (`--rampup-batch-size`), or follows a list of steps
(`--step-batch-size-schedule`). The arithmetic is Megatron's. In a ramp-up the batch grows over SAMPLES samples from
START to the global batch size, in equal steps of INCREMENT samples, each held for the same number of samples. In a
list, each step holds from its number of tokens on. The size is a pure function of the consumed samples, so a resumed
run continues where it stopped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.documents.flag_types import UNITS
from megatron.pipeline.program.edges import stages_of

if TYPE_CHECKING:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

# --- batch sizes ------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:E[+-]?[0-9]{1,2})?)(?P<unit>[KMBT]?)", re.IGNORECASE | re.ASCII
)


def parse_steps(words: Sequence[str], *, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Parse "TOKENS:SIZE TOKENS:SIZE ...", in one word or several, in any order, to (first sample, batch size).

    Raises ValueError if the text is no such list, or if its tokens do not rise from 0.
    """
    entries = " ".join(words).replace(",", " ").split()
    if not entries:
        raise ValueError("--step-batch-size-schedule has no steps; write for example 0:16 2.4B:320")
    text, steps = f"--step-batch-size-schedule {' '.join(entries)}", []
    for entry in entries:
        tokens, _, size = entry.partition(":")
        tokens, size = _number(tokens), _number(size)
        if tokens is None or not size:
            raise ValueError(
                f"{text}: {entry} is not TOKENS:SIZE, a number of tokens (2.4B, 300M, 2.4e9, 0) and a batch size of at "
                "least 1; write for example 0:16 2.4B:320"
            )
        steps.append((tokens // seq_length, size))
    steps.sort()
    starts = [start for start, _ in steps]
    if starts[0] != 0 or sorted(set(starts)) != starts:
        raise ValueError(
            f"{text}: the steps must begin at 0 tokens and lie at least a sequence ({seq_length} tokens) apart; write "
            "for example 0:16 2.4B:320"
        )
    return tuple(steps)


def _number(text: str) -> int | None:
    """A number as Megatron-LM reads it (1.5K, 2.4B, 2.4e9, .5B), rounded down; None for other text."""
    match = _NUMBER.fullmatch(text)
    return match and int(float(match["number"]) * UNITS[match["unit"].upper()])


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The sizes of all batches of a run.

    Args:
        global_batch_size: samples in a batch over all replicas, after the ramp-up or the last step.
        samples_per_microbatch: microbatch size x data parallel size.
        rampup: (start, increment, samples) or None.
        steps: (first sample, size) of each step, from `parse_steps`, instead of a ramp-up.
        round_down: shrink a batch to a multiple of `samples_per_microbatch` instead of refusing it.
        may_resume: the run may continue from a checkpoint after the first steps. Sizes of past steps need not be
            divisible by `samples_per_microbatch`; `check_from` refuses a run that starts before such a step ends.

    Raises ValueError for a size that is not divisible by `samples_per_microbatch`.
    """

    global_batch_size: int
    samples_per_microbatch: int
    rampup: tuple[int, int, int] | None = None
    steps: tuple[tuple[int, int], ...] = ()
    round_down: bool = False
    may_resume: bool = False

    def __post_init__(self) -> None:
        if self.rampup is not None:
            start, increment, samples = self.rampup
            if start < 1 or increment < 1 or samples < 0:
                raise ValueError(
                    f"--rampup-batch-size {start} {increment} {samples}: START and INCREMENT must be at "
                    f"least 1 and SAMPLES at least 0"
                )
            if start > self.global_batch_size or (self.global_batch_size - start) % increment:
                raise ValueError(
                    f"--rampup-batch-size {start} {increment} {samples} does not reach --global-batch-size "
                    f"{self.global_batch_size} in whole steps; choose START + k x INCREMENT equal to it"
                )
        for size in [self.steps[-1][1]] if self.steps and self.may_resume else self.all_sizes():
            self._check(size)

    def _check(self, size: int) -> None:
        if not self._divides(size):
            what = "--global-batch-size"
            if size != self.global_batch_size:
                what = "a batch of --step-batch-size-schedule" if self.steps else "a batch of the ramp-up"
            raise ValueError(
                f"{what} ({size}) is not divisible by micro batch size x data parallel size "
                f"({self.samples_per_microbatch}); choose a multiple of it or fewer data parallel ranks"
            )

    def _divides(self, size: int) -> bool:
        return size >= self.samples_per_microbatch and (self.round_down or size % self.samples_per_microbatch == 0)

    def check_from(self, consumed_samples: int) -> None:
        """Raise ValueError if the size of a step that has not ended after `consumed_samples` is not divisible."""
        ends = [first for first, _ in self.steps[1:]] + [float("inf")]
        for (_, size), end in zip(self.steps, ends, strict=False):
            if end > consumed_samples:
                self._check(size)

    def sizes_of_the_past(self) -> list[int]:
        """The sizes of steps that are not divisible; such steps must have ended when the run starts."""
        return list(dict.fromkeys(size for _, size in self.steps if not self._divides(size)))

    def all_sizes(self) -> list[int]:
        """The sizes that occur, in order, before rounding, without those of steps that must have ended."""
        if self.steps:
            past = self.sizes_of_the_past() if self.may_resume else ()
            return list(dict.fromkeys(size for _, size in self.steps if size not in past))
        if self.rampup is None:
            return [self.global_batch_size]
        start, increment, _ = self.rampup
        return list(range(start, self.global_batch_size + 1, increment))

    def all_num_microbatches(self) -> list[int]:
        """The numbers of microbatches per replica that occur, in order."""
        return [size // self.samples_per_microbatch for size in self.all_sizes()]

    def num_microbatches(self, consumed_samples: int) -> int:
        """The microbatches per replica in the batch that starts after `consumed_samples`."""
        return self._nominal(consumed_samples) // self.samples_per_microbatch

    def num_samples(self, consumed_samples: int) -> int:
        """The samples over all replicas in the batch that starts after `consumed_samples`."""
        if not self.round_down:
            return self._nominal(consumed_samples)  # also for a past step, whatever its microbatches were
        return self.num_microbatches(consumed_samples) * self.samples_per_microbatch

    def _nominal(self, consumed_samples: int) -> int:
        if self.steps:
            return next(size for first, size in reversed(self.steps) if first <= consumed_samples)
        if self.rampup is None:
            return self.global_batch_size
        start, increment, samples = self.rampup
        num_steps = (self.global_batch_size - start) // increment
        if num_steps == 0 or consumed_samples > samples or samples == 0:
            return self.global_batch_size
        return min(start + int(consumed_samples / (samples / num_steps)) * increment, self.global_batch_size)

    def _growing(self) -> Iterator[tuple[int, int]]:
        """Yield (iterations, samples) before each batch, until the size no longer changes."""
        consumed = iteration = 0
        yield 0, 0
        last = self.steps[-1][0] - 1 if self.steps else self.rampup[2] if self.rampup else -1
        while consumed <= last:
            consumed += self.num_samples(consumed)
            iteration += 1
            yield iteration, consumed

    def samples_after(self, num_iterations: int) -> int:
        """The samples that the first `num_iterations` batches consume."""
        iteration = consumed = 0
        for iteration, consumed in self._growing():
            if iteration == num_iterations:
                return consumed
        return consumed + (num_iterations - iteration) * self.num_samples(consumed)

    def iterations_for(self, num_samples: int) -> int:
        """The number of whole batches for which `num_samples` samples suffice."""
        iteration = consumed = 0
        for next_iteration, next_consumed in self._growing():
            if next_consumed > num_samples:
                return iteration
            iteration, consumed = next_iteration, next_consumed
        return iteration + (num_samples - consumed) // self.num_samples(consumed)


# --- the layout of layers ---------------------------------------------------------------------------------------------


def parse_layout(
    text: str,
    *,
    num_ranks: int,
    num_layers: int,
    placement: Callable[[int, int], Sequence[int]],
    num_further: int | None = None,
) -> PipelineParallelLayerLayout:
    """Parse a layout into megatron.core's, for a pipeline of `num_ranks` ranks and a model of `num_layers` layers.

    `placement`, of `PLACEMENTS`, maps stages to ranks. `num_further`: the number of multi-token prediction layers;
    None: there are none.

    Raises:
        ValueError: the layout has an unknown letter, a number of stages that `num_ranks` does not divide, or a rank
            that holds nothing; or it does not have exactly the embedding at the beginning, `num_layers` layers, the
            multi-token prediction layers in one stage, and the loss at the end.
    """
    from megatron.core.transformer.enums import LayerType  # imports torch
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        layout = PipelineParallelLayerLayout(text, num_ranks)
        layout.validate_layer_layout(num_layers=num_layers, mtp_num_layers=num_further)
    except (AssertionError, IndexError) as error:
        further = f", {num_further} times m" if num_further else ""
        raise ValueError(
            f"--pipeline-model-parallel-layout {text}: {error}; write E, {num_layers} times t{further} and L, with | "
            f"between stages, as many as {num_ranks} ranks divide"
        ) from error
    if LayerType.embedding not in layout.layout[0][0] or LayerType.loss not in layout.layout[-1][-1]:
        raise ValueError(
            f"--pipeline-model-parallel-layout {text} begins or ends with an empty stage; the first stage holds E and "
            "the last one L"
        )
    num_virtual = layout.virtual_pipeline_model_parallel_size
    rank_of_stage = placement(num_ranks, num_virtual)
    held = [layout.layout[stage % num_ranks][stage // num_ranks] for stage in range(num_ranks * num_virtual)]
    for rank in range(num_ranks):
        if not any(held[stage] for stage in stages_of(rank_of_stage, rank)):
            raise ValueError(
                f"--pipeline-model-parallel-layout {text} leaves rank {rank} of the pipeline nothing to hold; give one "
                "of its stages a layer, or use fewer ranks"
            )
    return layout
