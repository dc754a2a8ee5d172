"""Constants are found again from the times that they make, and what they do not explain is named."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.entries import read_entry
from megatron.planner.published.prediction import fit_entries, fit_profile, predict
from megatron.planner.time.calibration import FITTED, START
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.profile import StagePosition
from tests.planner.published.measured import BPIPE_TABLE_7, KORTHIKANTI

TRUE = replace(
    START, product_efficiency=0.7, product_overhead=30e-6, memory_efficiency=0.55, tensor_efficiency=0.45
)  # fmt: skip


def made_up(noise: float = 0.0) -> list:
    """Published configurations with the times that `TRUE` gives, times lognormal noise."""
    generator = np.random.default_rng(0)
    entries = [read_entry(entry) for entry in [*BPIPE_TABLE_7, *KORTHIKANTI]]
    return [
        replace(entry, seconds=predict(entry, TRUE).estimate.seconds * float(np.exp(noise * generator.normal())))
        for entry in entries
    ]


def test_finds_the_constants_again():
    fit = fit_entries(made_up())
    for name in FITTED:
        assert getattr(fit.constants, name) == pytest.approx(getattr(TRUE, name), rel=0.01)
    assert not fit.unexplained and fit.mean_error < 1e-4


@pytest.mark.full
def test_names_runs_that_were_held_up():
    """With 1% noise, two runs that took 1.3 times as long neither bend the constants nor go unnoticed."""
    entries = made_up(noise=0.01)
    held_up = [replace(entry, seconds=1.3 * entry.seconds) for entry in (entries[2], entries[8])]
    fit = fit_entries([*entries[:2], held_up[0], *entries[3:8], held_up[1], *entries[9:]])
    assert set(fit.unexplained) == {entry.id for entry in held_up}
    assert all(fit.errors[entry.id] == pytest.approx(1 / 1.3 - 1, abs=0.05) for entry in held_up)
    assert fit.constants.product_efficiency == pytest.approx(TRUE.product_efficiency, rel=0.05)


def test_a_run_that_cannot_be_is_left_aside():
    """And does not keep the others from being fitted; two with one id are refused."""
    entries = made_up()
    odd = replace(entries[0], id="odd", configuration=replace(entries[0].configuration, layers=(1,) * 16))
    assert "odd" not in fit_entries([*entries, odd]).errors
    with pytest.raises(ValueError, match="two measured runs have the id"):
        fit_entries([*entries, entries[0]])


def test_refuses_fewer_runs_than_constants():
    with pytest.raises(ValueError, match="3 measured runs cannot fix 4 constants"):
        fit_entries(made_up()[:3])


MODEL = Architecture.gpt3(
    num_layers=3, hidden_size=2048, num_attention_heads=16, sequence_length=1024, vocabulary_size=51200
)  # fmt: skip
OF_STAGES = replace(
    START, product_efficiency=0.6, product_overhead=20e-6, memory_efficiency=0.7, tensor_efficiency=0.5, launch=1e-7
)  # fmt: skip


def stage(place: str, tensor: int, size: int, scope: str) -> SimpleNamespace:
    """A stage of one layer with the times that `OF_STAGES` gives."""
    pipeline = 1 if place == "only" else 3
    asked = Configuration(
        tensor=tensor, pipeline=pipeline, micro_batch_size=size, global_batch_size=size, recompute=scope
    )
    cluster = Cluster(gpu="A100-80", nodes=1, gpus_per_node=tensor * pipeline)
    model = replace(MODEL, num_layers=pipeline)
    costs = FirstPrinciples(model, cluster, MEGATRON_CORE, OF_STAGES).costs(asked, (1,) * pipeline)
    index = {"only": 0, "first": 0, "middle": 1, "last": 2}[place]
    return SimpleNamespace(
        place=StagePosition(place), num_layers=1, tensor=tensor, micro_batch_size=size, working=tensor,
        recompute=RecomputeScope(scope), forward=SimpleNamespace(median=costs.forward[index]),
        backward=SimpleNamespace(median=costs.backward[index]),
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
def test_finds_the_constants_of_a_profile(tensors):
    fit = fit_profile(profile(*tensors), "A100-80", replace(START, launch=OF_STAGES.launch))
    assert not fit.unexplained and fit.mean_error < 1e-3
    for name in ("product_efficiency", "product_overhead", "memory_efficiency"):
        assert getattr(fit.constants, name) == pytest.approx(getattr(OF_STAGES, name), rel=0.02)
    expected = OF_STAGES if len(tensors) > 1 else START
    assert fit.constants.tensor_efficiency == pytest.approx(expected.tensor_efficiency, rel=0.05)


def test_stages_beside_others_are_left_out():
    """Only times on a shared processor count during which nobody else worked."""
    alone = profile(1)
    crowded = profile(1)
    for each in crowded.stages:
        each.working, each.forward.median = 2, 2 * each.forward.median
    together = SimpleNamespace(**vars(alone) | {"stages": [*crowded.stages, *alone.stages]})
    assert fit_profile(together, "A100-80", replace(START, launch=OF_STAGES.launch)).mean_error < 1e-3
