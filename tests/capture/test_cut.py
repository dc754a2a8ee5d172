"""Stages compute what the whole model computes: cut anywhere, and driven by the runtime."""

import random

import pytest
import torch
from torch import nn

from megatron.capture.blocks import blocks_of, crossings
from megatron.capture.cut import StageData, cut
from megatron.capture.export import capture
from megatron.capture.randomness import Draw, seeded_attention
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from tests.capture.cuts import any_acyclic, contiguous, spread
from tests.capture.in_turn import train_in_turn
from tests.capture.models import KINDS, captured, equal, gradients


def in_stages(stages, model, batch, draw=None, *, recompute=False):
    """Loss and gradients of the stages in turn."""
    model.zero_grad()
    loss, kept = train_in_turn(stages, StageData(batch, draw), recompute=recompute)
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return loss, found, kept


FULL = pytest.mark.full
CONTIGUOUS = [*((kind, 2, 0.1) for kind in ("t5", "gpt2", "plain")),
              *(pytest.param(kind, 30, dropout, marks=FULL) for kind in KINDS for dropout in (0.0, 0.1))]  # fmt: skip
SCATTERED = [("t5", 2), ("plain", 2), *(pytest.param(kind, 30, marks=FULL) for kind in KINDS)]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "cuts", "dropout"), CONTIGUOUS)
def test_contiguous_cuts_are_bit_equal(kind, cuts, dropout):
    """Loss, all gradients and what was kept; with and without recompute, tied weights, at batches of 1 and 3."""
    model, ours = captured(kind, dropout)
    generator = random.Random(3)
    for number in range(cuts):
        batch = KINDS[kind].batch(generator.choice((1, 3)))
        draw = Draw(seed=1, sample=number) if dropout else None
        whole, kept = ours.run(batch, draw)
        expected = gradients(whole, model)
        stages = cut(ours, contiguous(ours, generator.randint(2, 5), generator))
        for recompute in (False, True):
            loss, found, made = in_stages(stages, model, batch, draw, recompute=recompute)
            assert torch.equal(loss, whole)
            assert equal(found, expected)
            assert equal(made, kept)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "cuts"), SCATTERED)
def test_any_cut_is_equal_but_for_the_order_of_sums(kind, cuts):
    model, ours = captured(kind)
    generator = random.Random(4)
    skips = 0
    for number in range(cuts):
        batch = KINDS[kind].batch(2)
        draw = Draw(seed=1, sample=number)
        whole, _ = ours.run(batch, draw)
        expected = gradients(whole, model)
        stages = cut(ours, any_acyclic(ours, 5, generator), relay=bool(number % 2))
        skips += sum(target > index + 1 for index, stage in stages.items() for target in stage.targets)
        loss, found, _ = in_stages(stages, model, batch, draw)
        assert torch.equal(loss, whole)
        assert found.keys() == expected.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert skips, "no edge skips a stage"


@pytest.mark.parametrize("kind", ["t5", "plain"])
def test_each_parameter_has_one_owner(kind):
    """The first stage that uses it; under its name in the model, and the model's own object."""
    model, ours = captured(kind)
    stages = cut(ours, contiguous(ours, 4, random.Random(1)))
    owned = [(name, each) for stage in stages.values() for name, each in stage.named_parameters()]
    assert len(owned) == len(list(model.parameters()))
    assert all(each is model.get_parameter(name) for name, each in owned)


def test_a_tied_weight_travels_and_its_gradient_comes_back():
    """GPT-2's embedding is owned by the first stage, and the last gets it."""
    _, ours = captured("gpt2")
    stages = cut(ours, contiguous(ours, 3, random.Random(1)))
    travelling = {
        (index, target): [each.name for each in tensors if each.owner is not None]
        for index, stage in stages.items()
        for target, tensors in stage.targets.items()
    }
    assert travelling[0, 2] == ["transformer.wte.weight"] and not travelling[0, 1] and not travelling[1, 2]
    edge = next(each for each in stages[0].targets[2] if each.owner is not None)
    assert edge.has_gradient and edge.shape == tuple(ours.parameters["transformer.wte.weight"].shape)


def test_both_ends_agree_and_masks_do_not_travel():
    """What a stage sends is what the other gets; every stage with attention reads the mask from the data."""
    _, ours = captured("t5")
    stages = cut(ours, contiguous(ours, 4, random.Random(2)))
    for index, stage in stages.items():
        for target, tensors in stage.targets.items():
            assert stages[target].sources[index] == tensors
            assert all(each.dtype is torch.float32 and each.has_gradient for each in tensors)
        if any(node.target is seeded_attention for node in stage.graph.nodes):
            assert "attention_mask" in stage.inputs


def test_a_stage_alone():
    """`only` gives the same stage without the others."""
    _, ours = captured("gpt2")
    assignment = contiguous(ours, 3, random.Random(2))
    alone = cut(ours, assignment, only=[1])
    assert list(alone) == [1]
    assert str(alone[1].graph) == str(cut(ours, assignment)[1].graph)


def test_frozen_parameters_get_no_gradient():
    """And what depends on them alone sends none back."""
    torch.manual_seed(3)
    model = KINDS["plain"].build(0.0).train()
    model.first.requires_grad_(False)
    batch = KINDS["plain"].batch(2)
    ours = capture(model, batch, loss=KINDS["plain"].loss)
    blocks = blocks_of(ours)
    stages = cut(ours, {number: int(block != blocks[0]) for block in blocks for number in block})
    assert [each.has_gradient for each in stages[0].targets[1]] == [False]
    expected = gradients(ours.run(batch)[0], model)
    # The first stage trains nothing, so its backward has nowhere to begin.
    _, found, _ = in_stages(stages, model, batch)
    assert equal(found, expected) and "first.weight" not in found


class Transposes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.first(x).transpose(1, 2)).square().mean()


def test_a_transposed_tensor_arrives_as_it_was():
    """It travels in the order of its memory, and is a view there as it is in the whole model."""
    model, batch = Transposes(), {"x": torch.randn(3, 4, 5)}
    ours = capture(model, batch)
    blocks = blocks_of(ours)
    border = next(place for place, block in enumerate(blocks) if "transpose" in ours.nodes[block[0]].name)
    stages = cut(ours, {number: int(place > border) for place, block in enumerate(blocks) for number in block})
    (edge,) = stages[0].targets[1]
    assert edge.name == "transpose" and edge.shape == (None, 4, 6)
    assert [node.name for node in stages[1].graph.nodes if "permute" in node.name]
    outputs, _ = stages[0](StageData(batch), {})
    assert torch.equal(outputs[1][0], model.first(batch["x"]))
    whole = ours.run(batch)[0]
    loss, found, _ = in_stages(stages, model, batch)
    assert torch.equal(loss, whole) and equal(found, gradients(whole, model))


class Spectral(nn.Module):
    """Real, complex and real again."""

    def __init__(self):
        super().__init__()
        self.first, self.filter = nn.Linear(5, 6), nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.first(x)).conj() * self.filter, n=6).square().mean()


@pytest.mark.parametrize("border", ["fft_rfft", "conj"])
def test_gradients_of_complex_tensors_come_back(border):
    model, batch = Spectral(), {"x": torch.randn(3, 5)}
    ours = capture(model, batch)
    blocks = blocks_of(ours)
    place = next(place for place, block in enumerate(blocks) if border in ours.nodes[block[0]].name)
    stages = cut(ours, {number: int(at > place) for at, block in enumerate(blocks) for number in block})
    (edge,) = stages[0].targets[1]
    assert edge.dtype is torch.complex64 and edge.has_gradient
    whole = ours.run(batch)[0]
    loss, found, _ = in_stages(stages, model, batch)
    assert torch.equal(loss, whole) and equal(found, gradients(whole, model))
    assert found["first.weight"].abs().max() > 0


def test_devices_are_replaced():
    """Tensors that the graph makes are made where the stage is to run."""
    _, ours = captured("t5")
    assignment = contiguous(ours, 2, random.Random(2))
    named = [device for stage in cut(ours, assignment).values() for device in devices(stage)]
    moved = [device for stage in cut(ours, assignment, device="cuda:1").values() for device in devices(stage)]
    assert len(moved) == len(named) > 0
    assert set(map(str, named)) == {"cpu"} and set(map(str, moved)) == {"cuda:1"}


def devices(stage):
    return [value for node in stage.graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)]


# --- assignments, and the routes of what crosses


@pytest.fixture(scope="module")
def plain():
    return captured("plain")[1]


@pytest.mark.parametrize(
    ("stage_of", "sentence"),
    [
        (lambda blocks: {}, r"operator \d+ \(.*\) has no stage; give each of Plain one"),
        (lambda blocks: {each: 2 * (place > 3) for place, each in enumerate(blocks)}, "stage 1 of 3 has no operators"),
        (
            lambda blocks: {each: int(place == 1) for place, each in enumerate(blocks)},
            "stage 0 needs .* of stage 1; number stages",
        ),
    ],
)
def test_what_is_no_assignment_is_refused(plain, stage_of, sentence):
    """An operator without a stage, a stage without operators, one that needs a later one."""
    with pytest.raises(ValueError, match=sentence):
        crossings(plain, spread(stage_of(blocks_of(plain))))


def test_a_torn_block(plain):
    """An in-place activation writes what the operator before it made."""
    number = next(number for number, node in enumerate(plain.nodes) if "relu_" in str(node.target))
    stage_of = {each: int(each >= number) for each in range(len(plain.nodes))}
    with pytest.raises(ValueError, match=r"must lie in one stage"):
        crossings(plain, stage_of)


def by_layer(captured_t5, num_stages):
    """Stages of T5's decoder by layer: embeddings and encoder, then each decoder layer, then the head."""
    stage, current = {}, 0
    for block in blocks_of(captured_t5):
        names = " ".join(str(captured_t5.nodes[number].meta.get("nn_module_stack")) for number in block)
        if "decoder.block.0" in names:
            current = max(current, 1)
        if "decoder.block.1" in names:
            current = 2
        stage[block] = current
    return spread(stage)


def test_what_several_need_is_passed_on():
    """The encoder's output goes from stage to stage; without relay its maker sends it to each."""
    _, ours = captured("t5")
    assignment = by_layer(ours, 3)
    relayed, direct = (crossings(ours, assignment, relay=relay) for relay in (True, False))
    several = [key for key, route in direct.routes.items() if len(route) > 1]
    assert several
    for key in several:
        assert direct.routes[key] == ((0, 1), (0, 2)) and relayed.routes[key] == ((0, 1), (1, 2))
    assert set(cut(ours, assignment, relay=False)[0].targets) == {1, 2}


# --- by the runtime


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
        len(modules), [Edge(index, target) for index, module in modules.items() for target in sorted(module.targets)]
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
