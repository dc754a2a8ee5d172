"""Bytes on the device and on the host of a rank whose weights, gradients and optimizer are in host memory (L2L).

L2L (Pudipeddi et al., 2020, section 3.1) holds the weights of two layers and a stash of inputs on the device. Here a
rank has stages of n_s parameters, K of which are resident, and batches of m microbatches with inputs of a bytes each:

    device   weights       the arena of K neighbours (`lane_order.places`): for K = 2 the largest n_s + n_(s+1)
             gradients     two buffers of the largest stage, or one if the rank has one stage
             inputs        m a for each stage but the first, whose inputs are tokens; the inputs in flight for the
                           last stage; and m a between two stages. With the stash on the host: m + 3 inputs
                           (`most_boundaries`) at any depth, or on several ranks 3, or the inputs in flight at the
                           turn. The checker counts the same inputs
    host     a parameter   weight, gradient, FP32 masters of 16-bit weights, moments: 16 bytes in FP32, 18 in 16
                           bits, or 16 with 16-bit gradients, plus FP32 copies of the gradients of one stage
             stash         m a for each stage whose inputs leave: all but the first and those of the turn

On several ranks the outputs of the last rank's stage wait until the first rank reaches its next stage, and gradients
wait likewise in the other direction: about m - p + 1 tensors.
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
    """Bytes of host memory of one rank. `optimizer`: masters, FP32 copies of gradients, moments."""

    weights: float
    gradients: float
    optimizer: float
    stash: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def resident_weights(state: TrainingState, parameters: Sequence[int], num_resident: int) -> float:
    """Bytes of device memory for the weights of a rank if `num_resident` consecutive stages are there at once.

    `parameters`: the number of parameters of each stage of the rank, in the order in which the rank runs them.

    The padding of each tensor to 64 bytes is not counted; tensors of the usual shapes need none.
    """
    return state.weights(places(parameters, num_resident)[1], num_versions=1)


def gradient_buffers(state: TrainingState, parameters: Sequence[int]) -> float:
    """Bytes of the gradient buffers on the device."""
    return state.gradients(max(parameters), num_buffers=min(GRADIENT_BUFFERS, len(parameters)))


def device_inputs(rank: int, boundary: float, demand: Demand, hosting: Hosting) -> float:
    """Bytes of the inputs of stages, and of their gradients, that wait on a rank's device."""
    m, p, stages = hosting.num_microbatches, demand.num_ranks, demand.stages_of(rank)
    count = demand.boundaries[rank]
    if p > 1 and len(stages) > 1 and rank in (demand.rank_of_stage[0], demand.rank_of_stage[-1]):
        count += max(0, m - p + 1)  # sent but not received yet
    return count * boundary


def host_parts(
    rank: int,
    boundary: float,
    state: TrainingState,
    parameters: Sequence[int],
    matrices: int,
    rank_of_stage: Sequence[int],
    hosting: Hosting,
) -> HostParts:
    """Bytes of host memory of a rank.

    `parameters`: the number of parameters of each stage of the rank. `matrices`: how many of these parameters belong to
    matrices of layers.
    """
    num_parameters = sum(parameters)
    leaving = _leaving(stages_of(rank_of_stage, rank), len(rank_of_stage) - 1, max(rank_of_stage) + 1)
    stashed = len(leaving) * hosting.num_microbatches * boundary if hosting.stash == HOST else 0.0
    return HostParts(
        weights=state.weights(num_parameters, num_versions=1),
        gradients=state.gradients(num_parameters, num_buffers=1),
        optimizer=state.optimizer(num_parameters, num_versions=1, matrices=matrices, stepped=max(parameters)),
        stash=stashed,
    )


def _leaving(own: Sequence[int], last: int, num_ranks: int) -> list[int]:
    """The stages of a rank whose inputs go to a stash on the host.

    The first stage is left out, since its inputs are tokens. So is the last stage of each rank, where the relay turns
    around.
    """
    return [stage for stage in own if 0 < stage <= last - num_ranks]
