"""A captured stage is what the runtime takes: shapes of its edges, and the calls of a microbatch."""

import random

import pytest
import torch

from megatron.capture.cut import cut
from megatron.capture.randomness import Draw
from megatron.capture.stage import StageData
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from tests.capture.cuts import contiguous
from tests.capture.models import KINDS, captured, equal, gradients


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
def test_the_runtime_drives_captured_stages(recompute):
    """Forwards, recomputes and backwards by the runtime's own stage, with what travels packed: bit-equal to the model,
    dropout, skips and a tied weight included, at another batch than that of the capture.
    """
    model, ours = captured("gpt2")
    modules = cut(ours, contiguous(ours, 4, random.Random(8)))
    batch = KINDS["gpt2"].batch(3)
    sizes = ours.sizes_of(batch)
    graph = StageGraph.of(
        len(modules),
        [Edge(index, target) for index, module in modules.items() for target in sorted(module.targets)],
    )
    tensors = {
        (index, target): EdgeTensors([TensorSpec(each.shape_at(sizes), each.dtype) for each in edge])
        for index, module in modules.items()
        for target, edge in module.targets.items()
    }
    assert any(target > source + 1 for source, target in tensors)
    stages = {
        index: GraphModuleStage(
            module,
            index=index,
            graph=graph,
            edges={
                **{source: tensors[source, index] for source in module.sources},
                **{target: tensors[index, target] for target in module.targets},
            },
            versions=None,
            data=lambda microbatch: StageData(batch, Draw(seed=1, sample=microbatch.index)),
            has_loss=module.has_loss,
            recompute=recompute,
        )
        for index, module in modules.items()
    }
    whole, _ = ours.run(batch, Draw(seed=1, sample=6))
    expected = gradients(whole, model)
    microbatch = Microbatch(index=6, batch=0, position=0, num_microbatches=1)
    sent, returned = {}, {}
    for index, stage in stages.items():
        inputs = {
            source: tensors[source, index].activations.unpack(sent[source, index]) for source in modules[index].sources
        }
        for target, made in stage.forward(microbatch, inputs).items():
            sent[index, target] = tensors[index, target].activations.pack(made)
    for index, stage in reversed(stages.items()):
        if recompute:
            stage.recompute(microbatch)
        grads = {target: tensors[index, target].gradients.unpack(returned[index, target]) for target in
                 modules[index].targets}  # fmt: skip
        for source, made in stage.backward(microbatch, grads).items():
            returned[source, index] = tensors[source, index].gradients.pack(made)
    found = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    assert stages[3].take_losses(0) == {"loss": (whole.item(), 1.0)}
    assert equal(found, expected)


def test_shapes_of_a_batch():
    """The shapes are those of any batch; along a sequence of a length that the capture fixed only the samples
    differ."""
    _, ours = captured("t5")
    stages = cut(ours, contiguous(ours, 3, random.Random(1)))
    sizes = ours.sizes_of(KINDS["t5"].batch(7))
    assert list(sizes.values()) == [7] or set(sizes.values()) == {7}
    draw = Draw(1, 1)
    outputs, _ = stages[0](StageData(KINDS["t5"].batch(7), draw), {})
    for target, edge in stages[0].targets.items():
        assert [each.shape_at(sizes) for each in edge] == [tuple(each.shape) for each in outputs[target]]
        assert all(torch.Size(each.shape_at(sizes)).numel() > 0 for each in edge)
