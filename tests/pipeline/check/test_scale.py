"""The checker is quick to start and quick to run."""

import gc
import json
import sys
import time

import pytest

from benchmarks import program_scale
from megatron.pipeline.check import check, check_periodic
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule


@pytest.mark.full
@pytest.mark.alone
def test_a_large_program_is_proved_in_seconds():
    """p=64, m=256: 190,000 instructions take a few CPU seconds, building included."""
    start = time.process_time()
    report = check(Schedule.preset("2bw", num_stages=64).build((256,) * 2))
    assert report.num_instructions > 190_000
    assert time.process_time() - start < 10


def test_the_benchmark_reports_growth(capsys):
    """Piped, it prints one JSON object with the fitted exponents and a line for each program."""
    program_scale.main(["--stages", "2", "4", "--microbatches", "8", "64", "--repeat", "1"])
    report = json.loads(capsys.readouterr().out)
    sizes = [(each["num_stages"], each["num_microbatches"]) for each in report["programs"]]
    assert sizes == [(2, 8), (2, 64), (4, 8), (4, 64)]
    assert set(report) >= {"schedule", "exponent", "build_exponent", "check_exponent"}


def count_operations(function, *arguments, **options) -> int:
    """Bytecodes that Python executes in a call: the same on any machine, however busy."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    def counted(code, offset):
        nonlocal count
        count += 1

    if monitoring := getattr(sys, "monitoring", None):  # from Python 3.12 on; 3.13 traces few bytecodes
        tool, instruction = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
        monitoring.use_tool_id(tool, "count_operations")
        monitoring.register_callback(tool, instruction, counted)
        monitoring.set_events(tool, instruction)
        try:
            function(*arguments, **options)
        finally:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
        return count
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments, **options)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.full
@pytest.mark.parametrize("name", ["flush", "pipedream"])
def test_work_grows_with_the_instructions(name):
    """32 times the stages are 32 times the work: no instruction costs more for the other ranks that there are."""
    costs = []
    for num_stages in (8, 256):
        program = Schedule.preset(name, num_stages=num_stages).build((1,))
        costs.append(count_operations(check, program) / program.num_instructions)
    assert costs[1] < 1.1 * costs[0]


@pytest.mark.full
def test_work_of_periods_grows_with_the_instructions():
    costs = []
    for num_stages in (8, 256):
        periodic = Schedule.preset("flush", num_stages=num_stages).build_periodic(1)
        costs.append(count_operations(check_periodic, periodic) / periodic.unroll(1).num_instructions)
    assert costs[1] < 1.1 * costs[0]


def seconds_a_comment(number: int) -> float:
    """Least processor time, of two readings, for each of so many leading comments of a file."""
    text, times = "# a note\n" * number + "0F0,0B0\n", []
    for _ in range(2):
        gc.collect()
        gc.disable()
        start = time.process_time()
        Program.from_csv(text)
        times.append(time.process_time() - start)
        gc.enable()
    return min(times) / number


@pytest.mark.full
def test_comments_of_a_file_are_passed_over_once():
    """More comments cost as much each: a list whose head is taken off moves all the rest each time."""
    assert seconds_a_comment(200_000) < 5 * seconds_a_comment(6_000)
