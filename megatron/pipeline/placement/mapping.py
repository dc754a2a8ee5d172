"""Ranks and slots: the place of a logical rank in the model, and mappings from slots to logical ranks.

megatron.core derives every process group from the logical rank (`parallel_state.initialize_model_parallel`). In the
order "tp-cp-ep-dp-pp" the tensor rank changes fastest, then the data rank, then the stage; in "tp-cp-ep-pp-dp" the
stage changes before the data rank, so that the ranks of a pipeline are consecutive.

Problem: launchers number processes node by node, and Megatron gives consecutive ranks to consecutive replicas and
stages. BPipe moves activations between stages s and p-1-s. In Megatron's order these stages lie on different nodes,
behind a slow network.

Solution: a mapping is a permutation. Slots are counted node by node and GPU by GPU; entry i is the logical rank of the
process in slot i. `pair-adjacent` (BPipe, section 3.5, Figures 5 and 6) keeps tensor parallel ranks together, then the
two stages of a pair, then the pairs of a pipeline, then replicas:

    p=4, t=1, d=1:    slot 0  1  2  3
    standard         stage 0  1  2  3
    pair-adjacent    stage 0  3  1  2

A job chooses its mapping once, when it starts, by the pairs of its first program. If the pipeline changes later,
processes keep their ranks, and new `Degrees` assign a new place in the model to each rank. With frozen layers other
ranks become pairs (`program.lane_order.Pairs`), and the moves between those ranks may cross nodes.

**Owners (`owners_of`).** Problem: an optimizer that steps a whole matrix cannot have a part of the matrix's state on
each replica.

Solution: whole parameters are dealt out, the largest first, each to the replica with the fewest bytes so far. The
result depends on sizes and order alone, so all replicas compute the same one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.documents.files import read_document
from megatron.pipeline.program.lane_order import pair_of


class Coordinates(NamedTuple):
    """The place of a rank in the model: tensor rank, data rank, pipeline stage."""

    tensor: int
    data: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Tensor, pipeline and data parallel size (t, p, d), and whether the ranks of a pipeline are consecutive.

    Raises ValueError if a size is below 1.
    """

    tensor: int
    pipeline: int
    data: int
    pipelines_in_a_row: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} parallel size {getattr(self, name)} is below 1; give 1 or more")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def rank(self, *, tensor: int, data: int, stage: int) -> int:
        """The logical rank at these coordinates."""
        if self.pipelines_in_a_row:
            return tensor + self.tensor * (stage + self.pipeline * data)
        return tensor + self.tensor * (data + self.data * stage)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a logical rank."""
        rest, tensor = divmod(rank, self.tensor)
        if self.pipelines_in_a_row:
            data, stage = divmod(rest, self.pipeline)
        else:
            stage, data = divmod(rest, self.data)
        return Coordinates(tensor, data, stage)


Mapping = tuple[int, ...]
"""Logical rank by slot; a permutation of range(world size)."""


def standard(degrees: Degrees) -> Mapping:
    """The mapping with rank i in slot i: Megatron's order, replicas before stages (Figure 5a)."""
    return tuple(range(degrees.world_size))


def pair_adjacent(degrees: Degrees) -> Mapping:
    """The mapping with tensor ranks fastest, then stages 0, p-1, 1, p-2, ..., then replicas (Figures 5b and 6)."""
    return tuple(
        degrees.rank(tensor=tensor, data=data, stage=stage)
        for data in range(degrees.data)
        for stage in pair_order(degrees.pipeline)
        for tensor in range(degrees.tensor)
    )


NAMED = {"standard": standard, "pair-adjacent": pair_adjacent}
"""The mappings that depend on the degrees alone, by name."""

NAMES = (*NAMED, "optimized")


def pair_order(num_stages: int) -> list[int]:
    """The stages, each next to its pair: 0, p-1, 1, p-2, ... With an odd number of stages the middle one comes last."""
    return [step // 2 if step % 2 == 0 else pair_of(step // 2, num_stages) for step in range(num_stages)]


def inverse(mapping: Sequence[int]) -> Mapping:
    """The inverse of a mapping: the slot of each logical rank."""
    slots = [0] * len(mapping)
    for slot, rank in enumerate(mapping):
        slots[rank] = slot
    return tuple(slots)


def check_mapping(ranks: object, world_size: int, *, source: str) -> Mapping:
    """Return `ranks` as a mapping.

    Raises ValueError, which names `source`, if `ranks` is not a permutation of range(world size).
    """
    if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
        raise ValueError(f"{source} is no list of whole numbers; write the logical rank of each slot, as [0, 3, 1, 2]")
    if len(ranks) != world_size:
        raise ValueError(f"{source} lists {len(ranks)} ranks for {world_size} processes; list one for each slot")
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing:
        wrong = next(rank for slot, rank in enumerate(ranks) if rank not in range(world_size) or rank in ranks[:slot])
        what = "twice" if wrong in range(world_size) else f"which is not in 0 to {world_size - 1}"
        raise ValueError(f"{source} lists rank {wrong} {what}, and lacks rank {missing[0]}; list each rank once")
    return tuple(ranks)


def load_mapping(path: str | Path, world_size: int) -> Mapping:
    """Load a mapping from a YAML or JSON file that holds one list.

    Raises ValueError, which names the file, if the file cannot be read or holds no mapping.
    """
    return check_mapping(read_document(path), world_size, source=str(path))


def owners_of(sizes: Sequence[float], num_replicas: int, *, pinned: Collection[int] = ()) -> list[int]:
    """The replica that owns each parameter.

    Args:
        sizes: the bytes of optimizer state of each parameter.
        num_replicas: the number of replicas.
        pinned: indices of parameters that belong to replica 0.
    """
    owners, held = [0] * len(sizes), [0.0] * num_replicas
    for index in pinned:
        held[0] += sizes[index]
    for index in sorted(set(range(len(sizes))) - set(pinned), key=lambda each: (-sizes[each], each)):
        owner = owners[index] = held.index(min(held))
        held[owner] += sizes[index]
    return owners
