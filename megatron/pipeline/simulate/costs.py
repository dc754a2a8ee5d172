"""The costs of the instructions of a program.

Times are in seconds and sizes in bytes, so that the numbers of a profile or an emulated stage can be used directly. The
simulator does not depend on the unit, though; drawings of the paper's figures use the time of a forward as the unit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.program.instruction import Kind

PerStage = float | Sequence[float]  # one number for all, or one for each stage (or edge)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in seconds, bytes and bytes per second; one number for all stages, or a sequence with one for each.

    Edges are those of the program in ascending order; in a chain, edge e lies between stages e and e+1.

    Attributes:
        forward, backward: time of one microbatch through one stage. In the paper's figures a backward takes twice as
            long as a forward.
        backward_input, backward_weight: times of the halves of a split backward, I and W. By default I takes half of
            `backward` and W the rest; both together may take longer than a whole backward.
        recompute: time of a recompute; default: `forward`.
        step: time of the optimizer step of a stage; the STEP of a rank with several stages takes the sum.
        predict: time of the provisional step of a stage; default: `step`.
        hold: time to copy a stage's gradients for a prediction.
        latency: per edge, time from the end of the sending to the arrival, in both directions.
        bandwidth: per edge and direction.
        forward_bytes: per edge, bytes of an activation.
        backward_bytes: per edge, bytes of the gradient of an activation; default: `forward_bytes`.
        overlap: whether transfers run beside computations. If not, a SEND also occupies its rank for as long as the
            transfer occupies its edge.
        evict, load: time for which a move of the saved activations of a microbatch away from a stage, or back to it,
            occupies its pair; default of `load`: `evict`.
        reduce_grad: time of the reduction of a stage's gradients, whole or partial; the reduction of a rank with
            several stages takes the sum, unless its weights live on the host.
        offload, reload: with inputs on the host, time for which the copy of a microbatch's input to the host, or back
            to its stage, occupies its lane; default of `reload`: `offload`.
        fetch, store, update: with weights on the host, times for which the copy of a stage's weights to the device, the
            copy of its gradients to the host, and its update by the host's optimizer occupy their lanes.
        reduce_embed, reduce_norm: times of these reductions after all members have reached them; the reduction of
            partial embeddings takes `reduce_embed`, too.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    backward_input: PerStage | None = None
    backward_weight: PerStage | None = None
    recompute: PerStage | None = None
    step: PerStage = 0.0
    predict: PerStage | None = None
    hold: PerStage = 0.0
    latency: PerStage = 0.0
    bandwidth: PerStage = math.inf
    forward_bytes: PerStage = 0.0
    backward_bytes: PerStage | None = None
    overlap: bool = True
    evict: PerStage = 0.0
    load: PerStage | None = None
    reduce_grad: PerStage = 0.0
    reduce_embed: float = 0.0
    reduce_norm: float = 0.0
    fetch: PerStage = 0.0
    store: PerStage = 0.0
    update: PerStage = 0.0
    offload: PerStage = 0.0
    reload: PerStage | None = None

    def seconds(self, num_stages: int) -> dict[Kind, list[float]]:
        """Kind -> seconds at each stage, for computations, updates, reductions, moves and words of the host.

        A move has the kind of its evicting end.

        Raises:
            ValueError: for a sequence of another length, and for a negative or non-finite number.
        """
        backward = spread("backward", self.backward, num_stages)
        of_input, of_weight = self._halves(backward)
        forward = spread("forward", self.forward, num_stages)
        evict = spread("evict", self.evict, num_stages)
        load = evict if self.load is None else spread("load", self.load, num_stages)
        offload = spread("offload", self.offload, num_stages)
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: backward,
            Kind.BACKWARD_INPUT: of_input,
            Kind.BACKWARD_WEIGHT: of_weight,
            Kind.RECOMPUTE: forward if self.recompute is None else spread("recompute", self.recompute, num_stages),
            Kind.EVICT: evict,
            Kind.LOAD: load,
            Kind.OFFLOAD: offload,
            Kind.RELOAD: offload if self.reload is None else spread("reload", self.reload, num_stages),
            Kind.STEP: spread("step", self.step, num_stages),
            Kind.PREDICT: spread("predict", self.step if self.predict is None else self.predict, num_stages),
            Kind.HOLD: spread("hold", self.hold, num_stages),
            Kind.REDUCE_GRAD: spread("reduce_grad", self.reduce_grad, num_stages),
            Kind.REDUCE_EMBED: spread("reduce_embed", self.reduce_embed, num_stages),
            Kind.REDUCE_NORM: spread("reduce_norm", self.reduce_norm, num_stages),
            Kind.REDUCE_PARTIAL: spread("reduce_grad", self.reduce_grad, num_stages),
            Kind.FETCH: spread("fetch", self.fetch, num_stages),
            Kind.FREE: [0.0] * num_stages,
            Kind.STORE_GRAD: spread("store", self.store, num_stages),
            Kind.UPDATE: spread("update", self.update, num_stages),
            Kind.REDUCE_PARTIAL_EMBED: spread("reduce_embed", self.reduce_embed, num_stages),
        }

    def _halves(self, backward: list[float]) -> tuple[list[float], list[float]]:
        """The times of I and W. A missing one is the rest of the backward; if both are missing, each is half of it."""
        given = {
            name: spread(name, value, len(backward))
            for name in ("backward_input", "backward_weight")
            if (value := getattr(self, name)) is not None
        }
        if len(given) == 2:
            return given["backward_input"], given["backward_weight"]
        name, part = next(iter(given.items()), ("backward_input", [time / 2 for time in backward]))
        rest = [whole - each for each, whole in zip(part, backward, strict=True)]
        if min(rest, default=0.0) < 0:
            raise ValueError(f"{name} is a part of backward, so it cannot be longer; give a smaller one, or both parts")
        return (part, rest) if name == "backward_input" else (rest, part)

    def edges(self, num_edges: int) -> tuple[list[float], list[float], list[float]]:
        """Per edge: seconds for which an activation and a gradient occupy it, and the latency.

        Raises ValueError if `seconds` does, and for a bandwidth that is not positive.
        """
        bandwidth = self.bandwidth if isinstance(self.bandwidth, Sequence) else [self.bandwidth] * num_edges
        if len(bandwidth) != num_edges or not all(value > 0 for value in bandwidth):
            raise ValueError(
                f"bandwidth is {self.bandwidth}; give a positive number of bytes/s, or one for each of the {num_edges}"
            )
        forward = spread("forward_bytes", self.forward_bytes, num_edges)
        backward = forward if self.backward_bytes is None else spread("backward_bytes", self.backward_bytes, num_edges)
        occupation = [
            [size / rate for size, rate in zip(sizes, bandwidth, strict=True)] for sizes in (forward, backward)
        ]
        return occupation[0], occupation[1], spread("latency", self.latency, num_edges)


def spread(name: str, value: PerStage, count: int) -> list[float]:
    """The cost `value` as a list of `count` numbers, for each stage or edge.

    Raises ValueError, with the cost's name, for another number of values, and for negative or non-finite ones.
    """
    values = [float(item) for item in value] if isinstance(value, Sequence) else [float(value)] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers; give one for all, or one for each of {count}")
    if not all(math.isfinite(item) and item >= 0 for item in values):
        raise ValueError(f"{name} is {value}; give finite numbers of 0 and more")
    return values
