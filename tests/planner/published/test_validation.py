"""The validation's numbers: errors of runs left out, regrets, facts about memory, and when a bar is reached."""

import json
from dataclasses import replace

import pytest

from megatron.planner.published.entries import read_entry
from megatron.planner.published.prediction import fit_entries, predict
from megatron.planner.published.validation import Fact, choices, judge_facts, load_facts, row_errors
from megatron.planner.published.validation_report import validate
from megatron.planner.time.calibration import Calibration, constants_as_dict, load_calibration
from tests.planner.published import measured
from tests.planner.published.bpipe_memory import facts as published_facts
from tests.planner.published.test_sharded_runs import NARAYANAN, TORCHTITAN

ENTRIES = [read_entry(entry) for entry in measured.ALL]
FITTED = [read_entry(entry) for entry in measured.BPIPE_TABLE_7]


def calibration(entries: list) -> Calibration:
    fit = fit_entries(entries)
    return Calibration(
        name="test", about="", date="", entries=[entry.id for entry in entries], unexplained={}, mean_error=0.0,
        constants=constants_as_dict(fit.constants),
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return row_errors(ENTRIES, calibration(FITTED))


def outcome(outcomes: list, text: str):
    (found,) = [each for each in outcomes if text in each.test]
    return found


@pytest.mark.full
def test_a_fitted_run_is_predicted_without_it(rows):
    """Its error is that of a fit to the others; a run that was never fitted has that of the whole fit."""
    by_id = {row.entry.id: row for row in rows}
    name = FITTED[0].id
    others = fit_entries(FITTED[1:]).constants
    assert by_id[name].left_out
    assert by_id[name].worst == predict(FITTED[0], others).errors["iteration"]  # not even where the fit begins
    other = by_id["22B-layer"]
    assert not other.left_out
    whole = predict(other.entry, calibration(FITTED).fitted)
    assert other.worst == pytest.approx(whole.errors["iteration"])


@pytest.mark.full
def test_few_fitted_runs_are_not_held_against_a_fit_to_fewer(rows):
    """A file with some of them still tells the errors of the others."""
    found = row_errors([*FITTED[:6], *ENTRIES[-4:]], calibration(FITTED))
    assert [row.entry.id for row in found] == [entry.id for entry in ENTRIES[-4:]]
    assert not any(row.left_out for row in found)


@pytest.mark.full
def test_a_run_that_is_far_off_does_not_hide(rows):
    """Leaving one out shows a run that the fit would have bent to: 1.5 times its time is an error of a third."""
    slow = replace(FITTED[1], seconds=1.5 * FITTED[1].seconds)
    entries = [FITTED[0], slow, *FITTED[2:]]
    found = {row.entry.id: row.worst for row in row_errors(entries, calibration(entries))}
    assert found[slow.id] == pytest.approx(-1 / 3, abs=0.03)


def test_bars(rows):
    ranked = [entry for entry in ENTRIES if entry.chosen is not None]

    def throughput(entry):
        return entry.configuration.global_batch_size / predict(entry, load_calibration().fitted).estimate.seconds

    outcomes = validate(rows, [], choices(rows), ranked, throughput)
    calm = outcome(outcomes, "without allocator pressure")
    assert calm.numbers["num_runs"] == calm.numbers["num_left_out"] == len(FITTED) - 1
    assert calm.reached and calm.numbers["mean_error"] < 0.025
    korthikanti = outcome(outcomes, "22B and 175B")
    assert korthikanti.reached and korthikanti.numbers["num_left_out"] == 0
    assert outcome(outcomes, "several nodes").reached
    flags = outcome(outcomes, "are flagged")
    assert flags.numbers["num_flagged"] == flags.numbers["num_pressed"] == 1
    assert all(each.reached for each in outcomes if "PipeDream" in each.test)
    # The same runs, each measured a fifth slower, miss what they reached.
    late = [
        replace(row, prediction=replace(row.prediction, entry=replace(row.entry, seconds=1.2 * row.entry.seconds)))
        for row in rows
    ]
    assert not outcome(validate(late, [], [], [], throughput), "22B and 175B").reached
    swapped = [replace(entry, chosen=not entry.chosen) for entry in ranked]
    missed = validate([], [], [], swapped, throughput)
    assert [each.reached for each in missed] == [False, False]


def test_runs_without_a_pipeline_are_groups_of_their_own():
    """Without a bar; and the most memory that they printed is held against what is predicted."""
    entries = [read_entry(run) for run in [*TORCHTITAN, *NARAYANAN]]
    found = row_errors(entries, load_calibration())
    outcomes = validate(found, [], choices(found), [], lambda entry: 1.0)
    for text, count, least, most in (("torchtitan's FSDP", 4, 0.05, 0.1), ("DeepSpeed's ZeRO-3", 6, 0.1, 0.2)):
        group = outcome(outcomes, text)
        assert group.numbers["num_runs"] == count and group.numbers["num_left_out"] == 0 and group.reached is None
        assert least < group.numbers["mean_error"] < most
    peaks = outcome(outcomes, "most memory of a GPU")
    assert peaks.numbers["num_runs"] == 4 and peaks.numbers["max_error"] < 0.07
    assert abs(peaks.numbers["8-eager"]) == peaks.numbers["max_error"]
    assert not [each for each in validate(found[4:], [], [], [], lambda entry: 1.0) if "most memory" in each.test]


def test_regret():
    """The second of runs that take 30, 31 and 40 s is chosen where it is predicted to be the fastest."""
    rows = row_errors(FITTED, load_calibration())
    rows = sorted(rows, key=lambda row: row.prediction.estimate.seconds)[:3]
    times = (31.0, 30.0, 40.0)
    rows = [
        replace(row, prediction=replace(row.prediction, entry=replace(row.entry, seconds=seconds)))
        for row, seconds in zip(rows, times, strict=True)
    ]
    (choice,) = choices(rows)
    assert (choice.chosen, choice.best) == (rows[0].entry.id, rows[1].entry.id)
    assert choice.regret == pytest.approx(1 / 30) and choice.regret_of_top == 0
    assert choices(rows[:2]) == []


def test_facts_about_memory():
    """All 56 that the paper states, of which none is judged wrongly; see tests/planner/published/test_memory.py."""
    facts = [
        Fact(
            model="96B", t=t, p=p, d=d, micro_batch=size, recompute=scope, bpipe=balanced, fits=ran
        )
        for (t, p, d), size, scope, balanced, ran in published_facts()
    ]  # fmt: skip
    judged = judge_facts(facts, ENTRIES)
    assert all(each.is_right for each in judged)
    found = outcome(validate([], judged, [], [], lambda entry: 0.0), "memory of 96B")
    assert found.reached and found.found == "0 wrong of 56"
    turned = [replace(judged[0], fact=facts[0].model_copy(update={"fits": not facts[0].fits})), *judged[1:]]
    found = outcome(validate([], turned, [], [], lambda entry: 0.0), "memory of 96B")
    assert not found.reached and "1 wrong of 56; the farthest: 96B t=1 p=16 d=2" in found.found
    with pytest.raises(ValueError, match="no entry has a model called 7B"):
        judge_facts([facts[0].model_copy(update={"model": "7B"})], ENTRIES)
    with pytest.raises(ValueError, match=r"fact 96B t=3 p=16 .*104 attention heads do not divide by tensor 3"):
        judge_facts([facts[0].model_copy(update={"t": 3})], ENTRIES)
    unmeasured = [replace(entry, seconds=None) for entry in ENTRIES]
    assert judge_facts(facts[:3], unmeasured) == judged[:3]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"t": True}, "fact 0.t is True: a number is wanted, not a boolean; give a number"),
        ({"fits": 1}, "fact 0.fits is 1: input should be a valid boolean; give true or false"),
        ({"bipe": True}, "fact 0.bipe is True, and there is no such key; the nearest that is known is bpipe"),
        ({"d": 0}, "fact 0.d is 0: input should be greater than or equal to 1; give 1 or more"),
        ({"recompute": "most"}, "fact 0.recompute is 'most'"),
    ],
)
def test_a_file_of_facts(tmp_path, changes, told):
    path = tmp_path / "facts.json"
    fact = {"model": "96B", "t": 1, "p": 16, "d": 2, "micro_batch": 1, "recompute": "layer", "fits": True}
    path.write_text(json.dumps([fact]))
    assert load_facts(path)[0].strength == "stated"
    path.write_text(json.dumps([fact | changes]))
    with pytest.raises(ValueError) as refusal:
        load_facts(path)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)
