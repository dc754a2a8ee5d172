"""Each proof on a program small enough to read: what it accepts, what it rejects, and what it says."""

import dataclasses

import pytest

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.check.compact import CODE_OF_KIND, KIND_OF_CODE
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.pipeline.check.examples import with_row, written
from tests.pipeline.check.mutations import in_halves

# One microbatch, two stages, flush: the smallest complete program.
FIRST = "0F0@0 0SEND_F0 0RECV_B0 0B0@0 0REDUCE_NORM@1 0STEP@1"
SECOND = "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1REDUCE_NORM@1 1STEP@1"


def rejected(program: Program, **options: object) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check(program, **options)
    return caught.value


def test_the_smallest_program_is_right():
    """The report counts what the program holds."""
    report = check(written(FIRST, SECOND), max_saved=[1, 1])
    assert (report.num_ranks, report.num_stages, report.num_batches, report.num_microbatches) == (2, 2, 1, 1)
    assert report.num_instructions == 12
    assert report.communicates and report.versioned
    assert report.peak_saved_microbatches == (1, 1)
    assert report.peak_recomputed_microbatches == (0, 0)
    assert report.live_versions == (1, 1)


def test_an_error_is_drawn():
    """Rank, position, instruction and reason stand in the message, and an arrow under the instruction."""
    error = rejected(written("0F0@0 0SEND_F0 0B0@0 0REDUCE_NORM@1 0STEP@1", SECOND))
    assert (error.rank, error.position, str(error.instruction)) == (0, 2, "0B0@0")
    assert str(error).splitlines() == [
        "rank 0, position 2, 0B0@0: the gradient of its output has not been received: no 0RECV_B0 stands before it",
        "rank 0: 0F0@0  0SEND_F0  0B0@0  0REDUCE_NORM@1  0STEP@1",
        "                         ^^^^^",
    ]


def test_what_is_missing_at_the_end_is_drawn_there():
    """A row that lacks its last STEP points past its end."""
    error = rejected(written(FIRST.removesuffix(" 0STEP@1"), SECOND))
    assert (error.rank, error.position, error.instruction) == (0, 5, None)
    assert "end of the row: 0STEP@1 is missing" in str(error)
    assert str(error).splitlines()[1].endswith("(end)")


@pytest.mark.parametrize(
    ("first", "second", "rank", "position", "reason"),
    [
        (FIRST + " 0F0@0", SECOND, 0, 6, "it had its forward already"),
        (FIRST, SECOND.replace("1F0@0 ", ""), 1, 1, "its forward has not run"),
        (FIRST, SECOND + " 1B0@0", 1, 6, "it had its backward already"),
        (FIRST, SECOND.replace("1RECV_F0 ", ""), 1, 0, "its input has not been received"),
        (FIRST.replace("0SEND_F0 ", ""), SECOND, 0, 0, "its output is never sent: the row has no 0SEND_F0"),
        (FIRST, SECOND.replace("1SEND_B0 ", ""), 1, 1, "the gradient of its input is never sent"),
        (FIRST.replace("0SEND_F0", "0SEND_F0 0SEND_F0"), SECOND, 0, 2, "its output is sent twice"),
        (FIRST + " 0F1@0", SECOND, 0, 6, "there is no microbatch 1"),
        (FIRST + " 1F0@0", SECOND, 0, 6, "stage 1 lives on rank 1"),
        (FIRST + " 2F0@0", SECOND, 0, 6, "there is no stage 2"),
        (FIRST + " 0EVICT0", SECOND, 0, 6, "its activations have been used already"),
        (FIRST, SECOND + " 1SEND_F0", 1, 6, "stage 1 has no neighbour there"),
        (FIRST.replace("0B0@0", "0R0@0 0B0@0"), SECOND, 0, 3, "the program recomputes nothing"),
        (FIRST.replace("0F0@0", "0F0@1"), SECOND, 0, 0, "flush runs batch 0 here with version 0"),
        (FIRST.replace("0F0@0", "0F0"), SECOND, 0, 0, "it names no weight version"),
        (FIRST.replace("0B0@0", "0B0@1"), SECOND, 0, 3, "has to use the version of its forward, 0"),
        (FIRST.replace("0STEP@1", "0STEP@2"), SECOND, 0, 5, "0STEP@1 is due"),
        (FIRST.replace("0REDUCE_NORM@1 ", ""), SECOND, 0, 4, "no 0REDUCE_NORM@1 stands before it"),
        (FIRST.replace("0REDUCE_NORM@1", "0REDUCE_NORM@2"), SECOND, 0, 4, "0REDUCE_NORM@1 is due"),
        (FIRST.replace("0STEP", "0REDUCE_GRAD@1 0STEP"), SECOND, 0, 5, "stage 0 has no REDUCE_GRAD"),
        (FIRST + " 0REDUCE_NORM@2", SECOND, 0, 6, "every batch stands before it already"),
        ("0F0@0 0SEND_F0 0RECV_B0 0REDUCE_NORM@1 0B0@0 0STEP@1", SECOND, 0, 3, "has backwards to come"),
    ],
)  # fmt: skip
def test_reasons(first: str, second: str, rank: int, position: int, reason: str):
    """One change to the smallest program, and what is said of it."""
    error = rejected(written(first, second))
    assert (error.rank, error.position) == (rank, position)
    assert reason in error.reason


def test_malformed_instructions():
    """What the text form cannot say but a builder could: a wrong peer, a version or a microbatch out of place."""
    program = written(FIRST, SECOND)
    changes = [
        (1, {"peer": 0}, "its peer is stage 1, not 0"),
        (1, {"version": 3}, "a transfer has no weight version"),
        (5, {"microbatch": 0}, "STEP belongs to a weight version and to no microbatch"),
        (0, {"microbatch": None}, "it names no microbatch"),
    ]
    for position, change, reason in changes:
        row = list(program.rows[0])
        row[position] = dataclasses.replace(row[position], **change)
        error = rejected(with_row(program, 0, row))
        assert (error.position, error.reason) == (position, reason)


def test_rows_and_ranks_have_to_fit():
    """A rank without a stage, or a stage on a rank without a row, is refused."""
    with pytest.raises(ValueError, match="give each rank a stage and a row"):
        check(written(FIRST, SECOND, rank_of_stage=(0, 0)))


def test_split_backward():
    """I sends the gradient of the input, W ends the microbatch; each once and in that order."""
    program = written(FIRST, "1RECV_F0 1F0@0 1I0@0 1SEND_B0 1W0@0 1REDUCE_NORM@1 1STEP@1")
    assert check(program).peak_saved_microbatches == (1, 1)
    assert "its backward has not run" in rejected(written(FIRST, SECOND.replace("1B0@0", "1W0@0 1I0@0"))).reason
    error = rejected(written(FIRST, SECOND.replace("1B0@0", "1I0@0")))
    assert error.reason == "the gradients of its weights are not computed: the row has no 1W0"


def test_transfers_pair_up_in_order():
    """A channel has no tags: where two receives stand in another order than the sends, each gets the other's tensor."""
    first = "0F0@0 0SEND_F0 0F1@0 0SEND_F1 0RECV_B0 0B0@0 0RECV_B1 0B1@0 0REDUCE_NORM@1 0STEP@1"
    second = "1RECV_F0 1RECV_F1 1F0@0 1F1@0 1B0@0 1SEND_B0 1B1@0 1SEND_B1 1REDUCE_NORM@1 1STEP@1"
    check(written(first, second, batches=(2,)))
    error = rejected(written(first, second.replace("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0"), batches=(2,)))
    assert (error.rank, error.position) == (1, 0)
    assert error.reason == "receive 0 on the channel from stage 0 would get what send 0 there sends, which is 0SEND_F0"


def test_crossed_waits_deadlock():
    """Each rank computes something before it sends what the other waits for: the circle is named."""
    first = "0F0@0 0SEND_F0 0RECV_B0 0B0@0 0F1@0 0SEND_F1 0RECV_B1 0B1@0 0REDUCE_NORM@1 0STEP@1"
    second = "1RECV_F0 1F0@0 1RECV_F1 1F1@0 1B0@0 1SEND_B0 1B1@0 1SEND_B1 1REDUCE_NORM@1 1STEP@1"
    error = rejected(written(first, second, batches=(2,)))
    assert (error.rank, error.position) == (0, 3)
    assert error.reason == (
        "deadlock: rank 0 waits at 0B0@0 for 1SEND_B0 of rank 1; rank 1 waits at 1F1@0 for 0SEND_F1 of rank 0"
    )


def test_reductions_in_crossed_order_deadlock():
    """Reductions of a rank run one after another: posted crosswise on two ranks, those of two groups never run."""
    fields = {"batches": (1, 1), "weights": "2bw", "tied_embeddings": True}
    first = (
        "0F0@0 0SEND_F0 0RECV_B0 0B0@0 0F1@0 0SEND_F1 0RECV_B1 0REDUCE_EMBED@1 0REDUCE_NORM@1 0B1@0 "
        "0REDUCE_EMBED@2 0REDUCE_NORM@2 0STEP@1 0STEP@2"
    )
    second = (
        "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1RECV_F1 1F1@0 1B1@0 1SEND_B1 "
        "1REDUCE_EMBED@1 1REDUCE_NORM@1 1STEP@1 1REDUCE_EMBED@2 1REDUCE_NORM@2 1STEP@2"
    )
    check(written(first, second, **fields))
    crossed = second.replace("1REDUCE_NORM@1 1STEP@1 1REDUCE_EMBED@2 ", "1REDUCE_EMBED@2 1REDUCE_NORM@1 1STEP@1 ")
    error = rejected(written(first, crossed, **fields))
    assert error.reason.startswith("deadlock")
    assert "its chain of reductions" in error.reason
    assert "REDUCE_EMBED@2 of rank 1 waits for rank 0, where it stands behind REDUCE_NORM@1" in error.reason
    assert "REDUCE_NORM@1 of rank 0 waits for rank 1, where it stands behind REDUCE_EMBED@2" in error.reason


def test_stash_delays_each_stage_as_pipedream_does():
    """Stage s uses the newest version it has, and that is the one p-1-s batches back."""
    first = "0F0@0 0SEND_F0 0F1@0 0SEND_F1 0RECV_B0 0B0@0 0STEP@1 0REDUCE_NORM@1 0RECV_B1 0B1@0 0STEP@2 0REDUCE_NORM@2"
    second = "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1STEP@1 1REDUCE_NORM@1 1RECV_F1 1F1@1 1B1@1 1SEND_B1 1STEP@2 1REDUCE_NORM@2"
    fields = {"batches": (1, 1), "weights": "stash"}
    assert check(written(first, second, **fields)).live_versions == (2, 1)
    stale = second.replace("1F1@1 1B1@1", "1F1@0 1B1@0")
    assert "runs batch 1 here with version 1" in rejected(written(first, stale, **fields)).reason
    late = second.replace("1STEP@1 1REDUCE_NORM@1 1RECV_F1 1F1@1", "1RECV_F1 1F1@1 1STEP@1 1REDUCE_NORM@1")
    assert "no 1STEP@1 stands before it" in rejected(written(first, late, **fields)).reason
    early = second.replace("1STEP@1 1REDUCE_NORM@1", "1REDUCE_NORM@1 1STEP@1")
    assert "no 1STEP@1 stands before it" in rejected(written(first, early, **fields)).reason
    eager = first.replace("0F1@0 0SEND_F1 0RECV_B0 0B0@0 0STEP@1", "0RECV_B0 0B0@0 0STEP@1 0F1@0 0SEND_F1")
    assert "the newest version at this stage is 1 already" in rejected(written(eager, second, **fields)).reason
    with pytest.raises(ValueError, match="give batches of 1"):
        check(written(first, second, batches=(2,), weights="stash"))


def test_saved_microbatches_stay_within_the_bound():
    """The first forward beyond the bound is named."""
    first = "0F0@0 0SEND_F0 0F1@0 0SEND_F1 0RECV_B0 0B0@0 0RECV_B1 0B1@0 0REDUCE_NORM@1 0STEP@1"
    second = "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1RECV_F1 1F1@0 1B1@0 1SEND_B1 1REDUCE_NORM@1 1STEP@1"
    program = written(first, second, batches=(2,))
    assert check(program, max_saved=[2, 1]).peak_saved_microbatches == (2, 1)
    error = rejected(program, max_saved=[1, 1])
    assert (error.rank, error.position) == (0, 2)
    with pytest.raises(ValueError, match="give one for each stage"):
        check(program, max_saved=[1])


def test_compute_only_programs():
    """Without transfers tensors move by themselves, without versions none are proved; order is, across rows."""
    report = check(written("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", batches=(2,)))
    assert not report.communicates and not report.versioned and report.live_versions == ()
    assert report.peak_saved_microbatches == (2, 1)
    error = rejected(written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", batches=(2,)))
    assert error.reason == "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0"


def test_several_stages_on_a_rank():
    """Stages on a rank exchange tensors without transfers, in the row's order; they have one chain, at the lowest."""
    computations, chain = "0F0@0 1F0@0 1B0@0 0B0@0 ", "0REDUCE_GRAD@1 0REDUCE_NORM@1 0STEP@1"
    fields = {"rank_of_stage": (0, 0), "data_parallel": True}
    assert check(written(computations + chain, **fields)).live_versions == (1, 1)
    error = rejected(written("1F0@0 0F0@0 1B0@0 0B0@0 " + chain, **fields))
    assert error.reason.startswith("deadlock: rank 0 waits at 1F0@0 for 0F0 of rank 0")
    for wrong, reason in [
        (computations + chain + " 1STEP@1", "is for all its stages and stands at the lowest, stage 0"),
        (computations + chain.replace("0REDUCE_NORM", "1REDUCE_NORM"), "stands at the lowest, stage 0"),
        (computations.replace("0B0@0 ", "") + "0REDUCE_GRAD@1 0B0@0", "has backwards to come on this rank"),
        (computations + "0REDUCE_GRAD@1 0STEP@1 0REDUCE_NORM@1", "no 0REDUCE_NORM@1 stands before it"),
        (computations + chain.replace(" 0STEP@1", ""), "0STEP@1 is missing"),
        (computations.replace("1F0@0 1B0@0", "1F0@1 1B0@1") + chain, "flush runs batch 0 here with version 0"),
    ]:
        assert reason in rejected(written(wrong, **fields)).reason
    with pytest.raises(ValueError, match="give each rank one stage"):
        check(written(computations + "0STEP@1", rank_of_stage=(0, 0), weights="stash"))


def test_a_rank_saves_what_its_stages_save_together():
    """Two stages with a peak of two each need not have it at one moment; the rank's bound is about one moment."""
    row = "0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1"
    report = check(written(row, batches=(2,), rank_of_stage=(0, 0)), max_saved=[2, 1], max_saved_on_rank=[3])
    assert (report.peak_saved_microbatches, report.peak_saved_on_rank) == ((2, 1), (3,))
    error = rejected(written(row, batches=(2,), rank_of_stage=(0, 0)), max_saved_on_rank=[2])
    assert (error.position, error.reason) == (4, "rank 0 would save 3 microbatches over its stages, and its bound is 2")
    with pytest.raises(ValueError, match="give one for each rank"):
        check(written(row, batches=(2,), rank_of_stage=(0, 0)), max_saved_on_rank=[3, 3])


def test_evaluation():
    """A program that evaluates has forwards only, all with the newest version, and saves nothing."""
    first, second = "0F9@4 0SEND_F9 0F10@4 0SEND_F10", "1RECV_F9 1F9@4 1RECV_F10 1F10@4"
    fields = {"batches": (2,), "weights": "2bw", "first_batch": 4, "first_microbatch": 9}
    report = check(written(first, second, forward_only=True, **fields))
    assert report.peak_saved_microbatches == (0, 0) and report.live_versions == (2, 2)
    for wrong, reason in [
        (second.replace("1F10@4", "1F10@3"), "evaluates version 4"),
        (second + " 1B10@4", "has forwards only"),
        (second + " 1STEP@5", "updates nothing"),
        (second.replace("1RECV_F10 1F10@4", ""), "its forward has not run"),
    ]:
        assert reason in rejected(written(first, wrong, forward_only=True, **fields)).reason
    assert "its backward has not run" in rejected(written(first, second, **fields)).reason


def test_a_kind_without_a_proof_is_no_silent_skip(monkeypatch):
    """Every kind of instruction is either proved or refused by name."""
    assert set(KIND_OF_CODE) == set(Kind)
    monkeypatch.delitem(CODE_OF_KIND, Kind.RECOMPUTE)
    program = written(FIRST, SECOND)
    error = rejected(with_row(program, 0, [*program.rows[0], Instruction(Kind.RECOMPUTE, 0, 0)]))
    assert "the checker proves nothing about R," in error.reason


HELD = (  # two stages, batches of 3, of which a prediction reads one microbatch
    "0F0@0 0F1@0 {} 0F2@0 0B2@0 0PREDICT@1 0REDUCE_NORM@1 0STEP@1",
    "1F0@0 1B0@0 {} 1F1@0 1B1@0 1F2@0 1B2@0 1PREDICT@1 1REDUCE_NORM@1 1STEP@1",
)


def test_a_prediction_reads_the_first_microbatches_and_not_as_many_others():
    """The same at all stages: where one holds the gradients of another microbatch, the stages train on two batches."""
    fields = {"batches": (3,), "weights": "2bw-provisional", "provisional_microbatches": 1}
    check(written(HELD[0].format("0B0@0 0HOLD@1 0B1@0"), HELD[1].format("1HOLD@1"), **fields))
    error = rejected(written(HELD[0].format("0B1@0 0HOLD@1 0B0@0"), HELD[1].format("1HOLD@1"), **fields))
    assert (error.rank, str(error.instruction)) == (0, "0HOLD@1")
    assert error.reason == "it reads the backwards of batch 0 before microbatch 1, and that of 1 stands before it"
    half = HELD[0].replace("0B2@0", "0W1@0 0B2@0").format("0I1@0 0B0@0 0HOLD@1")
    error = rejected(written(half, HELD[1].format("1HOLD@1"), **fields))
    assert error.reason == (
        "it reads the backwards of batch 0 before microbatch 1, and the first half, I, of 1 stands before it"
    )
    fields["provisional_microbatches"] = 2
    second = HELD[1].format("").replace("1B1@0", "1B1@0 1HOLD@1")
    check(written(HELD[0].format("0B1@0 0B0@0 0HOLD@1"), second, **fields))  # in any order


def test_half_a_backward_is_in_no_provisional_step():
    """An I alone adds the gradients of biases and norms."""
    schedule = Schedule(order="async", weights="stale-provisional", recompute=True, num_stages=2)
    program = in_halves(schedule.build((4, 4)))
    check(program)
    text = " ".join(map(str, program.rows[0]))
    late = text.replace("0F4@0~3 0SEND_F4 0R3@0 0I3@0", "0R3@0 0I3@0 0F4@0~3 0SEND_F4")
    assert late != text
    error = rejected(with_row(program, 0, [Instruction.parse(word) for word in late.split()]))
    assert str(error.instruction) == "0F4@0~3" and "the backward of 3 stands before it" in error.reason


def test_no_batch_begins_its_gradients_while_all_buffers_are_taken():
    """PipeDream's weights have one, so a stage steps before its next backward, where the run drains, too."""
    first = "0F0@0 0F1@0 0B0@0 {}0REDUCE_NORM@1 0B1@0 {}0STEP@2 0REDUCE_NORM@2"
    second = "1F0@0 1B0@0 1STEP@1 1REDUCE_NORM@1 1F1@1 1B1@1 1STEP@2 1REDUCE_NORM@2"
    fields = {"batches": (1, 1), "weights": "stash"}
    check(written(first.format("0STEP@1 ", ""), second, **fields))
    error = rejected(written(first.replace("0REDUCE_NORM@1 0B1@0 {}", "0B1@0 {}0REDUCE_NORM@1 ").format("", "0STEP@1 "),
                             second, **fields))  # fmt: skip
    assert str(error.instruction) == "0B1@0"
    assert error.reason == "all gradient buffers hold batches before it: no 0STEP@1 stands before it"


@pytest.mark.parametrize(
    ("order", "last"), [((0, 1, 2, 3, 4), None), ((4, 3, 2, 1, 0), None), ((1, 2, 3, 4, 5, 0), "0SEND_F0>1")]
)
def test_a_frozen_stage_counts_what_is_unread_in_the_order_of_its_channel(order: tuple[int, ...], last: str | None):
    """Four may be unread here, and a fifth where one was read: whichever microbatches they are."""

    def row(text: str) -> str:
        return " ".join(text.replace("#", str(each)) for each in order)

    program = written(
        " ".join(map(row, ("0F#", "0SEND_F#>1", "0SEND_F#>2"))),
        row("1RECV_F# 1F# 1SEND_F# 1RECV_B# 1B#"),
        row("2RECV_F#<0 2RECV_F#<1 2F# 2B# 2SEND_B#"),
        batches=(len(order),),
        edges=(Edge(0, 1, gradient=False), Edge(0, 2, gradient=False), Edge(1, 2)),
    )
    if last is None:
        check(program)
        return
    error = rejected(program)
    assert str(error.instruction) == last
    assert f"rank 0 waits at {last}, with 4 sent and unread, for 1RECV_F2 of rank 1" in error.reason
