"""Traces: bounded, gathered, and in both forms."""

import json
import struct
from itertools import pairwise

import pytest

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.contract import trace
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime.stages.module.reference import Training


def test_a_measured_run_is_a_timeline_of_its_program(tmp_path):
    """Gathered on rank 0, the trace holds the program's instructions per rank, with plausible times, in both forms."""
    batches = (2, 4, 2)
    outcomes = workers.run(
        2,
        "tests.pipeline.runtime.stages.module.module_cases:run",
        preset="2bw",
        training=Training(batches=batches),
        tracing=True,
    )
    traces = outcomes[0].traces
    assert outcomes[1].traces is None
    measured = trace.timeline(traces)
    program = Schedule.preset("2bw", num_stages=2).build(batches)
    assert tuple(map(tuple, measured.rows)) == program.rows
    assert measured.batches == batches and 0 < measured.makespan < 60
    for rank in range(2):
        computing = list(measured.computations(rank))
        assert all(one.end <= other.start for one, other in pairwise(computing))
    forward = next(span for span in measured.spans if str(span.instruction) == "0F0@0")
    assert any(str(span.instruction) == "1F0@0" and span.start > forward.start for span in measured.spans)

    trace.write_chrome_trace(traces, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["tid"] for event in spans} == {0, 1, 2}
    assert any(
        event["name"] == "1B3@0" and event["args"] == {"stage": 1, "microbatch": 3, "version": 0} for event in spans
    )
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)


def test_a_transfer_that_is_waited_for_lasts_as_long():
    """From when both ends have posted it until the computation that needs it goes on, at both ends; one that arrives
    in time is its posting.
    """

    def rank(number, *spans):
        made = tuple(trace.TraceSpan(track, Instruction.parse(text), start, end) for track, text, start, end in spans)
        return trace.RankTrace(number, (0, 1), (0, 1), (trace.BatchExtent(0, 0, 2),), made)

    sender = rank(0, ("compute", "0F0@0", 0.0, 1.0), ("compute", "0SEND_F0", 1.0, 1.1), ("compute", "0F1@0", 1.1, 2.0),
                  ("compute", "0SEND_F1", 2.0, 2.1))  # fmt: skip
    receiver = rank(1, ("compute", "1RECV_F0", 0.0, 0.1), ("compute", "1RECV_F1", 0.1, 0.2),
                    ("wait", "1F0@0", 0.2, 1.5), ("compute", "1F0@0", 1.5, 4.0),
                    ("compute", "1F1@0", 4.0, 6.0))  # fmt: skip
    measured = trace.timeline([sender, receiver])
    spans = {str(span.instruction): (span.start, span.end) for span in measured.spans}
    assert spans["0SEND_F0"] == spans["1RECV_F0"] == (1.1, 1.5)
    assert spans["0SEND_F1"] == (2.0, 2.1) and spans["1RECV_F1"] == (0.1, 0.2)


class _Event:
    """A CUDA event of a device whose clock the test sets."""

    device_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.ms = self.device_ms

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return struct.unpack("f", struct.pack("f", end.ms - self.ms))[0]


def test_marks_of_a_device_are_exact_after_days(monkeypatch):
    """CUDA tells times between events with 24 bits; a span of a run of two days is exact to a microsecond."""
    monkeypatch.setattr(trace.torch.cuda, "Event", _Event)
    monkeypatch.setattr(trace.torch.cuda, "synchronize", lambda: None)
    tracer = trace.Tracer(clock=trace.CudaClock())
    tracer.begin_batch(trace.BatchExtent(0, 0, 1))
    marks = []
    for milliseconds in (0.0, 1.5, 4.25):
        monkeypatch.setattr(_Event, "device_ms", 48 * 3.6e6 + milliseconds)
        marks.append(tracer.now())
    tracer.record((Instruction.parse("0F0@0"), *marks))
    waited, computed = tracer.spans()
    assert waited.end - waited.start == pytest.approx(1.5e-3, abs=1e-6)
    assert computed.end - computed.start == pytest.approx(2.75e-3, abs=1e-6)


def test_what_is_kept_between_halves_is_a_counter():
    """Of the last batches, at the moments at which it changes, in microseconds from the first span."""
    tracer = trace.Tracer(num_batches=1)
    for batch, bytes_kept in enumerate(((7,), (100, 300, 0))):
        tracer.begin_batch(trace.BatchExtent(batch, batch, 1))
        tracer.record((Instruction.parse(f"0I{batch}@0"), tracer.now(), tracer.now(), tracer.now()))
        for each in bytes_kept:
            tracer.record_deferred(each)
    rank = trace.RankTrace(3, (3,), (0,), tracer.batches(), tracer.spans(), deferred_bytes=tracer.deferred_bytes())
    counters = [event for event in trace.chrome_trace([rank])["traceEvents"] if event["ph"] == "C"]
    assert [event["args"]["bytes"] for event in counters] == [100, 300, 0]
    assert {(event["name"], event["pid"]) for event in counters} == {("bytes between I and W", 3)}
    # Spans and counters are moved to the time of day apart, which a float has to a quarter of a microsecond.
    assert -1 < counters[0]["ts"] <= counters[-1]["ts"] < 1e6


def test_only_the_last_batches_are_kept():
    """Memory is bounded; of the batch before the first kept one, the tail does not reach the timeline."""
    tracer = trace.Tracer(num_batches=2)
    for batch in range(5):
        tracer.begin_batch(trace.BatchExtent(batch, batch, 1))
        for text in (f"0B{batch - 1}@0", f"0STEP@{batch}", f"0F{batch}@0")[0 if batch else 2 :]:
            tracer.record((Instruction.parse(text), float(batch), float(batch), batch + 0.5))
    rank = trace.RankTrace(0, (0,), (0,), tracer.batches(), tracer.spans())
    assert len(rank.spans) == 6
    measured = trace.timeline([rank])
    assert [str(instruction) for instruction in measured.rows[0]] == ["0F3@0", "0B3@0", "0STEP@4", "0F4@0"]
    assert measured.first_batch == 3 and measured.batches == (1, 1)
    with pytest.raises(ValueError, match="no batch was traced"):
        trace.timeline([])
