"""Weights, gradients and optimizer in the host's memory (L2L): what a rank needs on its device, and of its host.

L2L (Pudipeddi et al., 2020, section 3.1) holds two layers' weights and a stash of inputs on the device. Here, of a rank
with stages of n_s parameters, K of which are resident, and batches of m microbatches whose inputs have a bytes each:

    device   weights       the arena of K neighbours (arena.places): for K = 2 the largest n_s + n_(s+1)
             gradients     two buffers of the largest stage, one where there is one stage
             inputs        m a for each stage but the first, whose inputs are tokens, and the last one, with what is
                           in flight there; and m a between two stages. With the stash on the host m + 3 in
                           all (`most_boundaries`), at any depth; on several ranks 3, or what is in flight at the
                           turn. All of it is as the checker counts it
    host     a parameter   weight, gradient, FP32 masters of 16-bit weights, moments: 16 bytes in FP32, 18 in 16
                           bits, 16 where gradients have 16 bits, too, with FP32 copies of those of a stage
             stash         m a for each stage whose inputs leave: all but the first, and those of the turn

On several ranks the outputs of the last rank's stage wait for the first rank to come to its next one, and gradients
the other way round: about m - p + 1 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.pipeline.program.edges import stages_of
from megatron.pipeline.program.lane_order import DEVICE, GRADIENT_BUFFERS, HOST, places
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.parameters import TrainingState


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """The settings of weights that live on the host.

    Attributes:
        stages: K, the most stages of a rank whose weights are on the device at once.
        stash: where inputs wait for their recompute, `device` or `host`.
        num_microbatches: m, the microbatches of a batch.
    """

    stages: int = 2
    stash: str = DEVICE
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class HostParts:
    """Bytes of the host's memory that one rank takes. `optimizer`: masters, FP32 copies of gradients, moments."""

    weights: float
    gradients: float
    optimizer: float
    stash: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def resident_weights(state: TrainingState, parameters: Sequence[int], num_resident: int) -> float:
    """Bytes of the device's arena for stages of so many parameters, in the rank's order.

    The runtime begins each tensor at a multiple of 64 bytes, which in the usual shapes they are by themselves.
    """
    return state.weights(places(parameters, num_resident)[1], num_versions=1)


def gradient_buffers(state: TrainingState, parameters: Sequence[int]) -> float:
    """Bytes of the device's gradient buffers."""
    return state.gradients(max(parameters), num_buffers=min(GRADIENT_BUFFERS, len(parameters)))


def device_inputs(rank: int, boundary: float, demand: Demand, hosting: Hosting) -> float:
    """Bytes of the inputs of stages, and of their gradients, that wait on a rank's device."""
    m, p, stages = hosting.num_microbatches, demand.num_ranks, demand.stages_of(rank)
    count = demand.boundaries[rank]
    if p > 1 and len(stages) > 1 and rank in (demand.rank_of_stage[0], demand.rank_of_stage[-1]):
        count += max(0, m - p + 1)  # sent, and not received yet
    return count * boundary


def host_parts(
    rank: int,
    boundary: float,
    state: TrainingState,
    parameters: Sequence[int],
    rank_of_stage: Sequence[int],
    hosting: Hosting,
) -> HostParts:
    """Bytes of the host's memory for a rank with stages of so many parameters."""
    num_parameters = sum(parameters)
    leaving = _leaving(stages_of(rank_of_stage, rank), len(rank_of_stage) - 1, max(rank_of_stage) + 1)
    stashed = len(leaving) * hosting.num_microbatches * boundary if hosting.stash == HOST else 0.0
    return HostParts(
        weights=state.weights(num_parameters, num_versions=1),
        gradients=state.gradients(num_parameters, num_buffers=1),
        optimizer=state.optimizer(num_parameters, num_versions=1, stepped=max(parameters)),
        stash=stashed,
    )


def _leaving(own: Sequence[int], last: int, num_ranks: int) -> list[int]:
    """The stages whose inputs go to the host, where the stash is: neither tokens nor those of the ranks' last stages,
    where the relay turns around.
    """
    return [stage for stage in own if 0 < stage <= last - num_ranks]
