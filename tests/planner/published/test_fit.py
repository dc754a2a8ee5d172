"""Constants are found again from the times that they make, and what they do not explain is named."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.planner.published.entries import read_entry
from megatron.planner.published.fit import fit_entries
from megatron.planner.published.prediction import predict
from megatron.planner.time.constants import FITTED, START
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
    odd = replace(entries[0], id="odd", configuration=replace(entries[0].configuration, pipeline=32, data=1))
    assert "odd" not in fit_entries([*entries, odd]).errors
    with pytest.raises(ValueError, match="two measured runs have the id"):
        fit_entries([*entries, entries[0]])


def test_refuses_fewer_runs_than_constants():
    with pytest.raises(ValueError, match="3 measured runs cannot fix 4 constants"):
        fit_entries(made_up()[:3])
