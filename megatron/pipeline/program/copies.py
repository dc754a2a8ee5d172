"""Copies of a stage: several ranks hold the weights of one stage of the model, and share the microbatches of a batch.

Replicas of a pipeline are such copies: in a program of all replicas, replica j of d takes the microbatches j, j + d,
j + 2d, ... of each batch at all of its stages. If a rank of a replica is lost, the same stages of other replicas take
its microbatches (ReCycle, SOSP 2024, section 4). So a microbatch may go through stages of several replicas, and an edge
between two copies carries only the microbatches that both take.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron.pipeline.program.edges import Edge, StageGraph, stages_by_rank, stages_of

_MOST_POSITIONS = 1 << 20  # in a batch; a text that names more is a slip
_TEXT = re.compile(r"(0|[1-9][0-9]*):([0-9,/-]+)(?:=(0|[1-9][0-9]*))?")
_RUN = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")


class Copy(NamedTuple):
    """A copy of a stage of the model.

    The text form names the stage and its positions, such as 2:0-12/4,1 for the positions 0, 4, 8, 12 and 1. Behind it
    may stand the pair, such as 2:0-12/4,1=7.

    Attributes:
        stage: the stage of the model.
        positions: the positions in a batch of the microbatches that the copy takes, ascending. With n positions over
            all copies of the stage, the copy that takes position i of a batch also takes positions i + n, i + 2n, ...
        pair: the stage of the program with which the copy exchanges saved activations; None: it moves none to another
            rank.
    """

    stage: int
    positions: tuple[int, ...]
    pair: int | None = None

    @classmethod
    def parse(cls, text: str) -> Copy:
        """Read the text form. Raises ValueError for another text."""
        match = _TEXT.fullmatch(text)
        runs = [_RUN.fullmatch(each) for each in match[2].split(",")] if match else [None]
        if None in runs:
            raise ValueError(f"{text!r} is no stage with the positions of its microbatches, such as 2:0-12/4")
        positions: list[int] = []
        for run in runs:
            first, last, step = int(run[1]), int(run[2] or run[1]), int(run[3] or 1)
            if last < first or not step:
                raise ValueError(f"{text!r} has the positions {run[0]}; give FIRST-LAST/STEP, such as 0-12/4")
            if last >= _MOST_POSITIONS:
                raise ValueError(f"{text!r} has position {last}; give positions of 0 to {_MOST_POSITIONS - 1}")
            positions += range(first, last + 1, step)
        if len({*positions}) < len(positions):
            raise ValueError(f"{text!r} names a position twice; name each once")
        return cls(int(match[1]), tuple(sorted(positions)), None if match[3] is None else int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}:{','.join(_runs(self.positions))}" + (f"={self.pair}" if self.pair is not None else "")


def _runs(positions: Sequence[int]) -> list[str]:
    """Return ascending numbers as runs of equal steps, the longest run at each place."""
    runs, at = [], 0
    while at < len(positions):
        end = at + 1
        step = positions[end] - positions[at] if end < len(positions) else 1
        while end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        if end - at < 3:
            runs.append(str(positions[at]))
            at += 1
            continue
        runs.append(f"{positions[at]}-{positions[end - 1]}" + f"/{step}" * (step > 1))
        at = end
    return runs


class Share(NamedTuple):
    """The share of a copy in each batch.

    Attributes:
        positions: the positions in a batch of the microbatches that the copy takes, ascending.
        num_positions: the number of positions over all copies of the stage.
    """

    positions: tuple[int, ...]
    num_positions: int

    def takes(self, position: int) -> bool:
        """Whether the copy takes the microbatch at a position of a batch."""
        return position % self.num_positions in self.positions

    def of_replica(self, replica: int, num_replicas: int) -> Share:
        """Return the share of one of the replicas that take the copy's microbatches together.

        Each microbatch of the copy then stands for one of each replica, in the order of the replicas.
        """
        return Share(tuple(each * num_replicas + replica for each in self.positions), self.num_positions * num_replicas)

    def position_of(self, number: int) -> int:
        """Return the position of the copy's microbatch `number`; both are counted over all batches, from 0."""
        batches, place = divmod(number, len(self.positions))
        return batches * self.num_positions + self.positions[place]


def share_of(copies: Sequence[Copy], stage: int) -> Share | None:
    """Return the share of a stage of a program; None if the program has no copies."""
    return Share(copies[stage].positions, num_positions_of(copies)) if copies else None


def pair_stages_of(copies: Sequence[Copy]) -> tuple[int, ...]:
    """Return the pair stage of each stage; the stage itself if it has none."""
    return tuple(number if copy.pair is None else copy.pair for number, copy in enumerate(copies))


def num_positions_of(copies: Sequence[Copy]) -> int:
    """Return the number of positions in a batch that the copies of each stage of the model share."""
    return sum(len(copy.positions) for copy in copies if copy.stage == 0)


def taken_of(copies: Sequence[Copy], batches: Sequence[int]) -> tuple[frozenset[int], ...]:
    """Return for each copy the microbatches that it takes of batches of these sizes, counted from the first one."""
    num_positions = num_positions_of(copies)
    starts = list(accumulate(batches, initial=0))
    return tuple(
        frozenset(
            start + at
            for start, size in zip(starts, batches, strict=False)
            for position in copy.positions
            for at in range(position, size, num_positions)
        )
        for copy in copies
    )


def edges_of_copies(copies: Sequence[Copy], edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Return the edges between copies that share a microbatch.

    Args:
        copies: the copies, ascending by their stages of the model.
        edges: the edges of the model's stages.
    """
    of_stage: dict[int, list[int]] = defaultdict(list)
    taken = [frozenset(copy.positions) for copy in copies]
    for number, copy in enumerate(copies):
        of_stage[copy.stage].append(number)
    return tuple(
        Edge(source, target, edge.gradient)
        for edge in edges
        for source in of_stage[edge.source]
        for target in of_stage[edge.target]
        if not taken[source].isdisjoint(taken[target])
    )


def graph_of_model(copies: Sequence[Copy], edges: Iterable[Edge]) -> StageGraph:
    """Return the stages of the model with their edges, from the copies and the edges between these."""
    joined = {Edge(copies[edge.source].stage, copies[edge.target].stage, edge.gradient) for edge in edges}
    return StageGraph.of(max(copy.stage for copy in copies) + 1, sorted(joined))


class PeersOfCopy:
    """The copies with which one copy exchanges the tensors of each microbatch: one for each neighbouring model stage.

    Args:
        copies: the copy that each stage of a program is.
        stage: the stage of the program that exchanges tensors.
        peers: the stages of the program to which it has edges for one kind of tensor.
    """

    def __init__(self, copies: Sequence[Copy], stage: int, peers: Iterable[int]) -> None:
        self._num_positions = num_positions_of(copies)
        self._at: dict[int, dict[int, int]] = {position: {} for position in copies[stage].positions}
        for peer in sorted(peers):
            for position in self._at.keys() & copies[peer].positions:
                self._at[position][copies[peer].stage] = peer

    def of(self, position: int) -> Mapping[int, int]:
        """Return the peers for the microbatch at a position of a batch: neighbouring stage of the model -> its copy.

        Raises KeyError if this copy does not take the microbatch.
        """
        return self._at[position % self._num_positions]


def ranks_of_copies(copies: Sequence[Copy], rank_of_stage: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks that hold copies of the stages of a rank, ascending, including the rank itself.

    Raises:
        ValueError: the stages of the rank have copies on different ranks.
    """
    found = {
        copies[stage].stage: tuple(
            sorted(rank_of_stage[other] for other, copy in enumerate(copies) if copy.stage == copies[stage].stage)
        )
        for stage in stages_of(rank_of_stage, rank)
    }
    if len({*found.values()}) > 1:
        raise ValueError(
            f"stages of rank {rank} have copies on different ranks, stage {' and stage '.join(map(str, found))} of the "
            f"model on {' and '.join(map(str, found.values()))}; one reduction sums the gradients of a rank, so let "
            "ranks hold copies of the same stages"
        )
    return next(iter(found.values()))


def graph_of_copies(copies: Sequence[Copy], num_stages: int, edges: Sequence[Edge] = ()) -> StageGraph:
    """Return the graph of a program whose stages are copies. Without edges, the model's stages form a chain.

    Raises:
        ValueError: there are more or fewer stages than copies, or the edges make no pipeline.
    """
    if len(copies) != num_stages:
        raise ValueError(f"there are {num_stages} stages and {len(copies)} copies; say for each stage what it is")
    if not edges:
        last = max((copy.stage for copy in copies), default=0)
        edges = edges_of_copies(copies, (Edge(stage, stage + 1) for stage in range(last)))
    return StageGraph(num_stages, tuple(sorted(edges)))


def groups_of_copies(copies: Sequence[Copy], rank_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Return for each stage the lowest stage of the model on its rank, which numbers the groups that share gradients.

    Two ranks that hold copies of one stage of the model hold copies of the same stages (`validate_copies`).
    """
    lowest = [min(copies[stage].stage for stage in stages) for stages in stages_by_rank(rank_of_stage)]
    return tuple(lowest[rank] for rank in rank_of_stage)


def numbered(copies: Sequence[Copy]) -> tuple[tuple[int, int], ...]:
    """Return for each copy the stage of the model, and its number among the copies of that stage, from 0."""
    counts: dict[int, int] = defaultdict(int)
    found = []
    for copy in copies:
        found.append((copy.stage, counts[copy.stage]))
        counts[copy.stage] += 1
    return tuple(found)


def validate_copies(copies: Sequence[Copy], edges: Sequence[Edge], rank_of_stage: Sequence[int]) -> None:
    """Raise ValueError unless the copies of each stage of the model share out the microbatches of a batch.

    Args:
        copies: the copy that each stage of a program is.
        edges: the edges between the program's stages.
        rank_of_stage: the rank of each stage of the program, one for each copy.
    """
    _require_shares(copies)
    between = sorted({Edge(copies[edge.source].stage, copies[edge.target].stage, edge.gradient) for edge in edges})
    for edge in between:
        if edge.source >= edge.target:
            raise ValueError(
                f"an edge leads from a copy of stage {edge.source} of the model to one of stage {edge.target}; number "
                "the model's stages such that edges ascend"
            )
    needed = sorted(edges_of_copies(copies, between))
    if sorted(edges) != needed:
        raise ValueError(
            f"the edges {' '.join(map(str, edges))} are not those between copies that share a microbatch; write "
            f"{' '.join(map(str, needed))}"
        )
    for edge in edges:
        one, other = copies[edge.source], copies[edge.target]
        if rank_of_stage[edge.source] == rank_of_stage[edge.target] and one.positions != other.positions:
            raise ValueError(
                f"stages {edge.source} and {edge.target} of rank {rank_of_stage[edge.source]} hand tensors to each "
                "other and take other microbatches; let both take the same"
            )
    _require_groups(copies, rank_of_stage)
    for number, copy in enumerate(copies):
        if copy.pair is not None and not (copy.pair < len(copies) and copies[copy.pair].pair == number):
            raise ValueError(
                f"stage {number} names stage {copy.pair} as its pair, which does not name it; let both name each other"
            )


def _require_shares(copies: Sequence[Copy]) -> None:
    """Raise ValueError unless each position of a batch is taken by one copy of each stage of the model."""
    stages = sorted({copy.stage for copy in copies})
    if stages != list(range(len(stages))):
        raise ValueError(f"the copies are of the stages {stages} of the model; number these 0, 1, ... without a gap")
    for number, copy in enumerate(copies):
        if not copy.positions:
            raise ValueError(f"stage {number} takes no microbatch of a batch; give it one, or leave it out")
    num_positions = num_positions_of(copies)
    for stage in stages:
        counts = Counter(at for copy in copies if copy.stage == stage for at in copy.positions)
        wrong = [at for at in {*range(num_positions), *counts} if counts[at] != (at < num_positions)]
        if wrong:
            at = min(wrong)
            raise ValueError(
                f"position {at} of a batch is taken by {counts[at]} of the copies of stage {stage} of the model; each "
                f"of 0 to {num_positions - 1}, as many as at stage 0, has to be taken by one, and no other"
            )


def _require_groups(copies: Sequence[Copy], rank_of_stage: Sequence[int]) -> None:
    """Raise ValueError unless two ranks with copies of one stage of the model hold the same stages, each once."""
    first: dict[int, tuple[int, list[int]]] = {}
    for rank, own in enumerate(stages_by_rank(rank_of_stage)):
        held = sorted(copies[stage].stage for stage in own)
        if len({*held}) < len(held):
            twice = next(stage for stage, following in pairwise(held) if stage == following)
            raise ValueError(f"rank {rank} holds two copies of stage {twice} of the model; make them one")
        for stage in held:
            other, others = first.setdefault(stage, (rank, held))
            if others != held:
                raise ValueError(
                    f"ranks {other} and {rank} have copies of stage {stage} of the model, and of the stages {others} "
                    f"and {held}; ranks that share gradients have copies of the same stages"
                )
