"""Constants from a profile's stages."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.published.fit_profile import fit_profile
from megatron.planner.time.constants import START
from megatron.planner.time.first_principles import FirstPrinciples

MODEL = Architecture.gpt3(
    num_layers=3, hidden_size=2048, num_attention_heads=16, sequence_length=1024, vocabulary_size=51200
)  # fmt: skip
TRUE = replace(
    START, product_efficiency=0.6, product_overhead=20e-6, memory_efficiency=0.7, tensor_efficiency=0.5, launch=1e-7
)  # fmt: skip


def stage(place: str, tensor: int, size: int, scope: str) -> SimpleNamespace:
    """A stage of one layer with the times that `TRUE` gives."""
    pipeline = 1 if place == "only" else 3
    asked = Configuration(
        tensor=tensor, pipeline=pipeline, micro_batch_size=size, global_batch_size=size, recompute=scope
    )
    cluster = Cluster(gpu="A100-80", nodes=1, gpus_per_node=tensor * pipeline)
    model = replace(MODEL, num_layers=pipeline)
    costs = FirstPrinciples(model, cluster, MEGATRON_CORE, TRUE).costs(asked, (1,) * pipeline)
    index = {"only": 0, "first": 0, "middle": 1, "last": 2}[place]
    return SimpleNamespace(
        place=place, num_layers=1, tensor=tensor, micro_batch_size=size, recompute=scope, working=tensor,
        forward=SimpleNamespace(median=costs.forward[index]), backward=SimpleNamespace(median=costs.backward[index]),
    )  # fmt: skip


def profile(*tensors: int) -> SimpleNamespace:
    stages = [
        stage(place, tensor, size, scope)
        for place in ("only", "first", "middle", "last")
        for tensor in tensors
        for size in (1, 4)
        for scope in ("none", "layer")
    ]
    return SimpleNamespace(
        flags=(), model=MODEL, dtype="bfloat16", transformer_impl="local", sequence_parallel=False,
        shares_processor=True, stages=stages,
    )  # fmt: skip


@pytest.mark.parametrize("tensors", [(1,), (1, 2)])
def test_finds_the_constants_again(tensors):
    fit = fit_profile(profile(*tensors), "A100-80", replace(START, launch=TRUE.launch))
    assert not fit.unexplained and fit.mean_error < 1e-3
    for name in ("product_efficiency", "product_overhead", "memory_efficiency"):
        assert getattr(fit.constants, name) == pytest.approx(getattr(TRUE, name), rel=0.02)
    expected = TRUE if len(tensors) > 1 else START
    assert fit.constants.tensor_efficiency == pytest.approx(expected.tensor_efficiency, rel=0.05)


def test_stages_beside_others_are_left_out():
    """Only times on a shared processor count during which nobody else worked."""
    alone = profile(1)
    crowded = profile(1)
    for each in crowded.stages:
        each.working, each.forward.median = 2, 2 * each.forward.median
    together = SimpleNamespace(**vars(alone) | {"stages": [*crowded.stages, *alone.stages]})
    assert fit_profile(together, "A100-80", replace(START, launch=TRUE.launch)).mean_error < 1e-3
