"""What the relay has on the device does not grow with depth, but for the inputs that its stages save."""

import gc

import pytest
import torch
from torch import nn

from megatron.pipeline.check import check
from megatron.pipeline.program.lane_order import GRADIENT_BUFFERS, Residency
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.stages.module.rank_update import ModuleRelayUpdate
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime.relay.device_meter import DeviceMeter

WIDTH, ROWS, BATCHES = 64, 3, (4, 4)
STAGE_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Run:
    """Two batches through `num_stages` layers on one rank. The second is metered, with all that is there by then."""

    def __init__(self, num_stages, *, resident=2, update="deferred", stash="device"):
        gc.collect()
        schedule = Schedule.preset(
            "l2l", num_stages=num_stages, num_virtual_stages=num_stages, residency=Residency(resident, update, stash)
        )
        self.report = check(schedule.build(BATCHES))
        modules = {index: nn.Sequential() for index in range(num_stages)}
        for index, module in modules.items():
            module.add_module(str(index), nn.Linear(WIDTH, WIDTH))
        store = HostStore({index: dict(module.named_parameters()) for index, module in modules.items()})
        optimizer = torch.optim.AdamW(store.parameters.values(), lr=0.01)
        with DeviceMeter() as meter:
            relay = ModuleRelayUpdate(modules, store, residency=schedule.residency, optimizer=optimizer)
            self.weights, self.gradients = relay.weights.num_bytes, relay.gradients.num_bytes
            stages = [self._stage(schedule, relay, index, module) for index, module in modules.items()]
            engine = PipelineEngine(schedule, stages, relay)
            self.reports = []
            for size in BATCHES:
                meter.set_host_aside()  # what the batch before has mapped for inputs
                self.reports += engine.run_batch(size, size)
            engine.drain()
            self.stash = engine.stash
            engine.close()
        self.peak = meter.peak

    def _stage(self, schedule, relay, index, module):
        spec, last = TensorSpec((ROWS, WIDTH)), schedule.num_stages - 1
        return ModuleStage(
            module,
            index=index,
            num_stages=schedule.num_stages,
            versions=relay.weights.of_stage(index),
            source=(lambda microbatch: torch.ones(ROWS, WIDTH)) if index == 0 else None,
            loss=(lambda output, microbatch: output.square().mean()) if index == last else None,
            input_spec=spec if index else None,
            output_spec=spec if index < last else None,
            recompute=schedule.recomputes(index),
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_weights_and_gradients_are_those_that_the_checker_counts(resident, update):
    """The arena has room for as many stages as the checker finds resident, and there are two gradient buffers."""
    run = Run(6, resident=resident, update=update)
    assert run.report.peak_resident_stages == (resident,)
    assert run.weights == resident * STAGE_BYTES
    assert run.gradients == GRADIENT_BUFFERS * STAGE_BYTES
    assert run.weights + run.gradients < run.peak < run.weights + run.gradients + 4 * STAGE_BYTES


@pytest.mark.full
def test_depth_costs_the_inputs_that_are_saved():
    """By a meter that knows nothing of the store, eight layers more take the device m inputs each, and nothing else."""
    peaks = [Run(num_stages).peak for num_stages in (8, 16, 24)]
    inputs_of_a_layer = BATCHES[0] * 4 * ROWS * WIDTH
    assert [peaks[1] - peaks[0], peaks[2] - peaks[1]] == [8 * inputs_of_a_layer] * 2


@pytest.mark.full
def test_depth_costs_nothing_where_inputs_are_stashed_on_the_host():
    """By the same meter eight layers more take the device nothing. The host has a buffer for each input that is away at
    once.
    """
    runs = {num_stages: Run(num_stages, stash="host") for num_stages in (8, 16, 24)}
    peaks = [run.peak for run in runs.values()]
    assert peaks[0] == peaks[1] == peaks[2]
    m, boundary = BATCHES[0], 4 * ROWS * WIDTH
    for num_stages, run in runs.items():
        assert run.report.peak_boundaries_on_rank == (m + 3,)
        assert run.stash.num_offloaded == sum(run.report.offloaded_microbatches) == len(BATCHES) * m * (num_stages - 2)
        assert run.stash.num_bytes_offloaded == run.stash.num_offloaded * boundary
        assert run.stash.num_buffers == m * (num_stages - 2)
