"""Stages and their edges: what makes a pipeline, who gives what to whom, and how it is written."""

import pytest

from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import Instruction, Tensor
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule

SKIPS = StageGraph.of(4, (Edge(0, 1), Edge(0, 3), Edge(1, 2), Edge(1, 3, gradient=False), Edge(2, 3)))


def test_without_edges_it_is_a_chain():
    """And so it is where the chain's edges are said, in any order."""
    chain = StageGraph.of(3)
    assert chain.edges == (Edge(0, 1), Edge(1, 2)) and chain.is_chain and not SKIPS.is_chain
    assert StageGraph.of(3, (Edge(1, 2), Edge(0, 1))).is_chain
    assert [chain.depth(stage) for stage in range(3)] == [2, 1, 0]
    assert StageGraph.of(1).is_chain and StageGraph.of(1).depth(0) == 0


def test_who_gives_what_to_whom():
    """Activations along the edges, gradients back along those that have any; the depth is the longest way."""
    assert SKIPS.takers(Tensor.ACTIVATION, 1) == (2, 3) and SKIPS.makers(Tensor.ACTIVATION, 3) == (0, 1, 2)
    assert SKIPS.takers(Tensor.GRADIENT, 3) == (0, 2) and SKIPS.makers(Tensor.GRADIENT, 1) == (2,)
    assert [SKIPS.depth(stage) for stage in range(4)] == [3, 2, 1, 0]
    assert StageGraph.of(4, (Edge(0, 3), Edge(1, 3), Edge(2, 3))).depth(0) == 1
    assert SKIPS.edge_between(3, 1) == SKIPS.edge_between(1, 3) == 3


@pytest.mark.parametrize(
    ("num_stages", "edges", "message"),
    [
        (2, "1>0", "there can be no edge 1>0: edges go from a stage to a later one"),
        (2, "0>2", "the stages are 0 to 1"),
        (3, "0>1 0>1:F 1>2", "there are two edges from stage 0 to stage 1; make them one"),
        (4, "0>1 1>2:F 2>3", "stage 0 waits for a gradient of stage 1, which gets none itself; make it 0>1:F"),
    ],
)
def test_what_is_no_pipeline_is_refused(num_stages, edges, message):
    with pytest.raises(ValueError, match=message):
        StageGraph.of(num_stages, tuple(map(Edge.parse, edges.split())))


def test_stages_in_front_may_be_frozen():
    """They get no gradients, and may have a few tensors unread; a stage that hands on nothing is the end."""
    graph = StageGraph.of(4, tuple(map(Edge.parse, ["0>1:F", "1>2:F", "2>3"])))
    assert [graph.is_forward_only(stage) for stage in range(4)] == [True, True, False, False]
    assert graph.num_frozen == 2 and not graph.is_chain
    assert [graph.most_unread(stage) for stage in range(4)] == [5, 4, None, None]
    assert StageGraph.of(3).num_frozen == 0 and StageGraph.of(1).num_frozen == 0


@pytest.mark.parametrize("text", ["0-1", "0>", ">1", "01>2", "0>1:B", "0>1 "])
def test_an_edge_is_read_strictly(text):
    with pytest.raises(ValueError, match="is not an edge; the form is SOURCE>TARGET"):
        Edge.parse(text)
    assert [str(Edge.parse(each)) for each in ("0>3", "1>2:F")] == ["0>3", "1>2:F"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0SEND_F5>3", 3), ("3RECV_F5<0", 0), ("3SEND_B5>0", 0), ("0RECV_B5<3", 3),
        ("2SEND_F5", 3), ("2SEND_F5>3", 3), ("1RECV_B5", 2),
        ("0SEND_F5", "does not say which stage is at its other end: 1 or 3"),
        ("0SEND_F5>2", "its peer is stage 1 or 3, not 2"),
        ("3SEND_F5", "no edge takes that from stage 3"),
        ("1RECV_B5<3", "its peer is stage 2, not 3"),
    ],
)  # fmt: skip
def test_the_peer_of_a_transfer(text, found):
    """It is written where there are several."""
    instruction = Instruction.parse(text)
    assert str(instruction) == text
    if isinstance(found, int):
        assert SKIPS.peer_of(instruction) == found
        return
    with pytest.raises(ValueError, match=found):
        SKIPS.peer_of(instruction)


@pytest.mark.parametrize("text", ["0SEND_F5<3", "0RECV_F5>3", "0F5>3", "0STEP@1>3", "0SEND_F5>", "0SEND_F5>03"])
def test_a_peer_stands_behind_transfers_alone(text):
    with pytest.raises(ValueError, match=r"only SENDs go to a stage|is not an instruction"):
        Instruction.parse(text)


def test_a_program_says_its_edges():
    """In its text, if they are no chain; a file that says a chain's is the program of a chain."""
    program = Schedule.preset("gpipe", num_stages=4, edges=SKIPS.edges).build((2,))
    text = program.to_csv()
    assert "# edges: 0>1 0>3 1>2 1>3:F 2>3\n" in text and "0SEND_F0>1,0SEND_F0>3" in text
    assert Program.from_csv(text) == program
    chain = Schedule.preset("gpipe", num_stages=2).build((2,))
    assert "edges" not in chain.to_csv()
    assert Program.from_csv("# edges: 0>1\n" + chain.to_csv()) == chain
    with pytest.raises(ValueError, match="edges: '0-1' is not an edge"):
        Program.from_csv("# edges: 0-1\n" + chain.to_csv())
    with pytest.raises(ValueError, match="there can be no edge 0>5"):
        Program.from_csv("# edges: 0>5\n" + chain.to_csv())


def test_torch_has_no_word_for_it():
    """Its text of computations stands; transfers without their other ends would be read as a chain's."""
    program = Schedule.preset("gpipe", num_stages=4, edges=SKIPS.edges).build((1,))
    assert Program.to_torch_csv(program).startswith("0F0,0B0")
    with pytest.raises(ValueError, match="torch's text has no word for the stage at a transfer's other end"):
        program.to_torch_csv(communication=True)
