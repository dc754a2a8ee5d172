"""Which arrangement a run continues in: how many ranks a pipeline has, and how many layers each rank has.

The candidates are the divisors of the number of ranks, at most as many as the pipeline had at first; the other ranks
are replicas. The batch stays, so each replica takes fewer microbatches, or it grows with the replicas
(`--elastic-batch`). Each candidate is cut by measured times, simulated with measured links, and priced by the planner
with the most memory that a rank had at first as its limit. The fastest one is taken if it repays the cost of the change
in the rest of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.documents import counted
from megatron.elastic.cache import CacheSeconds, measure, reading_pays
from megatron.elastic.cut import cut_exactly, cut_greedily, cut_that_fits
from megatron.elastic.pipelines import Layers, most_saved, pipelines
from megatron.elastic.stages import Arrangement
from megatron.pipeline.placement.topology import Process, this_process
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import control_group
from megatron.pipeline.schedules import PRESETS
from megatron.planner.memory.activations import Activations
from megatron.planner.memory.memory import RankMemory, estimate_memory
from megatron.planner.memory.parameters import embedding_parameters, head_parameters, layer_parameters
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
from megatron.trainer.plan.arrangement import Outlook, arranged, batch_size
from megatron.trainer.plan.from_flags import prove
from megatron.trainer.plan.rank_mapping import degrees_of, pipelines_in_a_row

if TYPE_CHECKING:
    from megatron.trainer.changes.prefix_cache import PrefixCache


def memory_of_ranks(args: TrainConfig, *, counts_communicators: bool = False) -> tuple[RankMemory, ...]:
    """The planner's memory of each rank of a pipeline of a job arranged as `args` say."""
    _, demand = prove(args)
    return estimate_memory(
        from_flags.architecture(args), from_flags.activation_setting(args), from_flags.training_state(args), demand,
        layers=args.arrangement.stages.layers, single_gradient_buffer=args.pipeline_2bw_single_gradient_buffer,
        counts_communicators=counts_communicators,
    )  # fmt: skip


def state_bytes(memory: RankMemory) -> float:
    """The bytes of a rank's weights, gradients and optimizer, without activations."""
    return memory.parts.weights + memory.parts.gradients + memory.parts.optimizer + memory.parts.step


def bytes_in_change(before: RankMemory, after: RankMemory) -> float:
    """The bytes of a process during a change: the state of both arrangements, without the gradients of the old one."""
    return state_bytes(before) - before.parts.gradients + state_bytes(after)


class ArrangementChoice:
    """Chooses the arrangement of one run.

    Args:
        processes: by rank; none: they are asked when they measure.
        device_bytes: of a rank's device, which holds the state of before and that of after while it changes.
        disk: seconds of the cache's folder; None: measured there.
        epoch: samples of one; None: as many as there are.

    Attributes:
        args: the present configuration of the run.
        seconds_of_change: what the last change took; until there was one, what it is expected to.
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
        """Measure the times of layers (from what the engine traced), hosts and links. Collective, drained.

        `cache`: what the run's reading and writing have taken.
        """
        if not self._processes:
            found: list = [None] * self.args.world_size
            dist.all_gather_object(found, this_process(), group=control_group())
            self._processes = tuple(found)
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
        """The arrangement to continue in, from `now`: the present one with the layers frozen that shall be frozen.
        `is_interval`: an interval ends here, which advances the lists that were given by hand."""
        self._num_intervals += is_interval
        present = self._as_it_is(now)
        before = self._expected(present, batches_left) or 0.0
        insists = self._by_hand is not None
        # layers that train again need their room back
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
        """Seconds. Where layers freeze the run changes anyway, so another cut costs only the way of its state."""
        if present == self.args.arrangement:
            return self.seconds_of_change
        links = self._links or LinkTimes()
        return links.of_transfer(max(map(state_bytes, self._memory(self.args.arrangement))))

    def _has_room(self, wanted: Arrangement) -> bool:
        """Whether no rank takes more memory than one did at first, with activations, and devices have room for the
        change."""
        if self._bytes(wanted) > self._limit():
            return False
        return self._bytes_within(wanted) <= self._device_bytes

    def _bytes_within(self, wanted: Arrangement) -> float:
        """The most bytes of a process during the change."""
        before, after = map(self._memory_of_processes, (self.args.arrangement, wanted))
        return max(map(bytes_in_change, before, after))

    def _memory_of_processes(self, arrangement: Arrangement) -> list[RankMemory]:
        degrees, ranks = degrees_of(self._arranged(arrangement)), self._memory(arrangement)
        return [ranks[degrees.coordinates(each).stage] for each in range(degrees.world_size)]

    def _ordered(self, wanted: Arrangement, present: Arrangement) -> Arrangement:
        """`wanted` with its rank mapping decided anew, where its groups of ranks differ from the present ones."""
        if (wanted.pipeline, wanted.data) == (present.pipeline, present.data):
            return wanted
        wanted = replace(wanted, pipelines_in_a_row=False)
        if min(wanted.pipeline, wanted.data) == 1 or len({each.host for each in self._processes}) < 2:
            return wanted
        is_better = pipelines_in_a_row(self._arranged(wanted), self._processes)
        return replace(wanted, pipelines_in_a_row=is_better)

    def _as_it_is(self, now: Arrangement) -> Arrangement:
        """`now` in its present cut. A cache stays in use if it can: newly frozen layers must lie on the first rank,
        too."""
        return replace(now, cached=now.cached and 0 < now.num_frozen < now.layers_of_rank[0])

    def _is_to_be_cached(self, now: Arrangement) -> bool:
        """Whether to read the output of the frozen layers from the cache: always, or where that is faster."""
        args = self.args
        if args.activation_cache is None or not now.num_frozen:
            return False
        if self._disk_seconds().read == math.inf:  # its folder cannot be written, as was warned
            return False
        if args.activation_cache_use == "always":
            return True
        computing = sum(self._times.forward[: now.num_frozen])
        return reading_pays(self._disk_seconds().read, computing)

    def _disk_seconds(self) -> CacheSeconds:
        """The seconds of a sample on the cache's disk, measured once."""
        if self._disk is None:
            self._disk = measure(self.args.activation_cache, self._output_bytes())
        return self._disk

    def _output_bytes(self) -> int:
        """The bytes of a sample between two stages."""
        args = self.args
        width = args.hidden_size * from_flags.activation_setting(args).residual_bytes
        return args.seq_length * width // (args.tensor_model_parallel_size if args.sequence_parallel else 1)

    def _gradient_bytes(self, args: TrainConfig) -> float:
        """The bytes of a layer's gradients."""
        own = layer_parameters(from_flags.architecture(args), args.tensor_model_parallel_size)
        return from_flags.training_state(args).gradients(own, num_buffers=1)

    def _expected(self, arrangement: Arrangement, batches_left: int) -> float | None:
        """As `_seconds`, the mean over what is left of the run. Of a cache that begins anew the first epoch finds
        nothing, or what the depth before has put out: it computes and writes. When more layers freeze, what there is
        goes on being read and the new layers alone are computed, so it saves as much then; where a cache has to begin
        anew with them, what it has holds until they may freeze.
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
        """The share of microbatches whose samples were all there, in so many batches from a depth's first on.

        Samples are dealt out anew in each epoch, and a node has what it has computed itself. So on n nodes a sample is
        missing behind e epochs with a chance of (1 - 1/n)^e.
        """
        epoch = -(-self._epoch // batch_size(self.args, arrangement))
        hosts = self._hosts_of_prefix(arrangement)
        read = 0.0
        for number in range(-(-batches // epoch)):
            found = 1.0 - (1.0 - 1.0 / hosts) ** number
            read += min(epoch, batches - number * epoch) * found**arrangement.micro_batch_size
        return read / max(1, batches)

    def _hosts_of_prefix(self, arrangement: Arrangement) -> int:
        """The number of nodes that have a first stage."""
        if not self._processes:
            return 1
        degrees = degrees_of(self._arranged(arrangement))
        first = (each for each in range(degrees.world_size) if degrees.coordinates(each).stage == 0)
        return len({self._processes[each].host for each in first})

    def _candidates(self, now: Arrangement) -> list[Arrangement]:
        """An arrangement for each number of ranks in which the job can be arranged."""
        world = now.pipeline * now.data
        sizes = range(self.args.first_arrangement.pipeline, 0, -1) if self.args.elastic_pipeline else [now.pipeline]
        times = self._times if self._by_hand is None else self._counted  # by hand a run is the same every time
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
        """The most even cut in which all ranks have room; by hand, or where no cut has room, the most even one."""
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
            held += state.optimizer(own, num_versions=delay) + kept * state.weight_bytes
            return held + saved <= self._limit()

        return cut_that_fits(work, size, fits) or cut_exactly(work, size)

    def _arranged(self, arrangement: Arrangement) -> TrainConfig | None:
        """The arguments of a job in this arrangement; None where the arrangement is impossible."""
        try:
            return arranged(self.args, arrangement)
        except ValueError:
            return None

    def _seconds(self, arrangement: Arrangement, *, num_stored: int | None = None) -> float | None:
        """Simulated seconds of as many samples as a batch has now; None where the arrangement is impossible.

        `num_stored`: as of `pipelines`, where the arrangement is cached.
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
        """The memory of a pipeline's ranks; counted once, since a program is proved for that."""
        if arrangement not in self._memories:
            self._memories[arrangement] = memory_of_ranks(self._arranged(arrangement))
        return self._memories[arrangement]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain numbers."""
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
