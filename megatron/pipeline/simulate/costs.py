"""The costs of the instructions of a program.

Times are in seconds and sizes in bytes, so that the numbers of a profile or an emulated stage can be used directly. The
simulator does not depend on the unit, though; drawings of the paper's figures use the time of a forward as the unit.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from megatron.pipeline.program.copies import groups_of_copies
from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.instruction import MOVES, SHARED_REDUCTIONS, WORDS, Kind
from megatron.pipeline.simulate.timeline import Timeline

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
        swap_out, swap_in: the same for the saved activations of a microbatch; default of `swap_in`: `swap_out`.
        fetch, store, update: with weights on the host, times for which the copy of a stage's weights to the device, the
            copy of its gradients to the host, and its update by the host's optimizer occupy their lanes.
        reduce_embed, reduce_norm: times of these reductions after all members have reached them; the reduction of
            partial embeddings takes `reduce_embed`, too.
        others: time of words whose cost has another name, by that name; default: 0.
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
    swap_out: PerStage = 0.0
    swap_in: PerStage | None = None
    others: Mapping[str, PerStage] = field(default_factory=dict, hash=False)

    def seconds(self, num_stages: int) -> dict[Kind, list[float]]:
        """Kind -> seconds at each stage, for computations, updates, reductions, moves and words of the host.

        A move has the kind of its evicting end.

        Raises:
            ValueError: for a sequence of another length, and for a negative or non-finite number.
        """
        named = self.by_name(num_stages)
        return {kind: named[word.cost] for kind, word in WORDS.items()}

    def by_name(self, num_stages: int) -> dict[str, list[float]]:
        """Return a dict: name of a cost -> its seconds at each stage, with defaults filled in.

        Raises ValueError as `seconds` does.
        """
        backward, values = spread("backward", self.backward, num_stages), {**vars(self), **self.others}
        found = {"backward": backward} | dict(zip(HALVES, self._halves(backward), strict=True))
        for name in _NAMES:
            value = values.get(name, 0.0)
            found[name] = found[_DEFAULTS[name]] if value is None else spread(name, value, num_stages)
        return found

    def _halves(self, backward: list[float]) -> tuple[list[float], list[float]]:
        """The times of I and W. A missing one is the rest of the backward; if both are missing, each is half of it."""
        values = {name: getattr(self, name) for name in HALVES}
        given = {name: spread(name, each, len(backward)) for name, each in values.items() if each is not None}
        if len(given) == 2:
            return tuple(given.values())
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


HALVES = "backward_input", "backward_weight"
_NAMES = tuple(dict.fromkeys(word.cost for word in WORDS.values() if word.cost not in ("backward", *HALVES)))
_DEFAULTS = {
    "recompute": "forward", "load": "evict", "reload": "offload", "swap_in": "swap_out", "predict": "step",
}  # fmt: skip


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


def measured_costs(measured: Timeline) -> Costs:
    """Return the mean seconds of each kind of work per stage. Reductions that ranks share have one value for all.

    The cost of work that the timeline does not have is None if `Costs` then derives it from others, and otherwise 0.
    The halves of a backward are derived only if neither was measured. The recompute of a stage that has none takes as
    long as its forward.
    """
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in measured.spans:
        times[span.instruction.kind, span.instruction.stage].append(span.end - span.start)

    def mean(kind: Kind) -> list[float]:
        return [statistics.fmean(times.get((kind, stage), [0.0])) for stage in range(measured.num_stages)]

    def least(kind: Kind) -> float:  # the last rank to arrive waits least for the others
        return min((statistics.fmean(found) for (each, _), found in times.items() if each is kind), default=0.0)

    known = {field.name: field.default for field in fields(Costs)}
    of_work = {kind.row.cost: kind for kind in reversed(Kind) if kind.row.cost in known and kind not in MOVES}
    found = {name: (least if kind in SHARED_REDUCTIONS else mean)(kind) for name, kind in of_work.items()}
    if measured.copies:
        found["reduce_grad"] = _least_of_copies(measured, found["reduce_grad"])
    found["recompute"] = [again or once for again, once in zip(found["recompute"], found["forward"], strict=True)]
    seen = {kind.row.cost for kind, _ in times}
    if seen.intersection(HALVES):
        seen.update(HALVES)
    return Costs(**{name: each if name in seen or known[name] is not None else None for name, each in found.items()})


def _least_of_copies(measured: Timeline, seconds: Sequence[float]) -> list[float]:
    """The least of the `seconds` of a reduction at the stages of copies that share it: the last one waits least."""
    groups = groups_of_copies(measured.copies, measured.rank_of_stage)
    lowest = [stages[0] for stages in stages_by_rank(measured.rank_of_stage)]
    least = {each: min(seconds[stage] for stage in lowest if groups[stage] == each) for each in {*groups}}
    return [least[groups[stage]] if stage in lowest else each for stage, each in enumerate(seconds)]
