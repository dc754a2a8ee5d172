"""The choice of a run's next arrangement: the number of ranks of a pipeline, and the number of layers of each rank.

Candidate numbers of pipeline ranks are the divisors of the number of all ranks, up to the pipeline's initial number;
the other ranks form replicas. The batch size either stays the same, so that each replica takes fewer microbatches, or
grows with the number of replicas (`--elastic-batch`). Each candidate is split by measured times and simulated with
measured links. The planner computes its memory; the limit is the largest memory of a rank in the first arrangement. The
fastest candidate is chosen if it repays the cost of the change in the rest of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.documents import counted
from megatron.elastic.cache import CacheSeconds, measure, reading_pays
from megatron.elastic.pipelines import Layers, most_saved, pipelines
from megatron.elastic.stages import Arrangement, cut_exactly, cut_greedily, cut_that_fits
from megatron.pipeline.placement.topology import Process, this_process
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import control_group, gathered
from megatron.pipeline.schedules import PRESETS
from megatron.planner.memory.activations import Activations
from megatron.planner.memory.memory import RankMemory, estimate_memory
from megatron.planner.memory.parameters import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    matrix_parameters,
)
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.freezing import of_interval
from megatron.trainer.arguments.rules.programs import num_samples
from megatron.trainer.changes.times import (
    LayerTimes,
    LinkTimes,
    measure_links,
    seconds_of_stages,
    share_of_output_layer,
)
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.arrangement import Outlook, arranged, batch_size, degrees_of, pipelines_in_a_row
from megatron.trainer.plan.from_flags import prove

if TYPE_CHECKING:
    from megatron.trainer.changes.prefix_cache import PrefixCache


def memory_of_ranks(args: TrainConfig, *, counts_communicators: bool = False) -> tuple[RankMemory, ...]:
    """The planner's memory estimate for each rank of a pipeline in the arrangement of `args`."""
    _, demand = prove(args)
    return estimate_memory(
        from_flags.architecture(args), from_flags.activation_setting(args), from_flags.training_state(args), demand,
        layers=args.arrangement.stages.layers, counts_communicators=counts_communicators,
    )  # fmt: skip


def state_bytes(memory: RankMemory) -> float:
    """The bytes of a rank's weights, gradients and optimizer state, without activations."""
    return memory.parts.weights + memory.parts.gradients + memory.parts.optimizer + memory.parts.step


def bytes_in_change(before: RankMemory, after: RankMemory) -> float:
    """The bytes of a process during a change: the state of both arrangements, without the old one's gradients."""
    return state_bytes(before) - before.parts.gradients + state_bytes(after)


class ArrangementChoice:
    """The choice of arrangements for one run.

    Args:
        processes: the processes by rank; if empty, `measure` gathers them.
        device_bytes: memory of a rank's device, which holds the old and the new state during a change.
        disk: the seconds to read and write in the cache's folder; None: measure them.
        epoch: the number of samples in an epoch; None: the number of training samples.

    Attributes:
        args: the current configuration of the run.
        seconds_of_change: the duration of the last change, or the expected duration before the first change.
    """

    def __init__(
        self, args: TrainConfig, processes: Sequence[Process] = (), *, device_bytes: float = math.inf,
        disk: CacheSeconds | None = None, epoch: int | None = None,
    ) -> None:  # fmt: skip
        self.args, self._processes, self._device_bytes = args, tuple(processes), device_bytes
        self._links: LinkTimes | None = None
        self._times = LayerTimes(args.num_layers, output_layer=share_of_output_layer(args))
        self._counted = LayerTimes(args.num_layers, output_layer=share_of_output_layer(args))
        self._by_hand, self._microbatches = args.elastic_schedule, args.elastic_micro_batch_size
        self._num_intervals = 0
        self._disk, self._epoch = disk, epoch
        self._memories: dict[Arrangement, tuple[RankMemory, ...]] = {}
        self._most_bytes: float | None = None
        self.seconds_of_change = 0.0

    def measure(self, engine: PipelineEngine, cache: PrefixCache | None = None) -> None:
        """Measure the times of layers (from the engine's trace), links and the cache, and gather the processes.

        Collective: every rank must call it. The pipeline must be drained. `cache`: the run's cache, which has measured
            its reading and writing.
        """
        if not self._processes:
            self._processes = tuple(gathered(this_process(), control_group()))
        if self._links is None and self.args.elastic_pipeline:
            self._links = measure_links(self._gradient_bytes(self.args))
        now = self.args.arrangement
        found = {
            stage: (forward / now.micro_batch_size, backward / now.micro_batch_size)
            for stage, (forward, backward) in seconds_of_stages(engine).items()
        }
        self._times.note(now.stages, found, cached=now.cached)
        taken = cache.seconds() if now.cached and cache is not None else None
        if taken is not None and self._disk is not None:
            self._disk = replace(self._disk, read=taken[0], write=taken[1])

    def decide(self, now: Arrangement, *, batches_left: int, is_interval: bool = True) -> tuple[Arrangement, Outlook]:
        """Choose the arrangement in which the run continues; return it with the expected times.

        `now`: the current arrangement with the decided number of frozen layers. `is_interval`: an interval ends, which
        advances the lists of values that the user gave.
        """
        self._num_intervals += is_interval
        present = self._as_it_is(now)
        before = self._expected(present, batches_left) or 0.0
        insists = self._by_hand is not None
        # layers that train again need memory for gradients and optimizer state
        thaws = now.num_frozen < self.args.arrangement.num_frozen
        needs_room = thaws and (self._arranged(present) is None or not self._has_room(present))
        if self._microbatches is not None:
            now = replace(now, micro_batch_size=of_interval(self._microbatches, self._num_intervals))
            insists |= now.micro_batch_size != present.micro_batch_size
        ways = [replace(now, cached=False), *([replace(now, cached=True)] if self._is_to_be_cached(now) else [])]
        found = [
            (each, seconds)
            for way in ways
            for each in self._candidates(way)
            if (seconds := self._expected(each, batches_left)) is not None
        ]
        if self._by_hand is not None:
            size = of_interval(self._by_hand, self._num_intervals)
            found = [each for each in found if each[0].pipeline == size]
        else:
            found = [each for each in found if self._has_room(each[0])]
        if self.args.activation_cache_use == "always" and any(each.cached for each, _ in found):
            found, insists = [each for each in found if each[0].cached], True
        if not found:
            asked = f"a pipeline of {counted(size, 'rank')} and " if self._by_hand is not None else ""
            asked += f"microbatches of {counted(now.micro_batch_size, 'sample')}"
            return present, Outlook(before, before, f"{asked} cannot be arranged" if insists else None)
        wanted, after = min(found, key=lambda each: (each[1], each[0].pipeline, each[0].cached))
        if not (insists or needs_room) and (before - after) * batches_left <= self._cost_of_another_cut(present):
            return present, Outlook(before, before)
        return self._ordered(wanted, present), Outlook(before, after)

    def _cost_of_another_cut(self, present: Arrangement) -> float:
        """The cost of another split in seconds.

        If layers freeze, the run changes anyway, and only moving the state costs.
        """
        if present == self.args.arrangement:
            return self.seconds_of_change
        links = self._links or LinkTimes()
        return links.of_transfer(max(map(state_bytes, self._memory(self.args.arrangement))))

    def _has_room(self, wanted: Arrangement) -> bool:
        """Whether an arrangement keeps to the memory limits, during the change and after it.

        No rank may need more memory, with activations, than the largest rank of the first arrangement.
        """
        if self._bytes(wanted) > self._limit():
            return False
        return self._bytes_within(wanted) <= self._device_bytes

    def _bytes_within(self, wanted: Arrangement) -> float:
        """The largest number of bytes of any process during the change to `wanted`."""
        before, after = map(self._memory_of_processes, (self.args.arrangement, wanted))
        return max(map(bytes_in_change, before, after))

    def _memory_of_processes(self, arrangement: Arrangement) -> list[RankMemory]:
        degrees, ranks = degrees_of(self._arranged(arrangement)), self._memory(arrangement)
        return [ranks[degrees.coordinates(each).stage] for each in range(degrees.world_size)]

    def _ordered(self, wanted: Arrangement, present: Arrangement) -> Arrangement:
        """The wanted arrangement, with a new order of ranks if its groups of ranks differ from the present groups."""
        if (wanted.pipeline, wanted.data) == (present.pipeline, present.data):
            return wanted
        wanted = replace(wanted, pipelines_in_a_row=False)
        if min(wanted.pipeline, wanted.data) == 1 or len({each.host for each in self._processes}) < 2:
            return wanted
        is_better = pipelines_in_a_row(self._arranged(wanted), self._processes)
        return replace(wanted, pipelines_in_a_row=is_better)

    def _as_it_is(self, now: Arrangement) -> Arrangement:
        """The arrangement `now` in its current split.

        A cache stays in use if all frozen layers are on the first rank and this rank also has trained layers.
        """
        return replace(now, cached=now.cached and 0 < now.num_frozen < now.layers_of_rank[0])

    def _is_to_be_cached(self, now: Arrangement) -> bool:
        """Whether to read the output of the frozen layers from the cache: if the user demands it or if it is faster."""
        args = self.args
        if args.activation_cache is None or not now.num_frozen:
            return False
        if self._disk_seconds().read == math.inf:  # the folder cannot be written; a warning was logged
            return False
        if args.activation_cache_use == "always":
            return True
        computing = sum(self._times.forward[: now.num_frozen])
        return reading_pays(self._disk_seconds().read, computing)

    def _disk_seconds(self) -> CacheSeconds:
        """The seconds to read and write a sample on the cache's disk, measured once."""
        if self._disk is None:
            self._disk = measure(self.args.activation_cache, self._output_bytes())
        return self._disk

    def _output_bytes(self) -> int:
        """The bytes that one stage sends to the next for a sample."""
        args = self.args
        width = args.hidden_size * from_flags.activation_setting(args).residual_bytes
        return args.seq_length * width // (args.tensor_model_parallel_size if args.sequence_parallel else 1)

    def _gradient_bytes(self, args: TrainConfig) -> float:
        """The bytes of a layer's gradients."""
        own = layer_parameters(from_flags.architecture(args), args.tensor_model_parallel_size)
        return from_flags.training_state(args).gradients(own, num_buffers=1)

    def _expected(self, arrangement: Arrangement, batches_left: int) -> float | None:
        """The expected seconds of a batch, as in `_seconds`, averaged over the rest of the run.

        With a new cache, the first epoch finds no outputs, or only outputs of the previous depth, and it computes and
        writes. If more layers freeze later, the cached outputs are still read and only the newly frozen layers are
        computed, so the cache saves as much as before. If a deeper freeze makes the cache useless, its outputs count
        only until the next interval.
        """
        args = self.args
        reading, now = self._seconds(arrangement), args.arrangement
        goes_on = replace(arrangement, pipeline=now.pipeline, data=now.data, layers_of_rank=now.layers_of_rank) == now
        if reading is None or not arrangement.cached or goes_on:
            return reading
        if self._epoch is None:
            self._epoch = num_samples(args, "train")
        batches = batches_left
        if self._begins_anew_when_more_freeze() and arrangement.num_frozen < args.num_layers - 1:
            batches = min(batches_left, args.freeze_interval)
        missing = 1.0 - self._share_that_is_read(arrangement, batches)
        goes_deeper = now.cached and now.micro_batch_size == arrangement.micro_batch_size
        first = self._seconds(arrangement, num_stored=min(now.num_frozen, arrangement.num_frozen) if goes_deeper else 0)
        return missing * (first or reading) + (1 - missing) * reading

    def _begins_anew_when_more_freeze(self) -> bool:
        """Whether a deeper freeze makes the cache's content useless (`PrefixCache.read_older`)."""
        return self.args.freeze_training and (self.args.fp32_residual_connection or self._microbatches is not None)

    def _share_that_is_read(self, arrangement: Arrangement, batches: int) -> float:
        """The expected share of microbatches with all samples cached, in the first `batches` batches at a depth.

        Samples are distributed anew in each epoch, and a node has only outputs that it has computed itself. So with n
        nodes, a sample is missing after e epochs with probability (1 - 1/n)^e.
        """
        epoch = -(-self._epoch // batch_size(self.args, arrangement))
        hosts = self._hosts_of_prefix(arrangement)
        read = 0.0
        for number in range(-(-batches // epoch)):
            found = 1.0 - (1.0 - 1.0 / hosts) ** number
            read += min(epoch, batches - number * epoch) * found**arrangement.micro_batch_size
        return read / max(1, batches)

    def _hosts_of_prefix(self, arrangement: Arrangement) -> int:
        """The number of nodes with a first stage."""
        if not self._processes:
            return 1
        degrees = degrees_of(self._arranged(arrangement))
        first = (each for each in range(degrees.world_size) if degrees.coordinates(each).stage == 0)
        return len({self._processes[each].host for each in first})

    def _candidates(self, now: Arrangement) -> list[Arrangement]:
        """The possible arrangements, one for each possible number of pipeline ranks."""
        world = now.pipeline * now.data
        sizes = range(self.args.first_arrangement.pipeline, 0, -1) if self.args.elastic_pipeline else [now.pipeline]
        times = self._times if self._by_hand is None else self._counted  # the user's ranks: no measured times
        work = [
            forward + (0.0 if layer < now.num_frozen else backward)
            for layer, (forward, backward) in enumerate(zip(times.forward, times.backward, strict=True))
        ]
        found = []
        in_front = now.num_frozen if now.cached else 0
        for size in (each for each in sizes if world % each == 0 and each <= len(work) - in_front):
            shape = replace(now, pipeline=size, data=world // size, layers_of_rank=(len(work), *(0,) * (size - 1)))
            own = work[in_front:]
            own[0] += self._disk_seconds().read if now.cached else 0.0
            first, *others = self._cut(own, shape)
            each = replace(shape, layers_of_rank=(in_front + first, *others))
            if self._arranged(each) is not None:
                found.append(each)
        return found

    def _cut(self, work: list[float], shape: Arrangement) -> tuple[int, ...]:
        """The most even split that fits into memory; the most even of all if none fits or the user gave the ranks."""
        size, num_layers = shape.pipeline, self.args.num_layers
        if self.args.elastic_cut == "greedy":
            return cut_greedily(work, size)
        if self._by_hand is not None:
            return cut_exactly(work, size)
        in_front = num_layers - len(work)
        like = replace(self.args, data_parallel_size=shape.data, micro_batch_size=shape.micro_batch_size)
        model, state = from_flags.architecture(like), from_flags.training_state(like)
        activations = Activations(model, from_flags.activation_setting(like))
        tensor, delay = like.tensor_model_parallel_size, 1 + (PRESETS[like.pipeline_schedule].policy.delay or 0)
        samples = shape.data * shape.micro_batch_size
        held_at_once = most_saved(like.pipeline_schedule, size, max(1, batch_size(like, shape) // samples))
        layer, embedding = layer_parameters(model, tensor), embedding_parameters(model, tensor)
        head = head_parameters(model, tensor, holds_embedding=False)

        def fits(rank: int, begin: int, end: int) -> bool:
            first, last = in_front + begin, in_front + end
            frozen = max(0, min(last, shape.num_frozen) - first) + (in_front if rank == 0 else 0)
            trained = last - max(first, shape.num_frozen)
            own = max(0, trained) * layer + head * (last == num_layers)
            if rank == 0 and not shape.num_frozen:
                own += embedding
            kept = frozen * layer + (embedding if rank == 0 and shape.num_frozen else 0)
            saved = activations.saved(max(0, trained), is_first=False, is_last=last == num_layers) * held_at_once[rank]
            held = state.weights(own, num_versions=delay) + state.gradients(own, num_buffers=delay)
            matrices = matrix_parameters(model, tensor, max(0, trained))
            held += state.optimizer(own, num_versions=delay, matrices=matrices) + kept * state.weight_bytes
            return held + saved <= self._limit()

        return cut_that_fits(work, size, fits) or cut_exactly(work, size)

    def _arranged(self, arrangement: Arrangement) -> TrainConfig | None:
        """The configuration of the job in an arrangement; None if the arrangement is impossible."""
        try:
            return arranged(self.args, arrangement)
        except ValueError:
            return None

    def _seconds(self, arrangement: Arrangement, *, num_stored: int | None = None) -> float | None:
        """The simulated seconds of as many samples as a batch has now; None if the arrangement is impossible.

        `num_stored`: the argument of `pipelines`, for a cached arrangement.
        """
        args = self._arranged(arrangement)
        if args is None:
            return None
        cached, samples = arrangement.cached, arrangement.micro_batch_size
        disk = self._disk_seconds() if cached else None
        forward, backward = (
            tuple(samples * each for each in times) for times in (self._times.forward, self._times.backward)
        )
        links, sent = self._links or LinkTimes(), samples * self._output_bytes()
        layers = Layers(
            forward, backward, read=disk.read * samples if disk else None, write=disk.put * samples if disk else 0.0,
            occupation=links.of_transfer(sent), latency=links.message, norm=links.of_message(args.world_size),
            reduce=links.of_reduction(self._gradient_bytes(args)),
        )  # fmt: skip
        first, *others = arrangement.layers_of_rank
        found = pipelines(
            layers, arrangement.num_frozen, world=arrangement.pipeline * arrangement.data,
            num_microbatches=max(args.batch_sizes.all_num_microbatches()) * arrangement.data,
            preset=args.pipeline_schedule, cached=cached, num_stored=num_stored,
            layers_of_rank=(first - (arrangement.num_frozen if cached else 0), *others),
        )  # fmt: skip
        return (
            found[0].seconds * batch_size(args, self.args.arrangement) / batch_size(args, arrangement)
            if found
            else None
        )

    def _limit(self) -> float:
        if self._most_bytes is None:
            self._most_bytes = self._bytes(self.args.first_arrangement)
        return self._most_bytes

    def _bytes(self, arrangement: Arrangement) -> float:
        return max(each.total for each in self._memory(arrangement))

    def _memory(self, arrangement: Arrangement) -> tuple[RankMemory, ...]:
        """The memory of a pipeline's ranks, computed once per arrangement, since it requires the proof of a program."""
        if arrangement not in self._memories:
            self._memories[arrangement] = memory_of_ranks(self._arranged(arrangement))
        return self._memories[arrangement]

    def state_dict(self) -> dict[str, Any]:
        """The state of the choice that a checkpoint must save, as plain numbers."""
        return {
            "num_intervals": self._num_intervals,
            "forward": list(self._times.forward),
            "backward": list(self._times.backward),
            "seconds_of_change": self.seconds_of_change,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_intervals = int(state["num_intervals"])
        self._times.forward, self._times.backward = list(state["forward"]), list(state["backward"])
        self.seconds_of_change = float(state["seconds_of_change"])
