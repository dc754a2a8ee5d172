"""What is in the key, and that it is the same in every process."""

from dataclasses import fields, replace

import pytest
import torch

from megatron.elastic.cache.generation import key_of_sample, weights_digest
from tests.elastic.cache.cases import DEEPER, GENERATION

OTHER = {"dtype": torch.float16, "shape": (16, 25), "tensor_rank": 1, "tensor_ranks": 3}


@pytest.mark.parametrize("name", [each.name for each in fields(GENERATION)])
def test_every_field_is_in_the_key(name):
    base = replace(GENERATION, tensor_ranks=2)
    value = getattr(base, name)
    other = OTHER.get(name, value + 1 if isinstance(value, int) else f"{value} and more")
    assert replace(base, **{name: other}).digest != base.digest
    assert replace(base).digest == base.digest


def test_every_process_says_the_same():
    """These were said by another one."""
    assert replace(GENERATION, software="torch").digest.hex() == "2ee605136bfe0f0f7e6cb277a911e95e"
    weights = {"b": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), "a": torch.arange(3)}
    assert weights_digest(weights.items()) == "65a42aface7309ffa0211fd37f88f4ca"


def test_weights_digest():
    """The digest is of every bit, name, shape and dtype, and of nothing else."""
    weights = {
        "layer 0": torch.randn(3, 4),
        "layer 1": torch.zeros(2),
        "count": torch.tensor(3),
        "none": torch.empty(0),
    }
    digest = weights_digest(weights.items())
    assert len(digest) == 32
    assert weights_digest(reversed(weights.items())) == digest
    assert (
        weights_digest(
            (name, torch.nn.Parameter(each) if each.is_floating_point() else each) for name, each in weights.items()
        )
        == digest
    )
    turned = weights["layer 0"].t().contiguous().t()
    assert turned.stride() == (1, 3) and weights_digest({**weights, "layer 0": turned}.items()) == digest
    for change in (
        {"layer 1": torch.tensor([0.0, -0.0])},
        {"layer 1": torch.zeros(1, 2)},
        {"layer 1": torch.zeros(2, dtype=torch.int32)},
        {"layer 0": weights["layer 0"].nextafter(torch.tensor(9.0))},
        {"layer 2": torch.zeros(0)},
    ):
        assert weights_digest({**weights, **change}.items()) != digest


def test_a_large_tensor_counts_to_its_end():
    large = torch.zeros(9 << 20, dtype=torch.uint8).repeat(2)
    other = large.clone()
    other[-1] = 1
    assert weights_digest([("a", large)]) != weights_digest([("a", other)])


def test_what_deepens():
    """More layers over the same samples, computed in the same way."""
    assert DEEPER.deepens(GENERATION)
    assert not GENERATION.deepens(DEEPER) and not GENERATION.deepens(GENERATION)
    for change in ({"microbatch_rows": 8}, {"data": "others"}, {"threads": 2}, {"dtype": torch.float16}):
        assert not replace(DEEPER, **change).deepens(GENERATION)


def test_names_of_samples():
    """Numbers of any kind, and texts of any length; each has a key of its own."""
    assert key_of_sample(3) == key_of_sample(torch.tensor(3)) != key_of_sample("3")
    names = [0, 1, 255, 256, 2**64 - 1, "", "a", "ä", "x" * 255, "x" * 256, "x" * 10_000]
    assert len({key_of_sample(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", [-1, 2**64, 1.5, None, (1, 2)])
def test_what_cannot_be_a_name(name):
    with pytest.raises(ValueError, match=r"cannot be named in the cache; name it by a whole number"):
        key_of_sample(name)


def test_sentences():
    with pytest.raises(ValueError, match=r"outputs in float64 cannot be cached, .* compute the frozen layers in"):
        replace(GENERATION, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"two tensors of the frozen layers are named a; name them"):
        weights_digest([("a", torch.zeros(1)), ("a", torch.ones(1))])
