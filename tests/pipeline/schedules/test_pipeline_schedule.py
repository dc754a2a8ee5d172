"""A stream gives, batch by batch, the program that would have been built had the batches been known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.instruction import BEGINS_BACKWARD, REDUCTIONS, Instruction, Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules import pipeline_schedule as stream_module
from tests.draws import draws
from tests.pipeline.strategies import Run, kinds_of, runs, schedules, sizes

Rows = list[list[Instruction]]


def extend(rows: Rows, segment) -> None:
    for rank, row in enumerate(rows):
        row += segment[rank]


@draws(80)
@given(runs(max_stages=6))
def test_segments_and_drain_are_the_program(run: Run):
    """The segments of a run's batches and its drain are the built program, for ramp-ups and wherever it begins."""
    stream = run.schedule.stream(first_batch=run.first_batch, first_microbatch=run.first_microbatch)
    program = run.build()
    assert stream.entry_versions == program.entry_versions
    rows: Rows = [[] for _ in program.rows]
    for size in run.batches:
        extend(rows, stream.start_batch(size))
    extend(rows, stream.drain())
    assert tuple(map(tuple, rows)) == program.rows
    assert stream.next_batch == run.first_batch + len(run.batches)
    assert stream.next_microbatch == run.first_microbatch + sum(run.batches)


@draws(50)
@given(st.data())
def test_drains_in_between(data: st.DataObject):
    """With drains between, it is one program after another, each from where the one before it ended."""
    schedule = data.draw(schedules(max_stages=4))
    stretches = data.draw(st.lists(st.lists(sizes(schedule), min_size=1, max_size=4), min_size=1, max_size=4))
    stream = schedule.stream()
    rows: Rows = [[] for _ in range(schedule.num_ranks)]
    expected: Rows = [[] for _ in range(schedule.num_ranks)]
    for stretch in stretches:
        program = schedule.build(stretch, first_batch=stream.next_batch, first_microbatch=stream.next_microbatch)
        assert stream.entry_versions == program.entry_versions
        for size in stretch:
            extend(rows, stream.start_batch(size))
        extend(rows, stream.drain())
        extend(expected, program.rows)
    assert rows == expected


@draws(40)
@given(runs(max_stages=5))
def test_borders(run: Run):
    """A segment holds its batch's forwards, receives for nothing that comes later, and under 2bw and the like a STEP at
    its end; a prediction, and the chain that waits for it, follow.
    """
    stream = run.schedule.stream(first_batch=run.first_batch, first_microbatch=run.first_microbatch)
    for index, size in enumerate(run.batches):
        microbatches = list(range(stream.next_microbatch, stream.next_microbatch + size))
        for rank, row in enumerate(stream.start_batch(size)):
            for stage in run.schedule.stages_of(rank):
                forwards = [each.microbatch for each in kinds_of(row, Kind.FORWARD) if each.stage == stage]
                assert forwards == microbatches
            for receive, needs in ((Kind.RECV_F, {Kind.FORWARD}), (Kind.RECV_B, BEGINS_BACKWARD)):
                received = {each.microbatch for each in kinds_of(row, receive)}
                assert received <= {each.microbatch for each in kinds_of(row, *needs)}
            steps = kinds_of(row, Kind.STEP)
            if delay := run.schedule.weights.delay:
                due = run.first_batch + index + 1 - delay
                assert [each.version for each in steps] == ([due] if due > run.first_batch else [])
                behind = row[row.index(steps[0]) + 1 :] if steps else ()
                predicts = run.schedule.weights.predicts
                assert [each.kind for each in behind[:1]] == [Kind.PREDICT] * (predicts and bool(steps))
                assert all(each.kind in REDUCTIONS and each.version == due + 1 for each in behind[1:])


@draws(40)
@given(runs(max_stages=5))
def test_report_lag(run: Run):
    """By the end of batch i's segment every rank has stepped batch i - report_lag and posted its norm."""
    stream = run.schedule.stream(first_batch=run.first_batch, first_microbatch=run.first_microbatch)
    done = [set() for _ in range(run.schedule.num_ranks)]
    for batch, size in enumerate(run.batches, start=run.first_batch):
        segment = stream.start_batch(size)
        reported = batch - run.schedule.report_lag
        for rank in range(run.schedule.num_ranks):
            done[rank] |= {
                (each.kind, each.version - 1) for each in kinds_of(segment[rank], Kind.STEP, Kind.REDUCE_NORM)
            }
            if reported >= run.first_batch:
                assert {(Kind.STEP, reported), (Kind.REDUCE_NORM, reported)} <= done[rank]


def test_a_drain_without_batches_is_empty():
    """A drained stream has nothing to drain."""
    stream = Schedule.preset("2bw", num_stages=3).stream(first_batch=7, first_microbatch=50)
    assert [list(row) for row in stream.drain()] == [[], [], []]
    stream.start_batch(3)
    assert any(stream.drain())
    assert [list(row) for row in stream.drain()] == [[], [], []]
    assert (stream.next_batch, stream.next_microbatch) == (8, 53)


def test_a_refused_batch_changes_nothing():
    """After a batch of an impossible size the stream stands where it stood."""
    stream = Schedule.preset("2bw", num_stages=3).stream()
    with pytest.raises(ValueError, match="at least 3"):
        stream.start_batch(2)
    assert (stream.next_batch, stream.next_microbatch) == (0, 0)
    assert len(stream.start_batch(3)) == 3


def test_windows_are_proved_once(monkeypatch: pytest.MonkeyPatch):
    """However long a run is, the checker proves a few windows: fill, second batch, steady state."""
    from megatron.pipeline.schedules import pipeline_schedule as module

    proved = []
    monkeypatch.setattr(module, "check", lambda program, **_: proved.append(program.batches))
    module._proved.cache_clear()
    stream = Schedule.preset("2bw", num_stages=2).stream()
    for size in [2] * 20 + [3] * 20:
        stream.start_batch(size)
    stream.drain()
    assert proved == [(2,), (2, 2), (2, 2), (2, 3), (3, 3)]
    module._proved.cache_clear()


@pytest.mark.parametrize("preset", ["gpipe", "flush", "2bw", "pipedream"])
def test_an_evaluation_is_proved_once_and_uses_the_newest_version(preset: str, monkeypatch: pytest.MonkeyPatch):
    """Wherever a drained run evaluates, it executes the built evaluation with its newest version, checked once."""
    proved = []
    monkeypatch.setattr(stream_module, "check", lambda program, **bound: proved.append(program.forward_only))
    stream_module._proved_evaluation.cache_clear()
    schedule = Schedule.preset(preset, num_stages=3)
    for first_batch in (0, 7):
        stream = schedule.stream(first_batch=first_batch, first_microbatch=5 * first_batch)
        rows = stream.evaluation(4)
        assert tuple(tuple(row) for row in rows) == schedule.build_evaluation(4, version=first_batch).rows
    assert proved == [True]
    stream_module._proved_evaluation.cache_clear()
