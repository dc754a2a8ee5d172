"""Fused gradient accumulation: linear layers add to the gradient buffer of their own batch, whatever the schedule."""

import functools

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import fused_accumulation, megatron_cases

PLAIN, FUSED = f"{megatron_cases.__name__}:train", f"{fused_accumulation.__name__}:train_fused"
TWO_BW = {"schedule": "2bw", "p": 2, "layers": 2, "clip": 0.5, "batches": (4,) * 6}

CASES = {
    "2bw": TWO_BW,
    "2bw tied": TWO_BW | {"tied": True},
    "2bw drained": TWO_BW | {"drains": (0, 3)},
    "2bw captured": TWO_BW | {"balance": True, "tied": True},
    "2bw recompute instructions": TWO_BW | {"recompute": True, "dropout": 0.1},
    "2bw recompute instructions, captured": TWO_BW | {"recompute": True, "balance": True},
    "2bw full recompute": TWO_BW | {"recompute_granularity": "full", "dropout": 0.1},
    "2bw single gradient buffer": TWO_BW | {"single_gradient_buffer": True},
    "flush": TWO_BW | {"schedule": "flush"},
    "flush captured": TWO_BW | {"schedule": "flush", "balance": True},
    "pipedream": TWO_BW | {"schedule": "pipedream", "clip": 0.0, "batches": (1,) * 8},
    "interleaved": TWO_BW | {"schedule": "interleaved", "v": 2, "layers": 4},
}
SIMILAR = {"2bw tied", "flush captured"}  # "2bw captured" is tied, and captures as flush does
MANY_RANKS = {
    "2bw moved": TWO_BW | {"p": 4, "layers": 4, "balance": True, "batches": (8,) * 6},
    "2bw distributed optimizer": TWO_BW | {"d": 2, "distributed_optimizer": True, "tied": True},
    "2bw sequence parallel": TWO_BW | {"t": 2, "sequence_parallel": True},
}


def train(function: str, options: dict) -> list[dict]:
    num_ranks = options["p"] * options.get("d", 1) * options.get("t", 1)
    return workers.run(num_ranks, function, timeout=200, **options)


@functools.cache
def train_plain(name: str) -> list[dict]:
    return train(PLAIN, CASES[name])


def assert_equal(fused: list[dict], plain: list[dict]) -> None:
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours["num_calls"] > 0
        assert ours["batches"] == theirs["batches"]
        for version in ("newest", "older"):
            assert ours[version].keys() == theirs[version].keys()
            assert all(torch.equal(tensor, theirs[version][name]) for name, tensor in ours[version].items())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in SIMILAR else name for name in CASES]
)
def test_fused_equals_unfused(name):
    """Losses, norms and weights of every batch are the same bits with and without fusion."""
    assert_equal(train(FUSED, CASES[name]), train_plain(name))


@pytest.mark.parametrize("balance", [False, True])
def test_a_weight_that_two_layers_share(balance):
    """Tied on one stage, the embedding's part is added by DDP beside the kernel's, in another order."""
    options = TWO_BW | {"tied": True, "p": 1, "balance": balance}
    [fused], [plain] = train(FUSED, options), train(PLAIN, options)
    assert fused["num_calls"] > 0
    for quantity in ("loss", "norm"):
        ours, theirs = ([batch[quantity] for batch in result["batches"]] for result in (fused, plain))
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", MANY_RANKS)
def test_fused_equals_unfused_on_many_ranks(name):
    """The same where activations move to the pair stage, replicas share the optimizer, tensor ranks the sequence."""
    assert_equal(train(FUSED, MANY_RANKS[name]), train(PLAIN, MANY_RANKS[name]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["2bw", "2bw captured"])
def test_the_wheel_alone_adds_to_the_buffer_of_another_batch(name):
    """Without the repair norms are wrong under 2bw: what these tests guard against exists."""
    wheel = train(f"{fused_accumulation.__name__}:train_without_repair", CASES[name])
    right = train_plain(name)
    norms = [[batch["norm"] for batch in results[0]["batches"]] for results in (wheel, right)]
    assert max(abs(ours / theirs - 1) for ours, theirs in zip(*norms, strict=True)) > 0.01, norms
