"""Split backwards of megatron.core's chunks: I and W give the gradients of B, and the weight products are in W."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import split_cases

FULL = pytest.mark.full
SMALL = {"layers": 4, "hidden": 16, "batches": (4, 4, 4)}
EXACT = dict.fromkeys(("numbers", "weights", "decisions"), 0.0)

CASES = {
    "zb-h1, tied, clipped": ("flush", "zb-h1", {"p": 2, "tied": True, "clip": 0.5}),
    "late, bf16, full recompute": (
        "flush",
        "split-late",
        {"p": 2, "dtype": "bfloat16", "recompute_granularity": "full", "dropout": 0.1},
    ),
    "at the end, fp16 with an overflow": (
        "flush",
        "split-at-the-end",
        {"p": 2, "dtype": "float16", "clip": 1.0, "overflow_batches": (1,)},
    ),
    "two batches at once, fp16": (
        "2bw",
        "2bw-split-late",
        {"p": 2, "dtype": "float16", "tied": True, "clip": 1.0, "overflow_batches": (1,), "batches": (4,) * 5},
    ),
    "sequence parallel": ("flush", "split-late", {"t": 2, "sequence_parallel": True, "swiglu": True, "dropout": 0.1}),
    "distributed optimizer": (
        "flush",
        "split-late",
        {"d": 2, "distributed_optimizer": True, "dtype": "bfloat16", "clip": 0.5},
    ),
    "zbv, tied": ("whole-v", "zbv", {"p": 2, "v": 2, "tied": True}),
}
MORE = {
    "tensor parallel": ("flush", "split-late", {"t": 2, "normalization": "RMSNorm", "position": "rope"}),
    "recompute instructions": ("flush", "zb-h1", {"p": 2, "recompute": True, "dropout": 0.1}),
    "interleaved": ("interleaved", "split-interleaved", {"p": 2, "v": 2, "dtype": "bfloat16"}),
    "bert": ("flush", "zb-h1", {"p": 2, "bert": True, "tied": True}),
    "at once": ("flush", "split-at-once", {"p": 2, "token_form": True}),
    "selective recompute": ("flush", "zb-h1", {"p": 2, "recompute_granularity": "selective", "dropout": 0.1}),
    "selective recompute of norms": (
        "flush",
        "zb-h1",
        {"p": 2, "recompute_granularity": "selective", "recompute_modules": ("layernorm",), "dtype": "bfloat16"},
    ),
    "selective recompute of an MLP": (
        "flush",
        "zb-h1",
        {"p": 2, "recompute_granularity": "selective", "recompute_modules": ("mlp",), "swiglu": True},
    ),
    "sequence parallel, full recompute": (
        "flush",
        "split-late",
        {"t": 2, "sequence_parallel": True, "recompute_granularity": "full", "dtype": "bfloat16"},
    ),
    "all degrees": (
        "2bw",
        "2bw-split-late",
        {"p": 2, "t": 2, "d": 2, "sequence_parallel": True, "distributed_optimizer": True, "tied": True, "clip": 0.5,
         "batches": (8,) * 3},
    ),
    "four stages": ("flush", "zb-h1", {"p": 4, "tied": True, "dropout": 0.1}),
    "zbv of four ranks": ("whole-v", "zbv", {"p": 4, "v": 2, "layers": 8, "batches": (8, 8)}),
    "replicas": ("flush", "zb-h1", {"p": 2, "d": 2, "tied": True, "clip": 0.5}),
    "fused": ("flush", "split-late", {"p": 2, "fused": True, "dtype": "bfloat16"}),
    "fused, two batches at once": ("2bw", "2bw-split-late", {"p": 2, "fused": True, "tied": True}),
    "fused, sequence parallel": ("flush", "split-late", {"t": 2, "fused": True, "sequence_parallel": True}),
}  # fmt: skip


def deviations(whole: str, split: str, options: dict) -> list[dict[str, float]]:
    options = SMALL | options
    num_ranks = options.get("p", 1) * options.get("t", 1) * options.get("d", 1)
    return workers.run(
        num_ranks, f"{split_cases.__name__}:deviations", whole=whole, split=split, timeout=200, **options
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=FULL) for name in MORE)])
def test_split_training_is_bit_equal(name):
    """Losses, norms, loss scales and weights of both versions are those of whole backwards, to the last bit: W adds up
    the microbatches in the order in which B would.
    """
    assert all(each == EXACT for each in deviations(*(CASES | MORE)[name]))


def test_whole_backwards_between_halves_add_up_in_another_order():
    """Where some microbatches are not split, gradients differ by rounding."""
    for each in deviations("flush", "split-in-part", {"p": 2, "clip": 0.5}):
        assert each["decisions"] == 0 and each["numbers"] < 1e-6 and each["weights"] < 1e-5


@pytest.fixture(scope="module")
def halves():
    """(gradients with B, gradients with I and W, what was kept), of a stage alone; untied and tied."""
    return {
        tied: (
            workers.run(1, f"{split_cases.__name__}:gradients", split=False, tied=tied)[0][0],
            *workers.run(1, f"{split_cases.__name__}:gradients", split=True, tied=tied)[0],
        )
        for tied in (False, True)
    }


def test_w_has_the_weight_products_and_i_all_else(halves):
    """After I the weights of linears have no gradient yet, and all others have theirs; after W all are those of B."""
    whole, split, kept = halves[False]
    for name, has_gradient in kept["after I"].items():
        is_product = name.endswith("weight") and ("linear" in name or name == "output_layer.weight")
        assert has_gradient is not is_product, name
    assert sum(not has for has in kept["after I"].values()) == 2 * 4 + 1
    assert all(torch.equal(split[name], gradient) for name, gradient in whole.items())


def test_a_tied_weight_on_one_stage_is_computed_in_i(halves):
    """The embedding's part of the gradient comes in I, and so the output layer's does, too: B adds both up first."""
    whole, split, kept = halves[True]
    assert kept["after I"]["embedding.word_embeddings.weight"]
    assert sum(not has for has in kept["after I"].values()) == 2 * 4
    assert all(torch.equal(split[name], gradient) for name, gradient in whole.items())


def test_what_is_kept_between_the_halves(halves):
    """Of each linear its input and its output's gradient, in the dtype of the computation, and nothing afterwards. The
    graph is gone.
    """
    _, _, kept = halves[False]
    tokens, hidden, vocabulary = 16 * 2, 32, 64
    of_layer = (1 + 3) + (1 + 1) + (1 + 2) + (2 + 1)  # inputs and outputs of its linears, in hidden sizes
    expected = 4 * tokens * (2 * of_layer * hidden + hidden + vocabulary)
    assert kept["bytes"] == [expected, expected]
    assert kept["num_saved"] == 0 and kept["bytes at the end"] == [0, 0]


def test_what_cannot_be_split_is_refused():
    """By name, before anything is computed."""
    [said] = workers.run(1, f"{split_cases.__name__}:refusals")
    assert "turn it off" in said["defer_embedding_wgrad_compute"]
    assert "enable_autocast" in said["enable_autocast"]
    assert "has LayerNormLinear of" in said["engine"] and "--transformer-impl local" in said["engine"]
    assert "has TELayerNormColumnParallelLinear of" in said["core"]
    assert said["norm"] == "nothing"  # it has no product to put off
