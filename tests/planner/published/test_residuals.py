"""The residuals that come along: as files, as old as the time model, and how often their intervals hold."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.planner.published.entries import Entry, load_entries, read_entry
from megatron.planner.published.interval import (
    Interval,
    Intervals,
    NotValidated,
    interval_of,
    interval_record,
    interval_text,
    without_run,
    without_source,
)
from megatron.planner.published.prediction import predict
from megatron.planner.published.residuals import (
    BESIDE,
    Kind,
    Residual,
    Residuals,
    kind_of,
    load_others,
    load_residuals,
    read_residuals,
)
from megatron.planner.time.calibration import DEFAULT_NAME, load_calibration
from tests.planner.published.measured import KORTHIKANTI

KNOWN = load_residuals(DEFAULT_NAME)
EVERY_RUN = (*KNOWN.runs, *(run for each in load_others(DEFAULT_NAME) for run in each.runs))
CALIBRATION = load_calibration(DEFAULT_NAME)


def test_they_are_those_of_the_constants_that_come_along():
    """And say where they are from."""
    assert KNOWN.constants == CALIBRATION.constants and KNOWN.calibration == DEFAULT_NAME
    assert KNOWN.entries == "measurements.json" and "--write-residuals" in KNOWN.command
    assert len({run.id for run in KNOWN.runs}) == len(KNOWN.runs) >= 94
    assert all(0.3 < run.ratio < 3 for run in KNOWN.runs)


@pytest.mark.parametrize("entry", KORTHIKANTI, ids=lambda entry: entry["id"])
def test_they_are_as_old_as_the_time_model(entry):
    """A run that no constant was fitted to has the ratio that it has now; else write them again with the command that
    the file names."""
    now = read_entry(entry)
    prediction = predict(now, CALIBRATION.fitted)
    (stored,) = [run for run in KNOWN.runs if run.id == f"korthikanti-t5-{entry['id']}"]
    assert stored.ratio == pytest.approx(now.seconds / prediction.estimate.seconds, rel=5e-3)
    pressed = prediction.estimate.under_pressure
    assert stored.kind == kind_of(now.configuration, now.model, now.cluster, now.software, under_pressure=pressed)


@pytest.mark.parametrize("name", ["hopper_blackwell.json", "dgx_cloud_h100.json", "several_clusters.json"])
def test_other_files_of_runs_have_residuals_of_their_own(name):
    """As old as the constants and the time model; else write them again with the command that they name."""
    file = Path(__file__).parents[3] / "benchmarks" / "published" / name
    (others,) = [each for each in load_others(DEFAULT_NAME) if each.entries == file.name]
    assert others.constants == CALIBRATION.constants
    runs = {run.id: run for run in others.runs}
    predicted = [entry for entry in load_entries(file) if isinstance(entry, Entry) and entry.seconds is not None]
    assert set(runs) == {entry.id for entry in predicted}
    for entry in predicted[::6]:
        seconds = predict(entry, CALIBRATION.fitted).estimate.seconds
        assert runs[entry.id].ratio == pytest.approx(entry.seconds / seconds, rel=5e-3), entry.id
    joined = Intervals.of_calibration(DEFAULT_NAME, CALIBRATION.constants)
    estimates = {entry.id: (predict(entry, CALIBRATION.fitted).estimate, entry) for entry in predicted[::6]}
    known = [joined.of(found, each.model, each.cluster, each.software) for found, each in estimates.values()]
    assert sum(isinstance(each, Interval) for each in known) >= len(known) / 2


def test_intervals_hold():
    """Of runs of sources that are left out as many are inside as should be."""
    found = without_source(EVERY_RUN)
    assert found.num_runs > 200 and 0.75 <= found.share <= 0.85
    assert 0.78 <= without_run(EVERY_RUN).share <= 0.92


def test_every_kind_that_was_compared_has_an_interval():
    """One that is near 1. Of features that few runs have it is said how many have them."""
    found = {run.kind: interval_of(run.kind, EVERY_RUN) for run in EVERY_RUN}
    for kind, each in found.items():
        if isinstance(each, NotValidated):
            features = ", ".join(extra for extra in kind.extras if extra not in BESIDE)
            assert features and f"published runs, and with {features}" in each.reason
            assert " compared, which took " in each.reason
        elif kind.under_pressure or "experts" in kind.extras:
            assert 0.7 < each.low < 1 < each.high < 1.35
        else:
            assert 0.87 < each.low < 1 < each.high < 1.18
    assert sum(isinstance(found[run.kind], Interval) for run in EVERY_RUN) > 300


def test_a_file_gives_them_back(tmp_path):
    path = tmp_path / "mine.json"
    kind = Kind(device="H100", attention="flash attention", precision="16 bits", strategy="flush", extras=("a", "b"))
    written = Residuals(
        calibration="mine", constants={"launch": 3e-5}, entries="e.json", command="c", date="2026-11-25",
        runs=(*KNOWN.runs[:3], Residual(id="x", source="y", ratio=1.25, kind=kind)),
    )  # fmt: skip
    written.save(path)
    assert read_residuals(path) == written and len(path.read_text().splitlines()) == 15
    path.write_text('{"calibration": "mine"}')
    with pytest.raises(ValueError, match=r"mine\.json: constants is missing"):
        read_residuals(path)


def test_other_constants_have_none(tmp_path):
    """Unless they come with residuals of their own; nor has what a profile predicts. Both say why."""
    entry = read_entry(KORTHIKANTI[3])
    estimate = predict(entry, CALIBRATION.fitted).estimate
    asked = estimate, entry.model, entry.cluster, entry.software
    known = Intervals.of_calibration(DEFAULT_NAME, CALIBRATION.constants).of(*asked)
    low, high = known.seconds(estimate.seconds)
    assert low < entry.seconds < high
    assert interval_text(known, 10.0) == f"{10 * known.low:.3g}-{10 * known.high:.3g}"
    record = interval_record(known, estimate.seconds)
    assert record["interval"]["low_seconds"] == low and record["not_validated"] is None
    changed_constants = {**CALIBRATION.constants, "launch": 1e-5}
    changed = Intervals.of_calibration(DEFAULT_NAME, changed_constants).of(*asked)
    assert "constants of a100 were not held against" in changed.reason
    mine = tmp_path / "mine.json"
    replace(KNOWN, constants=changed_constants, runs=EVERY_RUN).save(mine)
    given = Intervals.of_calibration("other", changed_constants, mine).of(*asked)
    assert given == known
    with pytest.raises(ValueError, match=r"mine\.json was written with other constants than those of a100; "):
        Intervals.of_calibration(DEFAULT_NAME, CALIBRATION.constants, mine)
    assert "mine were not held" in Intervals.of_calibration("mine", CALIBRATION.constants).of(*asked).reason
    profile = Intervals.of_profile().of(*asked)
    assert "docs/profiling.md" in profile.reason and interval_text(profile, 10.0) == "not validated"
    assert interval_record(profile, 10.0) == {"interval": None, "not_validated": profile.reason}
