"""Weight products that are put off: what is kept, in which order they are computed, and what follows a gradient."""

import weakref

import torch
from torch.nn import Parameter

from megatron.pipeline.runtime.activations.weight_products import WeightProducts, collecting


def product(input, output_grad):
    return output_grad.t() @ input


def pair(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 2), torch.randn(rows, 4)


def test_a_gradient_is_handed_to_autograd():
    """It is added to what ``.grad`` holds, in place, and hooks of the parameter and of its accumulation run once."""
    parameter, products, seen = Parameter(torch.zeros(4, 2)), WeightProducts(), []
    parameter.grad = view = torch.ones(4, 2)
    parameter.register_hook(lambda gradient: seen.append("tensor"))
    parameter.register_post_accumulate_grad_hook(lambda each: seen.append("accumulated"))
    input, output_grad = pair()
    products.put_off(parameter, input, output_grad, product)
    assert torch.equal(view, torch.ones(4, 2)) and not seen
    products.compute()
    assert parameter.grad is view and torch.equal(view, 1 + product(input, output_grad))
    assert seen == ["tensor", "accumulated"]


def test_products_of_one_parameter_are_added_up_first():
    """As autograd adds up the uses of a parameter: ((a + b) + c) to what was there, and not one after another."""
    parameter, products = Parameter(torch.zeros(4, 2)), WeightProducts()
    parameter.grad = torch.full((4, 2), 1e6)
    factors = [pair() for _ in range(3)]
    for input, output_grad in factors:
        products.put_off(parameter, input, output_grad, product)
    a, b, c = (product(*each) for each in factors)
    assert products.num_bytes == sum(each.nbytes for factor in factors for each in factor)
    products.compute()
    assert torch.equal(parameter.grad, 1e6 + ((a + b) + c)) and products.num_bytes == 0


def test_a_kernel_may_add_its_product_by_itself():
    """Then there is no gradient to hand on."""
    parameter, products, added = Parameter(torch.zeros(4, 2)), WeightProducts(), []
    products.put_off(parameter, *pair(), lambda *factors: added.append(factors))
    products.compute()
    assert len(added) == 1 and parameter.grad is None


def test_bytes_are_those_of_storages_and_each_is_let_go_of_in_its_turn():
    """A storage that two products share counts once, a view of it whole; when a product is computed, those before it
    have been freed.
    """
    first, second = Parameter(torch.zeros(4, 2)), Parameter(torch.zeros(4, 2))
    products, held = WeightProducts(), []
    shared, output_grad = torch.randn(5, 2), torch.randn(3, 4)
    own = torch.randn(3, 4)
    reference = weakref.ref(output_grad.untyped_storage())
    products.put_off(first, shared[:3], output_grad, product)
    products.put_off(second, shared[2:], own, lambda *each: held.append(reference() is not None) or product(*each))
    assert products.num_bytes == 4 * (5 * 2 + 3 * 4 + 3 * 4)
    del output_grad
    products.compute()
    assert held == [False] and products.num_bytes == 0


def test_what_is_collected_belongs_to_the_context():
    """Contexts may nest, and one that raises leaves none behind."""
    outer, inner = WeightProducts(), WeightProducts()
    with outer.collect():
        try:
            with inner.collect():
                assert collecting() is inner
                raise ArithmeticError
        except ArithmeticError:
            assert collecting() is outer
    assert collecting() is None
