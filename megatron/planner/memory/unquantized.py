"""Layers at both ends of a model that stay in 16 bits where the others multiply in FP8 (`--first-last-layers-bf16`).

The layers of all stages are cut into pieces where those in FP8 begin and end. The bytes of a stage are those of a stage
in FP8, plus for each piece in 16 bits the difference between 16 bits and FP8.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron.planner.memory.activations import Activations, ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.parameters import stage_matrices


@dataclass(frozen=True)
class _Piece:
    """Consecutive layers of a stage in 16 bits: the stage, the number of its layers before them, their number, and how
    many have experts."""

    stage: int
    before: float
    size: float
    with_experts: float


def _pieces(shape: Architecture, ends: tuple[int, int], layers: Sequence[float]) -> Iterator[_Piece]:
    places, begin, total = [], 0, sum(layers)
    first, last = (ends[0], total - ends[1]) if sum(ends) < total else (total, total)
    for stage, count in enumerate(layers):
        borders = (min(max(border, begin), begin + count) for border in sorted((first, last)))
        places += [(stage, start - begin, start, end) for start, end in pairwise((begin, *borders, begin + count))]
        begin += count
    experts = shape.layers_with_experts([end - start for _, _, start, end in places])
    for (stage, before, start, end), number in zip(places, experts, strict=True):
        if end > start and (start < first or start >= last):
            yield _Piece(stage, before, end - start, number)


def unquantized_matrices(shape: Architecture, setting: ActivationSetting, layers: Sequence[float]) -> tuple[int, ...]:
    """Elements of the linear layers of each stage that are not cast to FP8, on one rank."""
    found, of_all = [0] * len(layers), replace(shape, further=None)
    for piece in _pieces(shape, setting.unquantized, layers):
        before = [sum(layers[: piece.stage]) + piece.before, piece.size]  # experts go by a layer's number
        found[piece.stage] += stage_matrices(of_all, setting.tensor, before, setting.expert_degrees)[1]
    return tuple(found)


class UnquantizedEnds(Activations):
    """The activations of a model of one stack in FP8 but for its first and last layers."""

    def by_stage(self, layers: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
        saved, workspace, deferred = super().by_stage(layers)
        half, recompute = Activations(self.shape, replace(self.setting, fp8=False)), self.setting.recompute
        # The first `again` layers of a stage keep only their inputs.
        again = recompute.num_layers if recompute.method == "block" else 0
        keeps = recompute.method != "uniform" and not recompute.whole_stage
        at_once: dict[int, list[float]] = {}
        for piece in _pieces(self.shape, self.setting.unquantized, layers):
            part, stage = {"with_experts": piece.with_experts, "is_first": False, "is_last": False}, piece.stage
            kept = min(piece.size, max(0, piece.before + piece.size - again)) / piece.size
            more, less = (each._layers(recompute.modules, piece.size, piece.with_experts) for each in (half, self))
            saved[stage] += keeps * kept * (more - less)
            larger = half.workspace(piece.size, **part) - self.workspace(piece.size, **part)
            at_once.setdefault(stage, []).append(larger)
            deferred[stage] += half.deferred(piece.size, **part) - self.deferred(piece.size, **part)
        for stage, larger in at_once.items():
            workspace[stage] += (sum if recompute.whole_stage else max)(larger)
        return saved, workspace, deferred
