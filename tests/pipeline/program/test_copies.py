"""Copies of stages: their text, their shares of a batch, their edges, and what is no program of copies."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.copies import Copy, Share, edges_of_copies, groups_of_copies, taken_of, validate_copies
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.extent import Kept
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import PROVISIONAL, STALE, STASH
from megatron.pipeline.schedules.completion import completed
from tests.draws import draws

TEXT = """\
# copies: 0:0,2 0:1,3 1:0-3
0F0,0F2,0B0,0B2
1F1,1F3,1B1,1B3
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
"""
"""Two replicas of two stages, of which the second rank of one replica is lost."""


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ("0:0", Copy(0, (0,))),
        ("2:0-12/4,1", Copy(2, (0, 1, 4, 8, 12))),
        ("1:3,1,2", Copy(1, (1, 2, 3))),
        ("1:0-3", Copy(1, (0, 1, 2, 3))),
        ("1:0-5/2", Copy(1, (0, 2, 4))),
        ("10:7-7", Copy(10, (7,))),
        ("1:0-4/2=7", Copy(1, (0, 2, 4), 7)),
    ],
)
def test_the_text_of_a_copy(text, copy):
    assert Copy.parse(text) == copy
    assert Copy.parse(str(copy)) == copy


@draws(200)
@given(st.integers(0, 99), st.sets(st.integers(0, 60), min_size=1, max_size=25))
def test_any_positions_are_read_back(stage, positions):
    copy = Copy(stage, tuple(sorted(positions)))
    assert Copy.parse(str(copy)) == copy


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ((0,), "0:0"),
        ((0, 1), "0:0,1"),
        ((0, 1, 2), "0:0-2"),
        ((0, 4, 8, 12), "0:0-12/4"),
        ((0, 1, 4, 8, 12, 16), "0:0,1,4-16/4"),
        ((0, 2, 4, 5, 6, 7), "0:0-4/2,5-7"),
    ],
)
def test_runs_of_equal_steps_are_short(positions, text):
    assert str(Copy(0, positions)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0", "is no stage with the positions of its microbatches"),
        ("0:", "is no stage with the positions"),
        ("00:1", "is no stage with the positions"),
        ("0:1,,2", "is no stage with the positions"),
        ("0:1-2-3", "is no stage with the positions"),
        ("0:1/2", "is no stage with the positions"),
        ("0:a", "is no stage with the positions"),
        ("0:-1", "is no stage with the positions"),
        ("0:3-1", "has the positions 3-1; give FIRST-LAST/STEP"),
        ("0:0-8/0", "has the positions 0-8/0; give FIRST-LAST/STEP"),
        ("0:0-4/2,4", "names a position twice"),
        ("0:0-99999999999", "has position 99999999999; give positions of 0 to 1048575"),
    ],
)
def test_other_texts_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        Copy.parse(text)


def test_positions_go_round_in_batches_of_other_sizes():
    """Of 3 positions, the fourth microbatch of a batch is taken as the first one, and each batch begins anew."""
    copies = (Copy(0, (0, 2)), Copy(0, (1,)))
    assert taken_of(copies, (3,)) == ({0, 2}, {1})
    assert taken_of(copies, (5, 2, 3)) == ({0, 2, 3, 5, 7, 9}, {1, 4, 6, 8})


def test_replicas_that_take_a_microbatch_together_share_it_out():
    """Microbatch b of the copy stands for 2b and 2b + 1 of the data."""
    whole = Share((0, 3), 4)
    first, second = (whole.of_replica(replica, 2) for replica in range(2))
    assert (first, second) == (Share((0, 6), 8), Share((1, 7), 8))
    assert [first.position_of(number) for number in range(4)] == [2 * whole.position_of(each) for each in range(4)]


def test_edges_are_between_copies_that_share_a_microbatch():
    copies = (Copy(0, (0, 1)), Copy(0, (2, 3)), Copy(1, (0, 1, 2)), Copy(1, (3,)), Copy(2, (0, 1, 2, 3)))
    model = [Edge(0, 1), Edge(0, 2, gradient=False), Edge(1, 2)]
    assert " ".join(map(str, edges_of_copies(copies, model))) == "0>2 1>2 1>3 0>4:F 1>4:F 2>4 3>4"
    assert groups_of_copies(copies, (0, 1, 2, 3, 4)) == (0, 0, 1, 1, 2)
    assert groups_of_copies((Copy(0, (0,)), Copy(0, (1,)), Copy(1, (0,)), Copy(1, (1,))), (1, 0, 1, 0)) == (0,) * 4


VALID = (Copy(0, (0, 2)), Copy(0, (1, 3)), Copy(1, (0, 1, 2, 3)))
EDGES = (Edge(0, 2), Edge(1, 2))


@pytest.mark.parametrize(
    ("copies", "edges", "rank_of_stage", "reason"),
    [
        ((Copy(0, (0,)), Copy(2, (0,))), (Edge(0, 1),), (0, 1), r"of the stages \[0, 2\] of the model; number"),
        ((Copy(0, ()), Copy(0, (0,))), (), (0, 1), "stage 0 takes no microbatch of a batch"),
        ((Copy(0, (0, 1)), Copy(0, (1,))), (), (0, 1), "position 1 of a batch is taken by 2 of the copies of stage 0"),
        ((Copy(0, (0,)), Copy(0, (2,))), (), (0, 1), "position 1 .* taken by 0 of the copies .* each of 0 to 1"),
        ((*VALID[:2], Copy(1, (0, 1, 2))), EDGES, (0, 1, 2), "position 3 .* taken by 0 of the copies of stage 1"),
        (
            (*VALID[:2], Copy(1, (0, 1, 2, 3, 4))), EDGES, (0, 1, 2),
            "position 4 of a batch is taken by 1 of the copies of stage 1 of the model; each of 0 to 3",
        ),
        (VALID, EDGES[:1], (0, 1, 2), "the edges 0>2 are not those between copies that share .* write 0>2 1>2"),
        (VALID, (Edge(0, 1), *EDGES), (0, 1, 2), "leads from a copy of stage 0 of the model to one of stage 0"),
        (
            (Copy(0, (0,)), Copy(0, (1,)), Copy(1, (0,)), Copy(1, (1,))),
            (Edge(0, 2), Edge(0, 3), Edge(1, 3)), (0, 1, 2, 3), "the edges 0>2 0>3 1>3 are not those .* write 0>2 1>3",
        ),
        ((Copy(1, (0,)), Copy(0, (0,))), (Edge(0, 1),), (0, 1), "leads from a copy of stage 1 of the model to one of"),
        (
            (Copy(0, (0, 1)), Copy(0, (2,)), Copy(1, (0,)), Copy(1, (1, 2))),
            (Edge(0, 2), Edge(0, 3), Edge(1, 3)), (0, 1, 0, 1),
            "stages 0 and 2 of rank 0 hand tensors to each other and take other microbatches",
        ),
        (
            (Copy(0, (0,)), Copy(0, (1,)), Copy(1, (0, 1))), (Edge(0, 2), Edge(1, 2)), (0, 0, 1),
            "rank 0 holds two copies of stage 0 of the model; make them one",
        ),
        (
            (Copy(0, (0,)), Copy(0, (1,)), Copy(1, (0, 1)), Copy(2, (0, 1))),
            (Edge(0, 2), Edge(1, 2), Edge(2, 3)), (0, 1, 2, 0),
            r"ranks 0 and 1 have copies of stage 0 of the model, and of the stages \[0, 2\] and \[0\]",
        ),
    ],
)  # fmt: skip
def test_what_is_no_program_of_copies(copies, edges, rank_of_stage, reason):
    with pytest.raises(ValueError, match=reason):
        validate_copies(copies, edges, rank_of_stage)


def test_what_is_one():
    validate_copies(VALID, EDGES, (0, 1, 2))


# --- programs


def test_a_file_says_no_more_than_its_copies():
    """Edges of a chain and the reduction of gradients are found; all of it is read back, complete rows too."""
    program = Program.from_csv(TEXT)
    assert program.edges == EDGES and program.copies == VALID and program.data_parallel
    assert Program.from_csv(program.to_csv()) == program
    whole = completed(program)
    assert Program.from_csv(whole.to_csv()) == whole
    assert "# copies: 0:0,2 0:1,3 1:0-3\n" in whole.to_csv()


def test_one_stage_of_the_model_has_no_edges():
    """Replicas that hold the whole model are copies, too, and no chain."""
    program = Program.from_csv("# copies: 0:0,2 0:1\n0F0,0B0,0F2,0B2\n1F1,1B1\n")
    assert program.edges == () == program.graph.edges and not program.graph.is_chain
    check(program)
    check(completed(program))
    assert Program.from_csv(program.to_csv()) == program


def test_single_copies_are_a_chain():
    program = Program.from_csv("# copies: 0:0 1:0\n# data_parallel: no\n0F0,0B0\n1F0,1B0\n")
    assert program.edges == () and program.graph.is_chain
    check(completed(program))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0:0,2 0:1,3 1:0-3", "0:0,2 0:1,3", "there are 3 stages and 2 copies; say for each stage what it is"),
        ("0:0,2 0:1,3 1:0-3", "0:0,2 0:1,2 1:0-3", "position 2 of a batch is taken by 2 of the copies of stage 0"),
        ("# copies", "# edges: 0>1 1>2\n# copies", "leads from a copy of stage 0 of the model to one of stage 0"),
        ("# copies", "# edges: 0>2\n# copies", "the edges 0>2 are not those between copies that share a microbatch"),
        ("# copies", "# tied_embeddings: yes\n# tied_stage: 2\n# copies", "tied_stage is 2; give the stage, 1 to 1"),
        ("0:0,2", "0:2-0", "line 1: copies: '0:2-0' has the positions 2-0"),
    ],
)
def test_files_that_are_refused(old, new, reason):
    with pytest.raises(ValueError, match=reason):
        Program.from_csv(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"data_parallel": False},
            r"nothing adds up their gradients \(data_parallel: no\); make it data_parallel: yes",
        ),
        ({"batches": (1, 3)}, "stage 1 takes no microbatch of a batch of 1: its first position is 1"),
        ({"residency": Residency(1)}, r"there can be no weights on the host \(residency\); keep them on the device"),
        ({"optimistic": True}, "there can be no steps that do not wait for their norm"),
        ({"weights": PROVISIONAL}, "no predictions from a copy's own gradients .*; let them read the sum"),
        ({"weights": STASH}, "there can be no weights stash; take 2bw or flush"),
        ({"weights": STALE}, "there can be no weights stale; take 2bw or flush"),
        ({"recompute": True, "kept": (Kept(0, 0),)}, r"there can be no microbatches that a stage keeps \(kept\)"),
    ],
)
def test_programs_that_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        check(replace(Program.from_csv(TEXT), **change))


def moving(words: str, others: str, copies: str = "0:0,2=2 0:1,3 1:0-3=0") -> Program:
    """The program with `words` behind the second forward of stage 0, and `others` before all else of stage 2."""
    text = TEXT.replace("0:0,2 0:1,3 1:0-3", copies)
    return Program.from_csv(text.replace("0F2,0B0", f"0F2,{words}0B0").replace("2F0,2B0", f"{others}2F0,2B0"))


def test_activations_move_between_copies_that_name_each_other():
    """The text is read back; a copy without a pair moves none, and both ends of each move have to be there."""
    evicts = "0EVICT2,0LOAD2,"
    program = completed(moving(evicts, "2ACCEPT2,2RETURN2,"))
    assert check(program).peak_saved_on_rank == (2, 2, 2)
    assert Program.from_csv(program.to_csv()) == program
    check(moving("0SWAP_OUT2,0SWAP_IN2,", "", "0:0,2 0:1,3 1:0-3"))
    for copies, reason in (
        ("0:0,2 0:1,3 1:0-3", "it is a copy that names no pair, so nothing can move"),
        ("0:0,2=2 0:1,3 1:0-3=0", "the row of rank 2 has no 2ACCEPT2 to meet it"),
        ("0:0,2=2 0:1,3 1:0-3", "stage 0 names stage 2 as its pair, which does not name it; let both name each other"),
        ("0:0,2=7 0:1,3 1:0-3", "stage 0 names stage 7 as its pair, which does not name it"),
    ):
        with pytest.raises(ValueError, match=reason):
            check(moving(evicts, "", copies))


@pytest.mark.parametrize("communication", [False, True])
def test_torch_has_no_word_for_copies(communication):
    with pytest.raises(ValueError, match="torch's text has no word for copies of a stage"):
        Program.from_csv(TEXT).to_torch_csv(communication=communication)


def test_an_evaluation_without_gradients_needs_no_reduction():
    """Forwards alone may leave a copy out; its empty row is read back."""
    text = "# copies: 0:0,2 0:1,3 1:0-3\n# rank_of_stage: 2 0 1\n1F1\n2F0,2F1,2F2\n0F0,0F2\n"
    check(Program.from_csv(text))
    idle = "# copies: 0:0 0:1 1:0,1\n# rank_of_stage: 1 2 0\n# batches: 1\n2F0\n0F0\n"
    program = Program.from_csv(idle)
    assert program.rows[2] == () and not program.data_parallel
    check(program)
    assert Program.from_csv(program.to_csv()) == program
