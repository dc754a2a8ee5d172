"""Which operators stay together, and which are copied."""

import pytest
import torch
from torch import nn

from megatron.capture.blocks import blocks_of, free_nodes
from megatron.capture.cut import StageData, cut
from megatron.capture.export import capture
from tests.capture.cuts import spread
from tests.capture.in_turn import train_in_turn
from tests.capture.models import captured, equal, gradients


def names_of(ours, numbers):
    return {ours.nodes[number].name for number in numbers}


def block_with(ours, target):
    """The block in which the first operator of that kind lies, as names of operators."""
    number = next(number for number, node in enumerate(ours.nodes) if str(node.target) == target)
    return next(names_of(ours, block) for block in blocks_of(ours) if number in block)


def test_blocks_can_run_in_their_order():
    """Each needs only those before it, and all that is not free is in exactly one."""
    for kind in ("gpt2", "plain"):
        _, ours = captured(kind)
        position = {node: number for number, node in enumerate(ours.nodes)}
        done, free = set(), free_nodes(ours)
        for block in blocks_of(ours):
            needed = {position[source] for number in block for source in ours.nodes[number].all_input_nodes
                      if source in position and source not in free}  # fmt: skip
            assert needed <= done | set(block)
            assert not done & set(block)
            done |= set(block)
        assert len(done) == len(ours.nodes) - len(free)


@pytest.mark.full
def test_masks_positions_and_shifted_labels_are_free():
    """T5's decoder input is made by writes through views; all of it depends on data only."""
    _, ours = captured("t5")
    free = {node.name for node in free_nodes(ours)}
    assert {"new_zeros", "copy_", "masked_fill_", "sym_size_int"} <= free
    assert not any("linear" in name or "embedding" in name for name in free)


class Written(nn.Module):
    """Reads before a write, writes through a view of a view, and has a path out of the block and back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        made = x * self.weight
        side = made.tan()  # before the write; nothing of the block needs it
        read = made.exp()  # before the write
        outside = read.sin()  # reads no memory that is written, but the write needs it
        made.view(-1)[1:].mul_(outside.sum())
        after = made.cos()
        return after.sum() + read.sum() + side.sum()


def test_written_memory_stays_with_all_that_reads_it_before():
    """And with what lies between; who reads it afterwards is free to go."""
    ours = capture(Written(), {"x": torch.randn(3, 4)})
    block = block_with(ours, "aten.mul_.Tensor")
    assert {"mul", "tan", "exp", "sin", "sum_1", "view", "mul_"} <= block
    assert not block & {"cos", "sum_2"}


def test_every_cut_around_a_write_is_bit_equal():
    """Whoever reads the memory in another stage reads what the whole model reads."""
    torch.manual_seed(0)
    model, batch = Written(), {"x": torch.randn(3, 4)}
    ours = capture(model, batch)
    whole = ours.run(batch)[0]
    expected = gradients(whole, model)
    blocks = blocks_of(ours)
    assert len(blocks) > 1
    for border in range(1, len(blocks)):
        stages = cut(ours, spread({block: int(place >= border) for place, block in enumerate(blocks)}))
        loss, _ = train_in_turn(stages, StageData(batch))
        assert torch.equal(loss, whole) and torch.equal(model.weight.grad, expected["weight"])
        model.zero_grad()


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        first, second = self.linear(x).split(3, dim=-1)
        with torch.no_grad():
            scale = (first.abs() + 1).log() * second.abs()
        return (first * scale + second).sum()


def test_several_results_and_their_takers():
    """An operator that returns several stays with who takes one, and so does what runs without gradients."""
    ours = capture(Several(), {"x": torch.randn(3, 4)})
    block = block_with(ours, "aten.split.Tensor")
    assert len(block) == 3 and sum("getitem" in name for name in block) == 2
    free = free_nodes(ours)
    assert not any("set_grad" in str(node.target) for node in free)


class FillsZeros(nn.Module):
    """It writes into zeros through a view, and reads the zeros' own tensor, as Longformer's attention does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        zeros = x.new_zeros(x.shape[0], 4)
        zeros[:, :2] = self.first(x)[:, :2]
        return self.last(zeros.view(-1, 2, 2).flatten(1) * 2).square().mean()


def test_what_is_filled_with_results_has_their_gradient():
    """Wherever it is cut, the gradient of what was written comes back."""
    model, batch = FillsZeros(), {"x": torch.randn(3, 4)}
    ours = capture(model, batch)
    expected = gradients(model(**batch), model)
    blocks = blocks_of(ours)
    for border in range(1, len(blocks)):
        stages = cut(ours, spread({block: int(place >= border) for place, block in enumerate(blocks)}))
        train_in_turn(stages, StageData(batch))
        assert equal({name: each.grad for name, each in model.named_parameters()}, expected)
        model.zero_grad()
