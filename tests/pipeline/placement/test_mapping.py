"""Mappings: Figures 5 and 6 of the BPipe paper, and what holds for all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.placement.cost import pair_nodes
from megatron.pipeline.placement.mapping import Degrees, check_mapping, inverse, load_mapping, pair_adjacent, standard
from tests.pipeline.placement.examples import machine, stages

DEGREES = st.builds(Degrees, tensor=st.integers(1, 4), pipeline=st.integers(1, 9), data=st.integers(1, 4))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "by_node"),
    [
        (1, 8, 1, ["07162534"]),  # Figure 5b's rule on one node
        (1, 16, 1, ["0f1e", "2d3c", "4b5a", "6978"]),  # Figure 5b, and on four
        (2, 4, 2, ["00331122"] * 2),  # Figure 6
        (2, 4, 4, ["00331122"] * 4),  # with four replicas
        (4, 4, 1, ["00003333", "11112222"]),
        (2, 5, 1, ["0044113322"]),  # the middle stage has no pair
    ],
)
def test_figures_on_one_and_on_several_nodes(tensor, pipeline, data, by_node):
    """Stage by slot, node by node; replica k follows replica k-1, tensor ranks count within."""
    degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data)
    mapping = pair_adjacent(degrees)
    assert stages(mapping, degrees) == [int(stage, 16) for stage in "".join(by_node)]
    coordinates = [degrees.coordinates(rank) for rank in mapping]
    assert [each.tensor for each in coordinates] == list(range(tensor)) * (pipeline * data)
    assert [each.data for each in coordinates] == sorted(each.data for each in coordinates)


@pytest.mark.parametrize(
    ("nodes", "tensor", "pipeline", "data"),
    [
        ((8,), 1, 8, 1),
        ((8,), 2, 4, 1),
        ((8,) * 3, 2, 12, 1),
        ((8,) * 4, 2, 4, 4),
        ((4,) * 6, 1, 6, 4),
        ((16, 8), 4, 6, 1),
    ],
)
def test_no_pair_crosses_a_node_that_holds_whole_pairs(nodes, tensor, pipeline, data):
    """On one node or several: where 2t divides every node's GPUs, pair-adjacent keeps every pair inside one."""
    degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data)
    pairs = pair_nodes(pair_adjacent(degrees), degrees, machine(*nodes).node_of_slot)
    assert sum(pair.num_crossing for pair in pairs) == 0


@given(DEGREES)
def test_named_mappings_are_permutations_with_tensor_ranks_adjacent(degrees):
    """Each rank once; a tensor parallel group on consecutive slots, in order; a pair's groups side by side."""
    for mapping in (standard(degrees), pair_adjacent(degrees)):
        assert sorted(mapping) == list(range(degrees.world_size))
        for first in range(0, len(mapping), degrees.tensor):
            group = mapping[first : first + degrees.tensor]
            assert group == tuple(range(group[0], group[0] + degrees.tensor)) and group[0] % degrees.tensor == 0
    in_slots = stages(pair_adjacent(degrees), degrees)[:: degrees.tensor]
    for replica in range(degrees.data):
        own = in_slots[replica * degrees.pipeline : (replica + 1) * degrees.pipeline]
        pairs = zip(own[::2], own[1::2], strict=False)
        assert all(first + second == degrees.pipeline - 1 and first < second for first, second in pairs)


@pytest.mark.parametrize("text", ["[0, 3, 1, 2]", "- 0\n- 3\n- 1\n- 2\n"], ids=["JSON", "YAML"])
def test_files(tmp_path, text):
    """A list in JSON or YAML."""
    path = tmp_path / "map"
    path.write_text(text)
    assert load_mapping(path, 4) == (0, 3, 1, 2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"ranks": [0]}, "is no list of whole numbers"),
        ([0, 1, "2", 3], "is no list of whole numbers"),
        ([0, 1, True, 3], "is no list of whole numbers"),
        ([0, 1, 2.0, 3], "is no list of whole numbers"),
        ([0, 1, 2], "lists 3 ranks for 4 processes"),
        ([0, 1, 1, 3], "lists rank 1 twice, and lacks rank 2"),
        ([0, 1, 4, 3], "lists rank 4 which is not in 0 to 3, and lacks rank 2"),
        ([-1, 1, 2, 3], "lists rank -1 which is not in 0 to 3, and lacks rank 0"),
    ],
)
def test_bad_files(tmp_path, content, reason):
    """What is no permutation is explained in one sentence that names the file."""
    path = tmp_path / "map.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        load_mapping(path, 4)
    assert str(error.value).startswith(f"{path} {reason}") and "\n" not in str(error.value)


def test_unreadable_files(tmp_path):
    """Missing, binary and malformed files are named, the last with line and column."""
    with pytest.raises(ValueError, match=r"none\.json cannot be read \(No such file or directory\)"):
        load_mapping(tmp_path / "none.json", 4)
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match="picture is no text"):
        load_mapping(tmp_path / "picture", 4)
    (tmp_path / "broken").write_text("[0, 1\n[")
    with pytest.raises(ValueError, match=r"broken, line 2, column 1: .*; write YAML or JSON"):
        load_mapping(tmp_path / "broken", 4)


@given(st.permutations(range(7)))
def test_inverse(mapping):
    """The slot of a rank is where the mapping has it."""
    assert [mapping[slot] for slot in inverse(mapping)] == list(range(7))
    assert check_mapping(list(mapping), 7, source="test") == tuple(mapping)
