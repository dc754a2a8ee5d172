"""Emulated lanes: words take their stage's time, beside one another where the program says so."""

import itertools

import pytest

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.contract.trace import Tracer, timeline
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedRelayUpdate, EmulatedStage, EmulatedTimes
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs

COSTS = Costs(
    fetch=(1e-3, 3e-3, 2e-3),
    store=(2e-3, 1e-3, 3e-3),
    update=(3e-3, 2e-3, 1e-3),
    reduce_grad=(1e-3, 2e-3, 4e-3),
    step=(1e-3, 1e-3, 2e-3),
)
"""Each stage's words have times of their own."""


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_each_word_takes_the_time_of_its_stage(update):
    """Where a computation takes no time, every span of a lane or the chain is its sleep; the run is the program, and a
    STEP sleeps for all stages of the rank.
    """
    schedule = Schedule.preset(
        "l2l", num_stages=3, num_virtual_stages=3, residency=Residency(2, update), data_parallel=True
    )
    seconds = COSTS.seconds(3)
    stages = [EmulatedStage(index=i, num_stages=3, times=EmulatedTimes(0.0, 0.0), payload_bytes=4) for i in range(3)]
    engine = PipelineEngine(
        schedule, stages, EmulatedRelayUpdate(seconds, stages=range(3)), ranks=[0], tracer=Tracer(num_batches=2)
    )
    for _ in range(2):
        engine.run_batch(2, 2)
    engine.drain()
    run = timeline([engine.trace()])
    engine.close()
    assert [tuple(row) for row in run.rows] == [tuple(row) for row in schedule.build((2, 2)).rows]
    words = (Kind.FETCH, Kind.FREE, Kind.STORE_GRAD, Kind.UPDATE, Kind.REDUCE_GRAD)
    spans = [span for span in run.spans if span.instruction.kind in words]
    assert {(span.instruction.kind, span.instruction.stage) for span in spans} == set(
        itertools.product(words, range(3))
    )
    for span in spans:
        due = seconds[span.instruction.kind][span.instruction.stage]
        assert due <= span.end - span.start < due + 0.5  # woken late on a busy machine, but never early
    steps = [span.end - span.start for span in run.spans if span.instruction.kind is Kind.STEP]
    assert len(steps) == 2 and min(steps) >= 4e-3
