"""The edges of a pipeline: which stage hands tensors to which. They form a chain unless a program says otherwise.

    chain    0>1 1>2 2>3          each stage hands its output to the next one
    graph    0>1 0>3 1>2 2>3      stage 0 also hands tensors directly to stage 3 (FTPipe, section 4)

Activations go from the source of an edge to its target, and gradients go back. An edge that carries only ids or masks
(`0>3:F`) has no gradients, and neither has an edge from a frozen stage. A stage is forward-only (frozen) if it hands on
tensors and gets a gradient for none of them. No returning gradient slows such a stage down, so the number of tensors
that it may have sent and unread is bounded (`StageGraph.most_unread`). Stages are numbered such that edges ascend, so
edges form no circle. All tensors that one stage hands to another stage belong to one edge.

`stages_of` and `stages_by_rank` find the stages of each rank. They read `rank_of_stage` once for all ranks, because
reading it for each rank would take time that grows with the square of the number of ranks.

**Placements** say which rank holds which stage if ranks hold several stages:

    placement     2 ranks, 2 stages on each
    round-robin   0 1 0 1    stages are dealt out in turn, as in Megatron-LM's interleaving
    v             0 1 1 0    there and back again, so that a rank holds the first and the last stage (Qi et al. 2024)

With one stage on each rank both placements are equal. Layers, data, loss, seeds and checkpoints depend on the stage and
not on the rank, because all other code reads `rank_of_stage`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron.documents import counted
from megatron.pipeline.program.instruction import Instruction, Tensor


def stages_of(rank_of_stage: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the stages that live on a rank, ascending; an empty tuple if there is no such rank."""
    return _by_rank(tuple(rank_of_stage)).get(rank, ())


def stages_by_rank(rank_of_stage: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, from rank 0 to the last one."""
    found = _by_rank(tuple(rank_of_stage))
    return tuple(found.get(rank, ()) for rank in range(max(found) + 1))


@lru_cache(maxsize=1024)
def _by_rank(rank_of_stage: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for stage, rank in enumerate(rank_of_stage):
        found.setdefault(rank, []).append(stage)
    return {rank: tuple(stages) for rank, stages in found.items()}


_TEXT = re.compile(r"(0|[1-9][0-9]*)>(0|[1-9][0-9]*)(:F)?")


@dataclass(frozen=True, order=True, slots=True)
class Edge:
    """An edge from stage `source` to stage `target`. `gradient`: whether gradients come back over it."""

    source: int
    target: int
    gradient: bool = True

    def __str__(self) -> str:
        return f"{self.source}>{self.target}" + ":F" * (not self.gradient)

    @staticmethod
    def parse(text: str) -> Edge:
        """Read the text that `str` writes. Raises ValueError for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an edge; the form is SOURCE>TARGET, such as 0>3, or 0>3:F")
        return Edge(int(match[1]), int(match[2]), match[3] is None)


@dataclass(frozen=True)
class StageGraph:
    """The stages of a pipeline and their edges, in ascending order.

    Raises:
        ValueError: an edge does not ascend or leads to no stage, two edges join the same stages, or a stage expects a
            gradient from a forward-only stage.
    """

    num_stages: int
    edges: tuple[Edge, ...]

    @staticmethod
    def of(num_stages: int, edges: Sequence[Edge] = ()) -> StageGraph:
        """Return the graph of these edges; without edges, the chain."""
        return _graph(num_stages, tuple(edges))

    def __post_init__(self) -> None:
        for before, edge in zip((None, *self.edges), self.edges, strict=False):
            if not 0 <= edge.source < edge.target < self.num_stages:
                raise ValueError(
                    f"there can be no edge {edge}: edges go from a stage to a later one, and the stages are 0 to "
                    f"{self.num_stages - 1}"
                )
            if before is not None and (before.source, before.target) == (edge.source, edge.target):
                raise ValueError(f"there are two edges from stage {edge.source} to stage {edge.target}; make them one")
            if edge.gradient and self.is_forward_only(edge.target):
                raise ValueError(
                    f"stage {edge.source} waits for a gradient of stage {edge.target}, which gets none itself; make it "
                    f"{replace(edge, gradient=False)}"
                )

    @property
    def is_chain(self) -> bool:
        """Whether the only edges are from each stage to the next one, with gradients."""
        return self == _graph(self.num_stages, ())

    @cached_property
    def num_frozen(self) -> int:
        """The number of forward-only stages before the first other stage."""
        return next(stage for stage in range(self.num_stages) if not self.is_forward_only(stage))

    def is_forward_only(self, stage: int) -> bool:
        """Whether a stage hands on tensors and gets a gradient for none of them."""
        return bool(self._out[stage]) and not any(edge.gradient for edge in self._out[stage])

    def takers(self, tensor: Tensor, stage: int) -> tuple[int, ...]:
        """Return the stages that get activations, or gradients, from `stage`, ascending."""
        return self._takers[tensor][stage]

    def makers(self, tensor: Tensor, stage: int) -> tuple[int, ...]:
        """Return the stages that give activations, or gradients, to `stage`, ascending."""
        return self._makers[tensor][stage]

    def edge_between(self, one: int, other: int) -> int:
        """Return the index of the edge between two stages, which may be given in either order."""
        return self._number[(one, other) if one < other else (other, one)]

    def peer_of(self, instruction: Instruction) -> int:
        """Return the stage at the other end of a SEND or a RECV.

        Raises:
            ValueError: no edge fits the instruction, or several edges fit and the instruction names no peer.
        """
        word = instruction.kind.row
        sends = word.sends is not None
        peers = self.takers(word.sends, instruction.stage) if sends else self.makers(word.receives, instruction.stage)
        if instruction.peer in peers:
            return instruction.peer
        if instruction.peer is None and len(peers) == 1:
            return peers[0]
        known = " or ".join(map(str, peers))
        if not peers:
            raise ValueError(f"{instruction}: no edge takes that {'from' if sends else 'to'} stage {instruction.stage}")
        if instruction.peer is None:
            raise ValueError(f"{instruction} does not say which stage is at its other end: {known}")
        raise ValueError(f"{instruction}: its peer is stage {known}, not {instruction.peer}")

    def named_peer(self, instruction: Instruction, peer: int) -> int | None:
        """Return the peer that a SEND or a RECV has to name: None if only one peer is possible, otherwise `peer`."""
        word = instruction.kind.row
        tensor = word.sends or word.receives
        peers = self.takers if word.sends is not None else self.makers
        return peer if len(peers(tensor, instruction.stage)) > 1 else None

    def depth(self, stage: int) -> int:
        """Return the number of edges on the longest path from a stage to the end (FTPipe, section 4.2).

        Under 1F1B the stage runs this many forwards ahead of its backwards.
        """
        return self._depths[stage]

    def most_unread(self, stage: int) -> int | None:
        """Return how many tensors a forward-only stage may have sent over an edge without a posted receive.

        The bound is depth + 2, which is p-s+1 at stage s of a chain of p stages. A further SEND waits. None for any
        other stage: its backwards bound how far it is ahead.
        """
        return self.depth(stage) + 2 if self.is_forward_only(stage) else None

    @cached_property
    def _number(self) -> dict[tuple[int, int], int]:
        return {(edge.source, edge.target): number for number, edge in enumerate(self.edges)}

    @cached_property
    def _out(self) -> tuple[tuple[Edge, ...], ...]:
        out: list[list[Edge]] = [[] for _ in range(self.num_stages)]
        for edge in self.edges:
            out[edge.source].append(edge)
        return tuple(map(tuple, out))

    @cached_property
    def _takers(self) -> dict[Tensor, tuple[tuple[int, ...], ...]]:
        takers: dict[Tensor, list[list[int]]] = {tensor: [[] for _ in range(self.num_stages)] for tensor in Tensor}
        for edge in self.edges:
            takers[Tensor.ACTIVATION][edge.source].append(edge.target)
            if edge.gradient:
                takers[Tensor.GRADIENT][edge.target].append(edge.source)
        return {tensor: tuple(tuple(sorted(each)) for each in lists) for tensor, lists in takers.items()}

    @cached_property
    def _makers(self) -> dict[Tensor, tuple[tuple[int, ...], ...]]:
        makers: dict[Tensor, list[list[int]]] = {tensor: [[] for _ in range(self.num_stages)] for tensor in Tensor}
        for edge in self.edges:
            makers[Tensor.ACTIVATION][edge.target].append(edge.source)
            if edge.gradient:
                makers[Tensor.GRADIENT][edge.source].append(edge.target)
        return {tensor: tuple(tuple(sorted(each)) for each in lists) for tensor, lists in makers.items()}

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        depths = [0] * self.num_stages
        for stage in reversed(range(self.num_stages)):
            depths[stage] = max((depths[edge.target] + 1 for edge in self._out[stage]), default=0)
        return tuple(depths)


@lru_cache(maxsize=1024)
def _graph(num_stages: int, edges: tuple[Edge, ...]) -> StageGraph:
    if not edges:
        return StageGraph(num_stages, tuple(Edge(stage, stage + 1) for stage in range(num_stages - 1)))
    return StageGraph(num_stages, tuple(sorted(edges)))


def round_robin(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage; rank r has the stages r, r + num_ranks, r + 2 * num_ranks, ..."""
    return tuple(range(num_ranks)) * num_virtual_stages


def v(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage; every second turn over the ranks goes backwards."""
    there = tuple(range(num_ranks))
    return sum((there if turn % 2 == 0 else there[::-1] for turn in range(num_virtual_stages)), start=())


PLACEMENTS: dict[str, Callable[[int, int], Sequence[int]]] = {"round-robin": round_robin, "v": v}


def rank_of_stage(placement: str, num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage under a placement.

    Args:
        placement: a key of `PLACEMENTS`.
        num_ranks: the number of ranks of the pipeline.
        num_virtual_stages: the number of stages on each rank.

    Raises:
        ValueError: the placement is unknown, or it does not place this number of stages on this number of ranks.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"there is no placement {placement!r}; choose from {', '.join(PLACEMENTS)}")
    placed = tuple(PLACEMENTS[placement](num_ranks, num_virtual_stages))
    validate_placement(placed, num_ranks * num_virtual_stages)
    if max(placed) + 1 != num_ranks:
        raise ValueError(
            f"placement {placement} puts the {len(placed)} stages on {counted(max(placed) + 1, 'rank')}, and the "
            f"pipeline has {num_ranks}; give each rank a stage, and none to others"
        )
    return placed


def validate_placement(rank_of_stage: Sequence[int], num_stages: int) -> None:
    """Raise ValueError unless `rank_of_stage` places `num_stages` stages on ranks 0, 1, ... without a gap."""
    if len(rank_of_stage) != num_stages:
        raise ValueError(
            f"rank_of_stage places {len(rank_of_stage)} stages, and the pipeline has {num_stages}; give each its rank"
        )
    used = set(rank_of_stage)
    if not used or (min(used), max(used)) != (0, len(used) - 1):
        raise ValueError(
            f"rank_of_stage {tuple(rank_of_stage)} leaves a rank without a stage; number them 0, 1, ... and use all"
        )
