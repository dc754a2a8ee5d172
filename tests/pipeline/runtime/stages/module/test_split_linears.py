"""Split backwards of plain modules: the weight products of ``nn.Linear`` are in W, and gradients are those of torch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.pipeline.runtime.activations.weight_products import WeightProducts
from megatron.pipeline.runtime.stages.module.stage import split_linears


class Checkpointed(nn.Module):
    """Recomputes its layers within the backward."""

    def __init__(self, *layers: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(*layers), reentrant

    def forward(self, input):
        return checkpoint(self.layers, input, use_reentrant=self.reentrant)


class Shared(nn.Module):
    """Uses a linear twice, another never, and the weight of a third by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.by_hand = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, input):
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(input))))
        return nn.functional.linear(hidden, self.by_hand.weight)


class Doubling(nn.Linear):
    """A linear that is not torch's."""

    def forward(self, input):
        return 2 * super().forward(input)


def frozen_in_part() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    module[3].weight.requires_grad_(False)
    return module


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6))


MODULES = {  # name -> (module, how many weight products are put off)
    "linears": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False)), 2),
    "shared and unused": (Shared, 2),
    "frozen in part": (frozen_in_part, 1),
    "computed weights": (parametrized, 1),
    "a subclass": (lambda: nn.Sequential(Doubling(6, 6), nn.Linear(6, 6)), 1),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, dim_feedforward=12, dropout=0.1), 2),
    "in place": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ELU(inplace=True)),
        2,
    ),
    "no linears": (lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.LayerNorm(6)), 0),
    "checkpointed": (lambda: Checkpointed(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), reentrant=False), 2),
    "checkpointed, reentrant": (
        lambda: Checkpointed(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), reentrant=True),
        2,
    ),
}


class CountedProducts(WeightProducts):
    number = 0

    def put_off(self, *arguments, **options):
        self.number += 1
        super().put_off(*arguments, **options)


def gradients(module: nn.Module, input: torch.Tensor, products: CountedProducts | None = None) -> list:
    """Of the input and of all parameters, after two microbatches; with `products` in halves."""
    leaf = input.clone().requires_grad_()
    for seed in (1, 2):
        torch.manual_seed(seed)
        output = module(leaf * seed).square().sum()
        if products is None:
            output.backward()
        else:
            with products.collect():
                output.backward()
    if products is not None:
        products.compute()
    return [leaf.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", [(4, 5, 6), (5, 6)])
def test_gradients_are_torchs(name, shape):
    """Whole, to the last bit; in halves but for the order of the sums, since here both microbatches have their I before
    either W.
    """
    make, num_products = MODULES[name]
    torch.manual_seed(0)
    own = make()
    other = copy.deepcopy(own)
    split_linears(other)
    input = torch.randn(shape)
    expected, whole, products = gradients(own, input), gradients(other, input), CountedProducts()
    for parameter in other.parameters():
        parameter.grad = None
    split = gradients(other, input, products)
    assert products.number == 2 * num_products
    for theirs, ours, halves in zip(expected, whole, split, strict=True):
        if theirs is None:
            assert ours is None and halves is None
        else:
            assert torch.equal(ours, theirs)
            torch.testing.assert_close(halves, theirs, rtol=1e-6, atol=1e-6)


def test_outside_of_training_and_under_autocast_linears_are_torchs():
    """Evaluation builds no graph; autocast casts weights, so its linears are not split and give what torch's give."""
    own = nn.Linear(6, 6)
    other = copy.deepcopy(own)
    split_linears(other)
    input = torch.randn(3, 6)
    with torch.no_grad():
        assert torch.equal(other(input), own(input))
    products = WeightProducts()
    for module in (own, other):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(input)
        with products.collect():
            output.float().sum().backward()
    assert products.num_bytes == 0 and torch.equal(own.weight.grad, other.weight.grad)


def test_a_split_module_is_the_same_to_everyone_else():
    """Its state, its type and copies of it; to split it again changes nothing."""
    module = nn.Sequential(nn.Linear(6, 6))
    names = list(module.state_dict())
    for _ in range(2):
        split_linears(module)
    twin = copy.deepcopy(module)
    assert list(module.state_dict()) == names and isinstance(twin[0], nn.Linear)
    assert twin[0].weight is not module[0].weight
