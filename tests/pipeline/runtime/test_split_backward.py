"""Programs whose backwards are split into I and W, on the real runtime: small modules against one process, and sleeping
stages.

The orders are in no table of the project: W at once behind its I, some microbatches later, behind another batch's I,
all at the end, and only of some microbatches.
"""

import re

import pytest
import torch

from megatron.pipeline.check import check
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.runtime.stages.emulated import EmulatedTimes
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape
from tests.pipeline.runtime.made_up_orders import SPLIT, registered
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training
from tests.pipeline.runtime.stages.module.test_pipeline import assert_same
from tests.pipeline.runtime.test_graph import assert_same as assert_same_graph

CHAINS = [name for name in SPLIT if name != "split-interleaved"]


def run_module(preset, **options):
    from tests.pipeline.runtime.stages.module.module_cases import run

    with registered():
        return run(preset, **options)


def run(num_ranks, preset, training, **options):
    return workers.run(num_ranks, f"{__name__}:run_module", preset=preset, training=training, timeout=60, **options)


@pytest.mark.parametrize("preset", CHAINS)
def test_split_backwards_are_ordinary_training(preset):
    """Wherever W stands: losses and parameters are bit-equal to one process, drains and evaluations included. Where a
    whole backward stands between two halves, gradients are added up in another order.
    """
    training = Training(batches=(4, 4, 8, 8, 4), warmup=3)
    outcomes = run(2, preset, training, drains=(1, 3), evaluate=2)
    assert_same(outcomes, reference.train(training, delay=0), exact=preset != "split-in-part")


@pytest.mark.parametrize("preset", ["2bw-split-late", "2bw-split-in-part"])
def test_halves_of_two_batches_alternate(preset):
    """Without flushes an I of the next batch stands before a W of this one: each has its batch's gradients."""
    training = Training(batches=(4, 4, 4, 8, 4, 4), warmup=4)
    expected, exact = reference.train(training, delay=1), preset != "2bw-split-in-part"
    assert_same(run(2, preset, training), expected, exact=exact)
    assert_same(run(2, preset, training, drains=(1, 4)), expected, exact=exact)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "preset", "training", "options"),
    [
        (2, "split-late", Training(batches=(4,) * 4, tied=True, clip_grad=0.05), {}),
        (4, "zb-h1", Training(batches=(2, 4, 4), num_replicas=2, clip_grad=0.05), {}),
        (4, "zb-h1", Training(batches=(6, 8, 4)), {}),
        (4, "zb-h2", Training(batches=(6, 8, 4)), {}),
        (2, "interleaved-zb", Training(batches=(4, 6)), {"num_virtual_stages": 2}),
        (4, "v-half", Training(batches=(7, 8, 9), tied=True), {"num_virtual_stages": 2}),
        (4, "v-min", Training(batches=(7, 8, 9), tied=True), {"num_virtual_stages": 2}),
        (4, "zbv", Training(batches=(7, 8, 9), tied=True), {"num_virtual_stages": 2}),
        (2, "split-interleaved", Training(batches=(4, 8)), {"num_virtual_stages": 2}),
        (2, "split-at-the-end", Training(batches=(4, 4), same_dropout=0.2), {"recompute": True}),
        (1, "2bw-split-late", Training(batches=(4,) * 5, poisoned_microbatch=5), {}),
    ],
)
def test_split_backwards_with_all_else(num_ranks, preset, training, options):
    """Tied weights, replicas, several stages a rank, recompute, a batch that overflows: as in one process."""
    expected = reference.train(training, delay=int(preset.startswith("2bw")))
    outcomes = run(num_ranks, preset, training, **options)
    names = {name for outcome in outcomes for name in outcome.parameters}
    for outcome in outcomes:
        losses = [report.losses["loss"] for report in outcome.reports]
        assert losses == pytest.approx(expected.losses, rel=1e-6, nan_ok=True)
        for name, tensor in outcome.parameters.items():
            of = reference.FIRST_WEIGHT if training.tied and name == reference.LAST_WEIGHT else name
            torch.testing.assert_close(tensor, expected.parameters[of], rtol=1e-5, atol=1e-6)
    assert names >= set(expected.parameters)


SKIPS = Shape((Edge(0, 1), Edge(0, 2), Edge(1, 2)), (0, 1, 2))


def run_graph(shape, **options):
    with registered():
        return graph_cases.run(shape, **options)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.full)])
def test_stages_of_a_graph_split_their_backwards(recompute):
    """As in a chain; an I hands back gradients over several edges."""
    options = {"preset": "split-late", "batches": (3, 2, 4), "recompute": recompute}
    outcomes = workers.run(3, f"{__name__}:run_graph", shape=SKIPS, timeout=60, **options)
    assert_same_graph(outcomes, graph_cases.in_one_process(SKIPS, options["batches"]))


def run_emulated(preset, num_microbatches):
    """Seconds of each computation by its word, and the peaks of what this rank saves and keeps."""
    from torch import distributed as dist

    from megatron.pipeline.runtime.contract.trace import COMPUTE, Tracer
    from megatron.pipeline.runtime.engine import PipelineEngine
    from megatron.pipeline.runtime.stages.emulated import EmulatedStage, EmulatedUpdate

    rank, p = dist.get_rank(), dist.get_world_size()
    with registered():
        engine = PipelineEngine(
            Schedule.preset(preset, num_stages=p),
            EmulatedStage(index=rank, num_stages=p, times=TIMES, payload_bytes=64, deferred_bytes=1000),
            EmulatedUpdate(),
            tracer=Tracer(),
        )
        for _ in range(2):
            engine.run_batch(num_microbatches, num_microbatches)
        engine.drain()
    seconds: dict[str, list[float]] = {}
    for span in engine.trace().spans:
        if span.track == COMPUTE:
            seconds.setdefault(span.instruction.kind.value, []).append(span.end - span.start)
    peaks = engine.saved.peaks, engine.saved.deferred_peaks, engine.saved.deferred_bytes.peak
    dist.barrier()
    engine.close()
    return seconds, peaks


TIMES = EmulatedTimes(forward=0.004, backward=0.02, backward_input=0.012, backward_weight=0.008)


def test_sleeping_stages_take_the_time_of_each_half():
    """And the engine counts: saved from F to the end of W, deferred from the end of I on, as the checker does."""
    with registered():
        proved = check(Schedule.preset("split-late", num_stages=2).build((6, 6)))
    for seconds, peaks in workers.run(2, f"{__name__}:run_emulated", preset="split-late", num_microbatches=6):
        for word, least in (("F", 0.004), ("I", 0.012), ("W", 0.008)):
            assert len(seconds[word]) == 12 and min(seconds[word]) >= least
        rank = min(peaks[0])
        assert peaks == ({rank: proved.peak_saved_microbatches[rank]}, {rank: 3}, 3000)
        assert proved.peak_deferred_microbatches[rank] == 3


def test_the_times_of_halves_come_together():
    assert EmulatedTimes(1.0, 3.0).halves == (1.5, 1.5)
    with pytest.raises(ValueError, match="for both halves"):
        EmulatedTimes(1.0, 3.0, backward_input=1.0)


def run_rows(rows, *, whole_stages=False):
    """What the executor says of a row, on the only stage of a module pipeline."""
    from megatron.pipeline.program.instruction import Instruction
    from megatron.pipeline.runtime.contract.stage import BatchInfo
    from tests.pipeline.runtime.stages.module.module_cases import Pipeline

    pipeline = Pipeline("2bw", Training(batches=(2, 2)), predict="PREDICT" in rows)
    executor = pipeline.engine._executor
    if whole_stages:
        executor._stages = {0: _Whole(pipeline.stage)}
    for batch in (0, 1):
        executor.add_batch(BatchInfo(batch, 2, 2), 2 * batch)
    try:
        executor.run([Instruction.parse(text) for text in rows.split()])
        said = "ran"
    except ValueError as error:
        said = str(error)
    pipeline.close()
    return said, executor.num_executed


class _Whole:
    """A stage with whole backwards alone."""

    def __init__(self, stage):
        self.forward, self.backward = stage.forward, stage.backward


def test_a_stage_that_cannot_split_is_refused_before_anything_runs():
    [(said, num_executed)] = workers.run(1, f"{__name__}:run_rows", rows="0F0@0 0I0@0 0W0@0", whole_stages=True)
    assert re.search("splits backwards of stage 0 .* _Whole computes whole ones", said) and num_executed == 0


def test_a_prediction_between_the_halves_is_refused():
    """It would read the gradients of a part of a microbatch's weights."""
    [(said, _)] = workers.run(1, f"{__name__}:run_rows", rows="0F0@0 0I0@0 0F1@0 0PREDICT@1")
    assert "0PREDICT@1 reads" in said and "before the W of microbatches 0" in said
