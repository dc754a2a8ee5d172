"""Optimistic steps: programs that accept them and programs that refuse them are proved, and mistakes are found."""

import pytest

from megatron.pipeline.check import ProgramError, check, check_periodic
from megatron.pipeline.program.instruction import BACKWARDS, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule, Schedule
from megatron.pipeline.schedules.passes.validation import continuation, refusing
from megatron.pipeline.simulate import Costs, simulate

ORDERS = ["gpipe", "flush", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zbv", "v-half", "v-min"]


def made(name: str, num_ranks: int, **choices: object) -> Schedule:
    virtual = 2 if name.startswith(("interleaved", "zbv", "v-")) else 1
    return Schedule.preset(
        name, num_stages=num_ranks * virtual, num_virtual_stages=virtual, **{"optimistic": True, **choices}
    )


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, (4, 4)), (3, (6, 3)), (4, (8, 8))])
def test_each_order_validates_its_steps_and_can_go_back(name, num_ranks, sizes):
    """For any number of batches, and batches of two sizes; at most one step of a rank is not validated."""
    schedule = made(name, num_ranks)
    program = schedule.build(sizes)
    assert check(program).peak_unvalidated_steps == (1,) * num_ranks
    check_periodic(schedule.build_periodic(sizes[0]))
    assert Program.from_csv(program.to_csv()) == program
    stream = schedule.stream()
    for size in sizes:
        stream.start_batch(size)
    assert len(stream.refused()) == num_ranks  # which proves it
    stream.drain()
    assert [[each.kind for each in row] for row in stream.refused()] == [[Kind.ROLLBACK]] * num_ranks


@pytest.mark.parametrize("name", ORDERS)
def test_what_follows_a_refusal_is_the_flush(name):
    """Behind ROLLBACK each rank has the words that the same batch has without optimistic steps, but for the place of
    its STEP, which is before REDUCE_NORM."""
    optimistic, plain = (made(name, 2, optimistic=each).stream() for each in (True, False))
    for stream in (optimistic, plain):
        stream.start_batch(4)
    expected = plain.start_batch(4)
    optimistic.start_batch(4)
    for rank, row in enumerate(optimistic.refused()):
        place = next(place for place, each in enumerate(row) if each.kind is Kind.ROLLBACK)
        assert all(each.kind.row.receives for each in row[:place])
        assert [*row[place + 1 : -2], *reversed(row[-2:])] == list(expected[rank])


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_fill_and_drain_of_zbv_overlap(num_ranks):
    """With F, I and W of one unit, steps of one, and a norm and transfers that take time: over 20 batches of 3p
    microbatches each rank idles for less than 1% of the time, and for 5% and more if it waits for the norm."""
    costs = Costs(forward=1, backward=2, step=0.5, reduce_norm=1, latency=0.02)
    bubbles = [
        simulate(made("zbv", num_ranks, optimistic=each).build((3 * num_ranks,) * 20), costs).bubble
        for each in (True, False)
    ]
    assert bubbles[0] < 0.01 < 0.05 < bubbles[1]


# --- mistakes


def rows_of(schedule: Schedule, sizes: tuple[int, ...] = (4, 4)) -> tuple[Program, list[list]]:
    program = schedule.build(sizes)
    return program, [list(row) for row in program.rows]


def place_of(row: list, kind: Kind, version: int) -> int:
    return next(place for place, each in enumerate(row) if (each.kind, each.version) == (kind, version))


def refused(program: Program, rows: list[list], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check(program.with_rows(tuple(map(tuple, rows))))


def test_no_backward_comes_before_the_validate():
    """The gradient buffer has the gradients that a refused step needs again."""
    program, rows = rows_of(made("zbv", 2))
    row = rows[1]
    word = row.pop(place_of(row, Kind.VALIDATE, 1))
    first = next(place for place, each in enumerate(row) if each.kind in BACKWARDS and each.version == 1)
    row.insert(first + 1, word)
    refused(program, rows, r"all gradient buffers hold batches before it: no 1VALIDATE@1 stands before it")


def test_nothing_before_the_validates_waits_for_what_is_behind_them():
    """A rank that validates earlier than what it has sent for would leave the other's receive in flight."""
    program, rows = rows_of(made("flush", 2))
    row = rows[0]
    word = row.pop(place_of(row, Kind.VALIDATE, 1))
    row.insert(place_of(row, Kind.REDUCE_NORM, 1) + 1, word)
    refused(
        program, rows, r"rank 1, .* 1RECV_F4: it stands before the VALIDATE@1 of its rank, and 0SEND_F4 behind that"
    )


def test_a_step_is_validated_once_before_the_next_chain():
    program, rows = rows_of(made("zb-h1", 2))
    place = place_of(rows[0], Kind.VALIDATE, 1)
    word = rows[0].pop(place)
    refused(program, rows, r"no 0VALIDATE@1 stands before it")
    rows[0][place:place] = [word, word]
    refused(program, rows, r"each batch has one, in order, and 0VALIDATE@2 is due")


def test_words_of_optimistic_steps_are_for_optimistic_programs():
    program, rows = rows_of(made("flush", 2))
    plain = made("flush", 2, optimistic=False).build((4, 4))
    refused(plain, rows, r"0REDUCE_NORM|0STEP")
    rows = [list(row) for row in plain.rows]
    rows[0].append(program.rows[0][-1])
    refused(plain, rows, r"by the program's flags the chain of stage 0 has no VALIDATE")


def going_back() -> tuple[Program, list[list]]:
    """zbv on two ranks, where rank 1 has still to receive the last forward that rank 0 has sent before its VALIDATE."""
    schedule = made("zbv", 2)
    built = schedule.build_in_segments((4, 4))
    begins, ends = ([border[place] for border in built.borders] for place in (1, 2))
    program = refusing(built.program, 1, continuation(built.program, 1, begins, ends), ends)
    check(program)
    return program, [list(row) for row in program.rows]


def test_all_go_back_with_nothing_in_flight():
    program, rows = going_back()
    place = place_of(rows[1], Kind.ROLLBACK, 1)
    assert str(rows[1][place - 1]) == "1RECV_F6"
    del rows[1][place - 1]
    refused(program, rows, r"stage 1 does not receive before it all that stage 0 sends before it")


def test_all_ranks_go_back_alike():
    program, rows = going_back()
    del rows[0][place_of(rows[0], Kind.ROLLBACK, 1)]
    refused(program, rows, r"rank 0, .* every rank rolls back the same step, once, and this one does not")


def test_the_same_batch_begins_again():
    program, rows = going_back()
    place = place_of(rows[0], Kind.ROLLBACK, 1)
    rows[0][place + 1], rows[0][place + 3] = rows[0][place + 3], rows[0][place + 1]
    refused(program, rows, r"batch 1 does not begin again with it behind the ROLLBACK")


# --- choices that do not go together


def test_a_file_of_optimistic_steps_is_proved_and_not_trained_with():
    program = Program.from_csv(made("zbv", 2).build((4, 4, 4)).to_csv())
    check(program)
    with pytest.raises(ValueError, match=r"\(optimistic: yes\), .* name a schedule and add --optimistic-steps"):
        ProgramSchedule.of(program)


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("2bw", {}, "2bw takes its steps beside later batches already; drop one of them"),
        ("bpipe", {}, "balance moves activations, which may be under way when a step is undone"),
        ("flush", {"num_frozen": 1}, "a frozen prefix lets ranks run ahead of the steps of other ranks"),
    ],
)
def test_choices_that_do_not_go_together(name, choices, message):
    with pytest.raises(ValueError, match=message):
        made(name, 4, **choices)
