"""Stages that are a graph train what one process trains, bit for bit."""

from dataclasses import replace

import pytest
import torch

from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.runtime.contract import trace
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape, random_shape

CASE = "tests.pipeline.runtime.graph_cases:run"
FULL = pytest.mark.full
SKIPS = Shape((Edge(0, 1), Edge(0, 3), Edge(1, 2), Edge(1, 3, gradient=False), Edge(2, 3)), (0, 1, 0, 1))


def run(shape, **options):
    return workers.run(len(set(shape.rank_of_stage)), CASE, shape=shape, timeout=60, **options)


def assert_same(outcomes, expected):
    found = {name: tensor for outcome in outcomes for name, tensor in outcome.parameters.items()}
    assert found.keys() == expected.parameters.keys()
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, expected.parameters[name])]
    for outcome in outcomes:
        for mine, theirs in zip(outcome.reports, expected.reports, strict=True):
            assert mine.losses == pytest.approx(theirs.losses, rel=1e-15)
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
        assert outcome.left == (0, 0)


@pytest.mark.parametrize(
    ("shape", "preset", "options"),
    [
        (SKIPS, "flush", {}),
        (SKIPS, "gpipe", {"recompute": True}),
        (random_shape(1, num_stages=7, num_ranks=2), "flush", {"recompute": True}),
        *(
            pytest.param(
                random_shape(seed, num_stages=3 + seed % 6, num_ranks=2 + seed % 3),
                ("flush", "gpipe")[seed % 2],
                {"recompute": seed % 4 > 1},
                marks=FULL,
            )
            for seed in range(2, 14)
        ),
    ],
    ids=str,
)
def test_a_graph_trains_as_one_process_does(shape, preset, options):
    """Losses and weights, with dropout, several tensors an edge, edges of ids alone, stages in any placement."""
    batches = (3, 2, 4)
    assert_same(run(shape, preset=preset, batches=batches, **options), graph_cases.in_one_process(shape, batches))


SHARES = replace(SKIPS, shares=True)


@pytest.mark.parametrize(
    ("shape", "preset", "recompute"),
    [
        (SHARES, "flush", True),
        pytest.param(SHARES, "gpipe", False, marks=FULL),
        *(
            pytest.param(
                replace(random_shape(seed, num_stages=3 + seed % 6, num_ranks=2 + seed % 3), shares=True),
                ("flush", "gpipe")[seed % 2], seed % 4 > 1, marks=FULL,
            )
            for seed in range(2, 10)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_shared_parameters_train_as_in_one_process(shape, preset, recompute):
    """Each user adds up its gradients of a batch, so sums over several microbatches have another order."""
    batches = (3, 1, 4)
    outcomes = run(shape, preset=preset, batches=batches, recompute=recompute)
    expected = graph_cases.in_one_process(shape, batches)
    unshared = graph_cases.in_one_process(replace(shape, shares=False), batches)
    for outcome in outcomes:
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], rtol=2e-5, atol=1e-6)
        for mine, theirs, other in zip(outcome.reports, expected.reports, unshared.reports, strict=True):
            assert mine.losses == pytest.approx(theirs.losses, rel=1e-6)
            assert mine.losses != pytest.approx(other.losses, rel=1e-3)
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert outcome.left == (0, 0)


def test_clipping_and_evaluation():
    """By the norm over all ranks; an evaluation in the middle changes nothing, and is the same on all ranks."""
    batches = (3, 2, 4)
    outcomes = run(SKIPS, preset="flush", batches=batches, clip_grad=0.05, evaluate=2)
    expected = graph_cases.in_one_process(SKIPS, batches, clip_grad=0.05)
    for outcome in outcomes:
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], rtol=1e-6, atol=1e-7)
    assert outcomes[0].evaluations == outcomes[1].evaluations and outcomes[0].evaluations[0]["loss"][1] == 2.0


def test_a_stage_saves_as_many_as_its_depth():
    """Under flush: one more than edges lead from it to the end."""
    outcomes = run(SKIPS, preset="flush", batches=(8, 8))
    peaks = {stage: peak for outcome in outcomes for stage, peak in outcome.peak_saved.items()}
    assert all(peak <= SKIPS.graph.depth(stage) + 1 for stage, peak in peaks.items()) and peaks[0] > 1


def test_what_ran_is_a_timeline_with_its_edges():
    """It draws, saves and loads; transfers name their other ends where there are several."""
    outcomes = run(SKIPS, preset="flush", batches=(2, 2), tracing=True)
    timeline = trace.timeline(outcomes[0].traces)
    assert timeline.edges == SKIPS.edges and type(timeline).from_dict(timeline.to_dict()).edges == SKIPS.edges
    words = {str(span.instruction) for span in timeline.spans}
    assert {"0SEND_F0>1", "0SEND_F0>3", "1RECV_F0", "3RECV_F0<0", "3SEND_B0>0", "0RECV_B0<3"} <= words


def test_an_input_that_nothing_depends_on_gets_zeros():
    """Its maker waits for a gradient; an output that depends on no weight takes one and drops it."""

    class Ignores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, data, inputs):
            return {2: (inputs[0][1] * self.weight, torch.ones(2))}, None

    graph = StageGraph.of(3)
    edges = {0: EdgeTensors([TensorSpec((2,))] * 2), 2: EdgeTensors([TensorSpec((2,))] * 2)}
    stage = GraphModuleStage(Ignores(), index=1, graph=graph, edges=edges, versions=None)
    microbatch = Microbatch(0, 0, 0, 1)
    stage.forward(microbatch, {0: (torch.randn(2), torch.full((2,), 3.0))})
    back = stage.backward(microbatch, {2: (torch.ones(2), torch.ones(2))})
    assert [each.tolist() for each in back[0]] == [[0.0, 0.0], [1.0, 1.0]]
    assert stage.module.weight.grad.tolist() == [3.0, 3.0]


def test_what_does_not_fit_together_is_refused():
    node = graph_cases.Node(SKIPS, 1)
    with pytest.raises(ValueError, match=r"stage 1 has edges with stages \[0, 2, 3\], and tensors are given for \[0\]"):
        GraphModuleStage(node, index=1, graph=SKIPS.graph, edges={0: None}, versions=None)
    graph = Schedule.preset("flush", num_stages=3, rank_of_stage=(0, 0, 0), edges=(Edge(0, 1), Edge(0, 2), Edge(1, 2)))
    stages = [type("Chain", (), {"index": index})() for index in range(3)]
    with pytest.raises(ValueError, match="Chain is for a chain; give stages of a graph"):
        PipelineEngine(graph, stages, None)
