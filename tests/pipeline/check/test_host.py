"""The proofs for weights on the host, rule by rule: what is rejected, where, and what is said."""

from dataclasses import replace

import pytest

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.check.hardware_queues import prove_hardware_queues
from megatron.pipeline.graph.row_graph import graph_of
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.pipeline.check.examples import with_row, written
from tests.pipeline.check.hosted import hosted

# Three stages on one rank, one microbatch, two slots, eager updates.
ROW = (
    "0FETCH@0 1FETCH@0 0F0@0 0FREE@0 2FETCH@0 1F0@0 2F0@0 2B0@0 2STORE_GRAD@1 2UPDATE@1 2FREE@0 0FETCH@0 "
    "1R0@0 1B0@0 1STORE_GRAD@1 1UPDATE@1 1FREE@0 0R0@0 0B0@0 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0FREE@0 0STEP@1"
)
EAGER, DEFERRED = Residency(2, "eager"), Residency(2, "deferred")


def one_rank(row: str, **fields: object) -> Program:
    facts = {"rank_of_stage": (0, 0, 0), "recompute": True, "not_recomputed": (2,), "residency": EAGER}
    return written(row, **facts | fields)


def rejected(program: Program) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check(program)
    return caught.value


def moved(row: str, word: str, *, behind: str) -> str:
    """The row with a word, whose first occurrence is meant, behind another one."""
    words = row.split()
    words.remove(word)
    words.insert(words.index(behind) + 1, word)
    return " ".join(words)


def test_the_row_is_right():
    """And what the report counts: 2N - K fetches, K resident."""
    report = check(one_rank(ROW), max_saved=[1, 1, 1])
    assert (report.num_fetches, report.peak_resident_stages) == ((4,), (2,))
    assert check(written("0F0@0 0B0@0 0REDUCE_NORM@1 0STEP@1")).num_fetches == ()


@pytest.mark.parametrize(
    ("row", "word", "reason"),
    [
        (ROW.replace(" 0FREE@0 2FETCH", " 2FETCH"), "2FETCH@0", "2 stages may be resident, and 0 and 1 are: FREE one"),
        (moved(ROW, "2FETCH@0", behind="1FETCH@0"), "2FETCH@0", "2 stages may be resident, and 0 and 1 are: FREE one"),
        (ROW.replace(" 2FETCH@0", "", 1), "2F0@0", "its weights are not on the device: no 2FETCH@0 stands before it"),
        (ROW.replace("2FREE@0 0FETCH@0", "2FREE@0"), "0R0@0", "its weights are not on the device: no 0FETCH@0 stands"),
        (ROW.replace("2FETCH@0", "2FETCH@0 2FETCH@0", 1), "2FETCH@0", "the stage is resident already"),
        (moved(ROW, "1FREE@0", behind="1R0@0"), "1B0@0", "its weights are not on the device: no 1FETCH@0 stands"),
        (moved(ROW, "2FREE@0", behind="2F0@0"), "2B0@0", "its weights are not on the device: no 2FETCH@0 stands"),
        (ROW.replace("0FREE@0 2", "0FREE@0 0FREE@0 2"), "0FREE@0", "there is nothing to free: version 0 of the stage"),
        (ROW.replace("0FREE@0 2", "0FREE@0 0FETCH@0 0FREE@0 2"), "0FREE@0", "nothing has been computed with what was"),
        (ROW.replace("0FREE@0 0STEP@1", "0STEP@1 0FREE@0"), "0STEP@1", "stage 0 is resident over the end of its batch"),
        (ROW + " 0FETCH@1", "", "stage 0 is resident over the end of its batch: no 0FREE@1 stands before it"),
        (ROW.replace("2FETCH@0", "2FETCH@1", 1), "2FETCH@1", "the host does not have version 1 yet: no 2UPDATE@1"),
        (ROW.replace("0STEP@1", "0STEP@1 2FETCH@0"), "2FETCH@0", "the host has version 1 by then"),
        (moved(ROW, "2STORE_GRAD@1", behind="2F0@0"), "2STORE_GRAD@1", "batch 0, whose gradients it takes, has"),
        (moved(ROW, "2UPDATE@1", behind="2B0@0"), "2UPDATE@1", "no 2STORE_GRAD@1 stands before it"),
        (ROW.replace(" 2STORE_GRAD@1 2UPDATE@1", " 2UPDATE@1"), "2UPDATE@1", "no 2STORE_GRAD@1 stands before it"),
        (ROW.replace(" 2UPDATE@1", ""), "", "2UPDATE@1 is missing: batch 0 needs it"),
        (ROW.replace("1STORE_GRAD@1", "1STORE_GRAD@1 1STORE_GRAD@1"), "1STORE_GRAD@1", "the STORE_GRAD of every batch"),
        (ROW.replace("1STORE_GRAD@1", "1STORE_GRAD@2"), "1STORE_GRAD@2", "in order, and 1STORE_GRAD@1 is due"),
        (ROW.replace("1STORE_GRAD@1", "1REDUCE_GRAD@1 1STORE_GRAD@1"), "1REDUCE_GRAD@1", "a stage has no REDUCE_GRAD"),
        (moved(ROW, "0REDUCE_NORM@1", behind="0B0@0"), "0REDUCE_NORM@1", "as gradients leave: no 0STORE_GRAD@1 stands"),
    ],
)
def test_reasons(row: str, word: str, reason: str):
    """One change to the row, and what is said of it; `word`: at which one, "" for the end of the row."""
    error = rejected(one_rank(row))
    assert reason in error.reason
    assert str(error.instruction or "") == word
    assert error.position == len(row.split()) or row.split()[error.position] == word


def test_a_third_gradient_waits_for_nothing_that_comes():
    """Two buffers that are begun, and whose gradients leave behind the backward of the third stage."""
    row = moved(moved(ROW, "2UPDATE@1", behind="0B0@0"), "2STORE_GRAD@1", behind="0B0@0")
    assert str(check(one_rank(row)).num_fetches) == "(4,)"  # two are enough, late as the first leaves
    row = moved(moved(row, "1UPDATE@1", behind="0B0@0"), "1STORE_GRAD@1", behind="0B0@0")
    error = rejected(one_rank(row))
    assert str(error.instruction) == "0B0@0"
    assert error.reason == "the 2 gradient buffers are those of stage 2 and stage 1, whose STORE_GRADs are to come"


def test_deferred_updates_stand_behind_the_step():
    """There the norm and any overflow are known; by a program that says eager they are not asked."""
    error = rejected(one_rank(ROW, residency=DEFERRED))
    assert (str(error.instruction), error.reason) == ("2UPDATE@1", "no 0STEP@1 stands before it")
    late = moved(ROW, "2UPDATE@1", behind="0STEP@1")
    check(one_rank(late))  # eager ones may


def test_embeddings_added_up_early_hold_up_a_rank():
    """Right behind its own end's gradients the last rank's REDUCE_EMBED waits for the first rank's, which come last.

    The reductions behind it in its chain wait, too, and so what they free: a third stage more has no gradient buffer.
    Without reductions, or with fewer stages, nothing stands behind it that is waited for.
    """

    def early(v: int, **flags: bool) -> Program:
        program = hosted(2, v, tied_embeddings=True, **flags).build((2,))
        row = " ".join(map(str, program.rows[1]))
        row = moved(row, "1REDUCE_EMBED@1", behind=f"{2 * v - 1}STORE_GRAD@1")
        return with_row(program, 1, list(map(Instruction.parse, row.split())))

    check(early(3, data_parallel=True))
    check(early(4))
    error = rejected(early(4, data_parallel=True))
    assert error.reason.startswith("deadlock: rank ")
    assert (
        "rank 1 waits at 1B0@0, by its lanes to and from the host, for its chain of reductions; "
        "REDUCE_EMBED@1 of rank 1 waits for rank 0, which has not posted it"
    ) in error.reason


def test_a_word_is_complete_when_those_before_it_in_its_lane_are():
    """Stage 2's gradients need the first reduction alone, and leave behind stage 3's, which need the second, too."""
    row = "3B0 2B0 2REDUCE_GRAD@1 3REDUCE_GRAD@1 3STORE_GRAD@1 2STORE_GRAD@1 1B0 1REDUCE_GRAD@1 1STORE_GRAD@1 0B0"
    program = written(row, rank_of_stage=(0,) * 4, residency=EAGER, data_parallel=True)
    graph = graph_of(program, refusal=lambda _: AssertionError("it ends"))
    reductions = {node for word, node in zip(row.split(), graph.node_of[0], strict=True) if "REDUCE" in word}
    behind = [set()]  # the reductions that end before each node begins
    for before, source in zip(graph.befores[1:], graph.sources[1:], strict=True):
        behind.append(behind[before] | behind[source] | ({before, source} & reductions))
    needed = {word: len(behind[node]) for word, node in zip(row.split(), graph.node_of[0], strict=True) if "B0" in word}
    assert needed == {"3B0": 0, "2B0": 0, "1B0": 2, "0B0": 2}


def test_weights_on_the_device_are_not_fetched():
    """Without residency the words are errors, with another policy or without versions residency is."""
    assert rejected(one_rank(ROW, residency=None)).reason.startswith("the weights of this program live on the device")
    with pytest.raises(ValueError, match="the host has one version of the weights, and 2bw needs more"):
        check(replace(Schedule.preset("2bw", num_stages=2).build((2, 2)), residency=EAGER))
    with pytest.raises(ValueError, match="no instruction names one"):
        check(written("0F0 0B0", residency=EAGER))
    with pytest.raises(ValueError, match="what lanes between device and host launch is not modelled"):
        prove_hardware_queues(one_rank(ROW), num_queues=8)


def test_an_evaluation_fetches_and_updates_nothing():
    """Up through the same slots, with the version of the drained state."""
    program = hosted(1, 3, tied_embeddings=True).build_evaluation(2, version=5)
    assert check(program).num_fetches == (3,)
    row = [*program.rows[0], Instruction.parse("0UPDATE@6")]
    assert rejected(with_row(program, 0, row)).reason == "a program that evaluates updates nothing"


def test_a_period_that_leaves_an_update_behind_is_rejected():
    """The update of each batch stands in the next one: right where the drain has the last one, else not."""
    periodic = hosted(1, 1).build_periodic(1)
    check_periodic(periodic)
    [period], [fill] = periodic.period, periodic.fill
    update = Instruction.parse("0UPDATE@1")
    late = replace(periodic, fill=(fill[:-1],), period=((update, *period[:-1]),), drain=(fill[-1:],))
    check_periodic(late)  # with a drain that makes it up
    short = replace(late, period=((update, *period),), drain=((),))
    with pytest.raises(ProgramError, match=r"how many UPDATE each stage of the rank has is \[0\] before it and \[1\]"):
        check_periodic(short)


@pytest.mark.parametrize(("v", "m"), [(1, 3), (2, 3), (5, 4)])
def test_a_batch_waits_between_two_stages(v: int, m: int):
    """On one rank, beside the stored inputs: m activations, then m gradients. Several ranks send what they make."""
    report = check(hosted(1, v).build((m,)))
    assert report.peak_waiting_on_rank == (m if v > 1 else 0,)
    assert report.peak_saved_on_rank == ((v - 1) * m + 1,)
    assert check(hosted(2, v).build((m,))).peak_waiting_on_rank == (0, 0)
    soon = Schedule.preset("interleaved", num_stages=4, num_virtual_stages=4).build((m,))
    assert check(soon).peak_waiting_on_rank == (2,)  # an activation and a gradient
