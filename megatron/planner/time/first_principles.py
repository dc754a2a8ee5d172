"""Costs from the shapes of tensors and a data sheet, with few calibrated constants."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise

from megatron.pipeline.placement.mapping import NAMED
from megatron.pipeline.placement.optimize import optimized
from megatron.pipeline.placement.traffic import MessageCounts, Traffic, ends_of, exchanged
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import SLOWEST_NVLINK
from megatron.planner.job.software import FLEX, MEGATRON_CORE, Software
from megatron.planner.memory.activations import Activations, by_stage
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.node_memory import crowds_by_name, fewest_sharing
from megatron.planner.memory.parameters import (
    FP8_COPY_BYTES,
    LAST_UPDATE_BYTES,
    stage_expert_parameters,
    stage_matrices,
    stage_parameters,
)
from megatron.planner.time.calibration import Constants, default_constants
from megatron.planner.time.expert_work import ExpertLayerWork
from megatron.planner.time.links import Links, Rates, Ring, gathers_shown, num_buckets, reductions_shown
from megatron.planner.time.microbatch_flow import moving_parts
from megatron.planner.time.traffic import CutModel
from megatron.planner.time.work import Joining, LayerWork, Work

Works = tuple[LayerWork, LayerWork | None]
"""The work of a layer without experts, and of a layer with experts if the model has such layers."""
Pieces = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
"""(forward, backward) seconds of the embedding, a layer and the head."""


class FirstPrinciples:
    """A `CostModel` from tensor shapes and a data sheet. `LayerWork` counts the work; some `Constants` are fitted.

    Args:
        model: the shape of the model.
        cluster: the cluster with the rates of its GPUs and links.
        software: the software that trains.
        constants: the constants of the time model (default: `default_constants`).
    """

    def __init__(
        self,
        model: Architecture,
        cluster: Cluster,
        software: Software = MEGATRON_CORE,
        constants: Constants | None = None,
    ) -> None:
        self.model, self.cluster, self.software = model, cluster, software
        self.constants = constants or default_constants()
        self._links: dict[tuple, Links] = {}
        self._works: dict[tuple, tuple[LayerWork, LayerWork | None]] = {}
        self._others: dict[Software, FirstPrinciples] = {}

    def calibrated(self, constants: Constants) -> "FirstPrinciples":
        """Return this cost model with other constants."""
        other = copy(self)
        other.constants, other._others = constants, {}
        return other

    @property
    def pressed_efficiency(self) -> float:
        return self.constants.pressed_efficiency

    def _trained_by(self, software: Software) -> "FirstPrinciples":
        """Return this cost model with other software."""
        if software not in self._others:
            other = FirstPrinciples(self.model, self.cluster, software, self.constants)
            self._others[software] = other
        return self._others[software]

    def costs(self, configuration: Configuration, layers: Sequence[int]) -> Costs:
        software = self.software.of(configuration)
        if software is not self.software:
            return self._trained_by(software).costs(configuration, layers)
        works = self._works_of(configuration)
        work = works[0]
        schedule = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding)
        links = self._links_of(configuration, layers, schedule)
        forward = self._of_layers(layers, works, links, lambda each: each.forward)
        backward = self._of_layers(
            layers, works, links, lambda each: each.backward + each.recomputed(configuration.recompute)
        )
        outputs = 1 + self.model.num_further
        for stage, ends, times in ((0, work.embedding, 1), (len(layers) - 1, work.head, outputs)):
            forward[stage] += times * self._seconds(ends[0], links)
            backward[stage] += times * self._seconds(ends[1], links)
        halves = self._halves(configuration, layers, works, links) if schedule.splits_backward else {}
        boundary = self._boundary(configuration)
        rates = [self._rate(*ends, links) for ends in pairwise(schedule.rank_of_stage)]
        if not self.software.overlaps_transfers:
            for edge, rate in enumerate(rates):
                for stage in (edge, edge + 1):
                    forward[stage] += boundary / rate / 2
                    backward[stage] += boundary / rate / 2
                    if halves:
                        halves["backward_input"][stage] += boundary / rate / 2
        step, reduce = self._updates(configuration, schedule, layers, links, forward=forward, backward=backward)
        if configuration.is_hosted:
            step = [0.0] * len(layers)  # the host's optimizer steps
        predict, hold = self._predictions(configuration, layers, links)
        return Costs(
            forward=forward, backward=backward, **halves, step=step, predict=predict, hold=hold, reduce_grad=reduce,
            bandwidth=rates,
            forward_bytes=boundary if self.software.overlaps_transfers else 0.0,
            **self._hosted(configuration, layers),
            evict=self._moves(configuration, layers, links, schedule),
            reduce_embed=self._embedding(configuration, links, schedule),
        )  # fmt: skip

    def moves(
        self, configuration: Configuration, sizes: Sequence[float], ways: Collection[str]
    ) -> dict[str, list[float]]:
        """Return the seconds of moves as `CostModel.moves` does."""
        found = {}
        if "host" in ways:
            found["swap_out"] = [each / self._rates.to_host for each in sizes]
        if "pair" in ways:
            schedule = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding)
            links = self._links_of(configuration, (1,) * len(sizes), schedule)
            rates = [self._rates.of_link(links.pairs[rank], links) for rank in schedule.rank_of_stage]
            found["evict"] = [each / rate for each, rate in zip(sizes, rates, strict=True)]
        return found

    # --- without a pipeline

    def pieces(self, configuration: Configuration) -> Pieces:
        """Return the seconds of one microbatch's forward and backward through the embedding, a layer and the head."""
        return self._pieces(configuration, self._links_alone(configuration))

    def ring(self, configuration: Configuration, replicas: range) -> Ring:
        """Return the ring in which `replicas` gather or sum a buffer, while all other groups do the same."""
        links = self._links_alone(configuration)
        return Ring(
            size=len(replicas),
            num_nodes=links.num_nodes(replicas),
            rate=self._rates.of_link(links.among(replicas), links),
            has_nvlink=self.cluster.device.link_bandwidth >= SLOWEST_NVLINK,
        )

    def moved(self, num_bytes: float) -> float:
        """Return the seconds of kernels that read and write `num_bytes` in total."""
        return num_bytes / self._rates.memory

    def _links_alone(self, configuration: Configuration) -> Links:
        schedule = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding)
        return self._links_of(configuration, (self.model.num_layers,), schedule)

    # --- seconds

    def _of_layers(
        self, layers: Sequence[int], works: Works, links: Links, part: Callable[[LayerWork], Work]
    ) -> list[float]:
        """Return, by stage, the seconds of a part of the layers' work. Some layers may have experts."""
        plain, with_experts = works
        seconds = self._seconds(part(plain), links)
        if with_experts is None:
            found, last = [count * seconds for count in layers], seconds
        else:
            others = self._seconds(part(with_experts), links)
            counts = self.model.layers_with_experts(layers)
            found = [
                (count - of_these) * seconds + of_these * others for count, of_these in zip(layers, counts, strict=True)
            ]
            last = others if self.model.further_have_experts else seconds
        if self.model.further is None:
            return found
        each = last + self._seconds(part(Joining(plain)), links)
        further = self.model.further_of_stages(len(layers))
        return [count + more * each for count, more in zip(found, further, strict=True)]

    def _pieces(self, configuration: Configuration, links: Links) -> Pieces:
        work = self._works_of(configuration)[0]
        again = work.recomputed(configuration.recompute)
        return tuple(
            (self._seconds(forward, links), self._seconds(backward, links))
            for forward, backward in (work.embedding, (work.forward, work.backward + again), work.head)
        )

    def _halves(
        self, configuration: Configuration, layers: Sequence[int], works: Works, links: Links
    ) -> dict[str, list[float]]:
        """Return the seconds of I and W, by stage."""
        work, recompute = works[0], configuration.recompute
        found = {
            "backward_input": self._of_layers(
                layers, works, links, lambda each: each.backward_input + each.recomputed(recompute)
            ),
            "backward_weight": self._of_layers(layers, works, links, lambda each: each.backward_weight),
        }
        found["backward_input"][0] += self._seconds(work.embedding[1], links)
        for name, half in zip(found, work.head_halves, strict=True):
            found[name][-1] += (1 + self.model.num_further) * self._seconds(half, links)
        return found

    @property
    def _rates(self) -> Rates:
        return Rates(self.cluster.device, self.software, self.constants)

    def _seconds(self, work: Work, links: Links) -> float:
        return self._rates.seconds(work, links)

    def _works_of(self, configuration: Configuration) -> Works:
        """Return the work of a layer without experts and of a layer with experts, from a cache."""
        values = {
            "tensor": configuration.tensor, "micro_batch_size": configuration.micro_batch_size,
            "sequence_parallel": configuration.sequence_parallel, "context": configuration.context,
        }  # fmt: skip
        degrees = configuration.expert_degrees
        key = (*values.values(), degrees)
        if key not in self._works:
            plain, with_experts = LayerWork(self.model, self.software, **values), None
            if self.model.experts is not None:
                with_experts = ExpertLayerWork(self.model, self.software, degrees=degrees, **values)
            self._works[key] = plain, with_experts
        return self._works[key]

    # --- between ranks

    def _links_of(self, configuration: Configuration, layers: Sequence[int], schedule: Schedule) -> Links:
        degrees, name = configuration.degrees, configuration.rank_mapping
        traffic = self._traffic(configuration, layers, schedule) if name == "optimized" else None
        shares = configuration.context, configuration.expert_degrees
        key = (degrees, name, traffic, shares)
        if key not in self._links:
            topology = self.cluster.topology
            if topology.num_slots != degrees.world_size:
                raise ValueError(
                    f"the configuration takes {degrees.world_size} GPUs, the cluster has {topology.num_slots}; make "
                    "them equal"
                )
            mapping = optimized(degrees, traffic, topology) if traffic else NAMED[name](degrees)
            reached = self.model.experts.reached if self.model.experts and self.software.dispatcher == FLEX else None
            self._links[key] = Links(degrees, mapping, topology, context=shares[0], experts=shares[1], reached=reached)
        return self._links[key]

    def _traffic(self, configuration: Configuration, layers: Sequence[int], schedule: Schedule) -> Traffic:
        """Return the bytes that ranks of a pipeline send in an iteration, to optimize a mapping for them."""
        m, placement = configuration.num_microbatches, schedule.rank_of_stage
        crossing = Counter(ends for ends in pairwise(placement) if ends[0] != ends[1])
        counts = MessageCounts(
            num_microbatches=m,
            activations=exchanged({ends: count * m for ends, count in crossing.items()}, schedule.num_ranks),
            evictions=tuple(m * part * schedule.num_virtual_stages for part in moving_parts(schedule)),
            ends=ends_of(schedule),
        )
        setting = self.software.activation_setting(configuration)
        cut = CutModel(model=self.model, setting=setting, schedule=schedule, layers=layers)
        size, boundary = self.software.gradient_bytes, self._boundary(configuration)
        traffic = cut.traffic(counts, gradient_bytes=size, boundary=boundary)
        return replace(traffic, tensor=(0.0,) * configuration.pipeline)  # tensor ranks share a node in any mapping

    def _rate(self, source: int, target: int, links: Links) -> float:
        """Return the bytes per second from one rank of a pipeline to another."""
        return math.inf if source == target else self._rates.of_link(links.between(source, target), links)

    def _boundary(self, configuration: Configuration) -> float:
        setting = self.software.activation_setting(configuration)
        num_bytes = Activations(self.model, setting).boundary
        if self.software.splits_transfers and not setting.sequence_parallel:
            num_bytes /= configuration.tensor
        return num_bytes

    def _moves(
        self, configuration: Configuration, layers: Sequence[int], links: Links, schedule: Schedule
    ) -> list[float]:
        moved = zip(self._moved_bytes(configuration, layers), schedule.rank_of_stage, strict=True)
        return [num / self._rates.of_link(links.pairs[rank], links) for num, rank in moved]

    def _moved_bytes(self, configuration: Configuration, layers: Sequence[int]) -> list[float]:
        """Return, by stage, the bytes of a microbatch's saved activations; 0 if activations are not balanced."""
        if not configuration.preset.balance:
            return [0.0] * len(layers)
        activations = Activations(self.model, self.software.activation_setting(configuration))
        return by_stage(
            activations.saved, layers, self.model.layers_with_experts(layers), self.model.further_of_stages(len(layers))
        )

    def _embedding(self, configuration: Configuration, links: Links, schedule: Schedule) -> float:
        if not schedule.ties_ranks:
            return 0.0
        first, last = schedule.tied_ranks
        return self._embedding_bytes(configuration) / self._rate(last, first, links)

    def _embedding_bytes(self, configuration: Configuration) -> int:
        rows = self.model.vocabulary_size // configuration.tensor
        return rows * self.model.hidden_size * self.software.gradient_bytes

    # --- once an iteration

    def _updates(
        self, configuration: Configuration, schedule: Schedule, layers: Sequence[int], links: Links, *,
        forward: Sequence[float], backward: Sequence[float],
    ) -> tuple[list[float], list[float]]:  # fmt: skip
        """Return, by stage, the seconds of the optimizer's step and of the reduction over replicas.

        The step includes casts of new weights to FP8 and gathers of weights. Only reductions and gathers that
        computation does not hide count.
        """
        state = self.software.training_state(configuration)
        written = 0 if configuration.predicts else state.weight_bytes
        step, reduce, gather, buckets = [], [], [], []
        matrices = stage_matrices(self.model, configuration.tensor, layers, configuration.expert_degrees)
        orthogonal = self._orthogonalizations(configuration, layers, links)
        for stage, (own, count, once) in enumerate(self._counts(configuration, layers, links)):
            # Adam reads and writes master and moments. The norm and the step read gradients. The step writes weights,
            # unless they are predicted. Muon has one moment of a matrix.
            moved = own * (6 * 4 + 2 * state.gradient_bytes + written)
            if state.muon is not None:
                moved -= 2 * 4 * matrices[stage] * own / max(count, 1)
            step.append(moved / self._rates.memory + orthogonal[stage])
            # A ring sends a buffer once to sum it and once to spread it. A distributed optimizer spreads weights
            # instead, in STEP or, if weights are predicted, in PREDICT. Owners of whole parameters do so besides.
            gathered = state.gathered(count, matrices[stage]) if configuration.gathers_in_step else 0.0
            gather.append(once * gathered / count if count else 0.0)
            scatters = state.distributed_optimizer and not state.owns_parameters
            reduce.append(once * state.gradient_bytes * (1 if scatters else 2))
            buckets.append(num_buckets(count, configuration.replicas))
        if self.software.fp8:
            for stage, elements in enumerate(matrices):
                step[stage] += elements * (state.weight_bytes + FP8_COPY_BYTES) / self._rates.memory
        ranks, contention = schedule.rank_of_stage, self.constants.contention
        drains = schedule.weights.drains and not configuration.is_hosted  # programs overlap reductions on host lanes
        if self.software.overlaps_gradients and drains:
            reduce = reductions_shown(reduce, backward, buckets, ranks, contention)
        if self.software.overlaps_weights and drains:
            gather = gathers_shown(gather, forward, buckets, ranks, contention)
        return [sum(each) for each in zip(step, gather, strict=True)], reduce

    def _predictions(
        self, configuration: Configuration, layers: Sequence[int], links: Links
    ) -> tuple[list[float], list[float]]:
        """Return, by stage, the seconds of provisional steps (PREDICT) and of copies of gradients (HOLD).

        All are 0 without predictions. On a CPU torch's optimizers step. There PREDICT is one pass for master, both
        moments, the gradient and the weight of each element. It has the true step's master and moments in the cache,
        but its operators take about as long as reading them. The optimizers of Apex and Transformer
        Engine step on copies. There PREDICT has these passes: it reads master and moments and writes copies; it reads
        the gradient, widens and multiplies it; it steps the copies as Adam does; it reads the master's copy and writes
        the weight. With 32-bit gradients and 16-bit weights PREDICT moves 66 bytes per element, and STEP moves 32.

        Stages that clip by their own norm ("stage") read all gradients before. If replicas average, each reads only its
        shard. In FP16 all stages read the gradients to look for overflows. This is not counted, since it is not known
        here whether 16 bits mean FP16 or bfloat16. Error feedback copies the masters and takes the last update again.
        """
        if not configuration.predicts:
            return [0.0] * len(layers), [0.0] * len(layers)
        state = self.software.training_state(configuration)
        copies, adam, weight = 6 * 4, 7 * 4, 4 + state.weight_bytes
        gradient = state.gradient_bytes + 4 + (8 if state.gradient_bytes < 4 else 0)
        predict, hold = [], []
        one_pass = 3 * 4 + state.gradient_bytes + state.weight_bytes
        moved = one_pass if self.cluster.is_cpu else copies + gradient + adam + weight
        norm = state.gradient_bytes if configuration.provisional == "stage" else 0
        orthogonal = self._orthogonalizations(configuration, layers, links)
        if configuration.provisional_microbatches == 0:
            moved, orthogonal = LAST_UPDATE_BYTES + state.weight_bytes, [0.0] * len(layers)
        for stage, (own, count, once) in enumerate(self._counts(configuration, layers, links)):
            read = own if configuration.provisional_reduce and not state.owns_parameters else count
            predict.append((own * moved + read * norm) / self._rates.memory + orthogonal[stage])
            if state.distributed_optimizer:
                predict[-1] += once * state.weight_bytes
            hold.append(2 * count * state.gradient_bytes / self._rates.memory)
        return predict, hold

    def _orthogonalizations(self, configuration: Configuration, layers: Sequence[int], links: Links) -> list[float]:
        """Return, by stage, the seconds in which tensor ranks gather a step's matrices and Muon orthogonalises them.

        Where replicas own whole parameters, an owner has an even part, but at least the matrix that takes longest.
        """
        state = self.software.training_state(configuration)
        muon = state.muon
        if muon is None:
            return [0.0] * len(layers)
        seconds, longest = [], 0.0
        for has_experts in (False, True) if self.model.experts else (False,):
            work = muon.layer(self.model, configuration.tensor, configuration.expert_degrees, experts=has_experts)
            sent = work.gathered * (1 - 1 / configuration.tensor)
            seconds.append(
                self._rates.products(work.operations, work.calls, muon.element_bytes)
                + sent / self._rates.of_link(links.tensor, links, within=self.constants.tensor_efficiency)
            )
            longest = max(longest, seconds[-1] * work.longest / work.operations)
        with_experts, further = self.model.layers_with_experts(layers), self.model.further_of_stages(len(layers))
        last = seconds[-1 if self.model.further_have_experts else 0]  # without the matrix that joins two vectors
        whole = [
            (count - some) * seconds[0] + some * seconds[-1] + more * last
            for count, some, more in zip(layers, with_experts, further, strict=True)
        ]
        if not state.owns_parameters:
            return whole
        return [min(each, max(each / configuration.replicas, longest)) for each in whole]

    def _hosted(self, configuration: Configuration, layers: Sequence[int]) -> dict[str, list[float]]:
        """Return the costs of copies and updates of stages whose weights live on the host.

        The host's Adam reads gradient, master and moments, and writes master, moments and the weight in 16 bits.
        Replicas on a node share a store: each stores and steps its share. With `gathers_fetch` each also fetches only
        its share, and the replicas gather the rest over their links.
        """
        if not configuration.is_hosted:
            return {}
        state = self.software.training_state(configuration)
        rates = self._rates
        copy = 0 if state.weight_bytes == 4 else state.weight_bytes
        per_parameter = 1e-9 * self.cluster.optimizer_ns(6 * 4 + state.gradient_bytes + copy)
        counts = stage_parameters(self.model, configuration.tensor, layers)
        host_of_slot = self.cluster.host_of_slot
        share = 1 / fewest_sharing(crowds_by_name(configuration.degrees, configuration.rank_mapping, host_of_slot))
        per_byte = 1 / rates.to_host
        if configuration.gathers_fetch:
            per_byte = share / rates.to_host + (1 - share) / rates.to_neighbours
        return {
            "fetch": [count * state.weight_bytes * per_byte for count in counts],
            "store": [share * count * state.gradient_bytes / rates.to_host for count in counts],
            "update": [share * count * per_parameter for count in counts],
            "offload": [self._boundary(configuration) / rates.to_host] * len(counts),
        }

    def _counts(
        self, configuration: Configuration, layers: Sequence[int], links: Links
    ) -> list[tuple[float, int, float]]:
        """Return, by stage, the parameters that a replica steps, all its parameters, and the seconds of a ring.

        The seconds are those in which a ring spreads a buffer with one byte for each parameter.
        """
        state, degrees = self.software.training_state(configuration), configuration.expert_degrees
        d, link = configuration.replicas, self._rates.of_link(links.data, links)
        same, expert_link = configuration.expert_replicas, self._rates.of_link(links.expert_data, links)
        counts = stage_parameters(self.model, configuration.tensor, layers, degrees)
        of_experts = stage_expert_parameters(self.model, layers, degrees)
        found = []
        for count, experts in zip(counts, of_experts, strict=True):
            once = (d - 1) / d * (count - experts) / link + (same - 1) / same * experts / expert_link
            found.append((state.stepped(count, experts), count, once))
        return found
