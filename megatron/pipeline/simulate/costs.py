"""What the instructions of a program cost.

Times are in seconds and sizes in bytes, so that the costs of a simulation are the numbers that a profile or an
emulated stage has; nothing in the simulator knows the unit, though, and drawings of the paper's figures count in
forwards.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.pipeline.program.instruction import WORDS, Kind

PerStage = float | Sequence[float]  # one number for all, or one for each stage (or edge)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, bytes and bytes per second; a number for all stages, or a sequence with one for each. Edges are those of
        the program, ascending; of a chain, edge e lies between stages e and e+1.

    Attributes:
        forward, backward: of one microbatch through one stage. The paper's figures take a backward for twice a
            forward.
        backward_input, backward_weight: the halves of a split backward, I and W. By default the one is half of
            `backward`, and the other the rest; both together may take longer than a whole one.
        recompute: default as long as a forward.
        step: the optimizer step of a stage; the STEP of a rank with several stages takes their sum.
        predict: the provisional step of a stage; default as long as `step`.
        hold: of keeping a stage's gradients as they are.
        latency: per edge, from the end of the sending to the arrival; both directions.
        bandwidth: per edge and direction.
        forward_bytes: of an activation, per edge.
        backward_bytes: of its gradient, per edge; default as many.
        overlap: transfers run beside computations. Otherwise a SEND also holds its rank for as long as the transfer
            occupies its edge: the rank sends instead of computing.
        evict, load: seconds for which moving the saved activations of a microbatch away from a stage, or back to it,
            occupies its pair; `load` by default as long as `evict`.
        reduce_grad: of the reduction of a stage's gradients, whole or partial; a rank with several stages reduces
            their sum, unless its weights live on the host.
        offload, reload: where inputs are stashed on the host, seconds for which copying that of a microbatch there, or
            back to its stage, occupies its lane; `reload` by default as long as `offload`.
        fetch, store, update: where weights live on the host, seconds for which copying a stage's weights to the device
            and its gradients to the host occupy their lanes, and its update the host's optimizer.
        reduce_embed, reduce_norm: of the reductions, once all members have reached them; that of partial embeddings
            takes as long.
        others: of words with a cost of another name, by that name; default nothing.
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
    others: Mapping[str, PerStage] = field(default_factory=dict, hash=False)

    def seconds(self, num_stages: int) -> dict[Kind, list[float]]:
        """Duration of each computation, reduction and move at each stage; a move is named by the end that evicts.

        Raises:
            ValueError: a sequence of another length, a negative or non-finite number, or a bandwidth that is not
                positive.
        """
        named = self.by_name(num_stages)
        return {kind: named[word.cost] for kind, word in WORDS.items()}

    def by_name(self, num_stages: int) -> dict[str, list[float]]:
        """The same, by the names that words give their costs. Raises as `seconds`."""
        backward, values = spread("backward", self.backward, num_stages), {**vars(self), **self.others}
        found = {"backward": backward} | dict(zip(_HALVES, self._halves(backward), strict=True))
        for name in _NAMES:
            value = values.get(name, 0.0)
            found[name] = found[_DEFAULTS[name]] if value is None else spread(name, value, num_stages)
        return found

    def _halves(self, backward: list[float]) -> tuple[list[float], list[float]]:
        """What I and W take. One that is not given is the rest of the backward, and neither a half of it each."""
        values = {name: getattr(self, name) for name in _HALVES}
        given = {name: spread(name, each, len(backward)) for name, each in values.items() if each is not None}
        if len(given) == 2:
            return tuple(given.values())
        name, part = next(iter(given.items()), ("backward_input", [time / 2 for time in backward]))
        rest = [whole - each for each, whole in zip(part, backward, strict=True)]
        if min(rest, default=0.0) < 0:
            raise ValueError(f"{name} is a part of backward, so it cannot be longer; give a smaller one, or both parts")
        return (part, rest) if name == "backward_input" else (rest, part)

    def edges(self, num_edges: int) -> tuple[list[float], list[float], list[float]]:
        """Per edge: seconds that an activation occupies it, that a gradient does, and latency. Raises as `seconds`."""
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


_HALVES = "backward_input", "backward_weight"
_NAMES = tuple(dict.fromkeys(word.cost for word in WORDS.values() if word.cost not in ("backward", *_HALVES)))
_DEFAULTS = {"recompute": "forward", "load": "evict", "reload": "offload", "predict": "step"}


def spread(name: str, value: PerStage, count: int) -> list[float]:
    """A number for each of `count` stages or edges. Raises ValueError, with the name, where they are no costs."""
    values = [float(item) for item in value] if isinstance(value, Sequence) else [float(value)] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers; give one for all, or one for each of {count}")
    if not all(math.isfinite(item) and item >= 0 for item in values):
        raise ValueError(f"{name} is {value}; give finite numbers of 0 and more")
    return values
