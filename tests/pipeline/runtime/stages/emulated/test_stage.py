"""Emulated stages: they take the time and move the bytes that they say, under the real runtime."""

import pytest
import torch

from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.stages.emulated import EmulatedStage, EmulatedTimes
from megatron.pipeline.schedules import Schedule
from papers.ftpipe.asynchronous import Contender
from tests import workers

CASE = "tests.pipeline.runtime.stages.emulated.emulated_cases:run"
FORWARD, BACKWARD = 0.02, 0.04


@pytest.mark.parametrize(("preset", "batches"), [("flush", (2, 3, 2)), ("2bw", (2, 3, 2)), ("pipedream", (1,) * 5)])
def test_emulated_stages_take_their_time_and_execute_the_program(preset, batches):
    """Every forward and backward lasts at least as long as told, chains of real all-reduces included, whether the norm
    comes before the step or after it.
    """
    outcomes = workers.run(2, CASE, preset=preset, batches=batches, forward=FORWARD, backward=BACKWARD)
    ties = preset != "pipedream"
    program = Schedule.preset(preset, num_stages=2, data_parallel=True, tied_embeddings=ties).build(batches)
    for rank, (spans, reports) in enumerate(outcomes):
        assert [text for text, _ in spans] == [str(instruction) for instruction in program.rows[rank]]
        least = {"F": FORWARD, "B": BACKWARD}
        for instruction, (_, seconds) in zip(program.rows[rank], spans, strict=True):
            assert seconds >= least.get(instruction.kind.value, 0.0)
        assert [report.batch for report in reports] == list(range(len(batches)))
        assert all(report.grad_norm > 0 for report in reports)


@pytest.mark.parametrize("weights", [pytest.param("stale-predicted", marks=pytest.mark.full), "stale-provisional"])
def test_emulated_stages_of_a_graph_have_no_weights_that_could_be_ahead(weights):
    """They execute such programs, and take the time of their computations."""
    schedule = Schedule(order="async", weights=weights, recompute=True, num_stages=4, rank_of_stage=(0, 1, 0, 1))
    contender = Contender("", schedule, (0.005,) * 4, (0.01,) * 4, num_microbatches=3, num_batches=4, num_before=3)
    seconds = workers.run(2, "papers.ftpipe.asynchronous:measure", contender=contender, payload_bytes=64)
    assert any(each.ahead for row in schedule.build((3,) * 7).rows for each in row)
    assert min(seconds) >= 0.9 * 3 * 2 * (0.005 + 0.01)


def test_an_emulated_stage_saves_and_moves_bytes_of_a_given_size():
    """Counted from the forward to the eviction, then as the buffer that it is loaded into, until the backward."""
    memory = ActivationMemory()
    times = EmulatedTimes(forward=0.0, backward=0.0)
    stage = EmulatedStage(
        index=0, num_stages=2, times=times, payload_bytes=64, activation_bytes=1000, activation_memory=memory
    )
    microbatch = Microbatch(0, 0, 0, 1)
    for _ in range(3):
        stage.forward(microbatch, None)
        assert stage.saved_bytes(microbatch) == memory.current_bytes == 1000
        eviction = stage.evict(microbatch)
        assert memory.current_bytes == eviction.num_bytes == 1000
        buffer = eviction.pack()
        assert len(buffer) == memory.current_bytes == 1000 and stage.saved_bytes(microbatch) == 0
        stage.load(microbatch, buffer)
        del buffer
        assert stage.saved_bytes(microbatch) == memory.current_bytes == 1000
        stage.backward(microbatch, None)
        assert memory.current_bytes == 0
    assert memory.peak_bytes == 1000 and memory.pool.num_buffers == 1


def test_an_emulated_stage_without_an_activation_memory_counts_and_moves_nothing():
    """It says so, as real stages do, in place of a size of 0."""
    times, microbatch = EmulatedTimes(forward=0.0, backward=0.0), Microbatch(0, 0, 0, 1)
    stage = EmulatedStage(index=0, num_stages=2, times=times, payload_bytes=64, activation_bytes=1000)
    stage.forward(microbatch, None)
    for ask in (stage.saved_bytes, stage.evict, lambda each: stage.load(each, torch.zeros(1000, dtype=torch.uint8))):
        with pytest.raises(RuntimeError, match="stage 0 has no activation_memory"):
            ask(microbatch)
