"""Entries from a search, and results that survive being killed."""

import json

import pytest
from hypothesis import given

from megatron.commands.grid_search.trial_results import (
    Result,
    ResultsFile,
    Settings,
    Status,
    TrialEntry,
    configuration_fields,
    read_entries,
)
from megatron.planner import Configuration
from tests.commands.trial.strategies import configurations


def configuration(**changes):
    return Configuration(**({"micro_batch_size": 1, "global_batch_size": 8} | changes))


def result(name="a", seconds=1.0, **changes):
    values = {"configuration": configuration_fields(configuration()), "directory": "x", "status": Status.DONE,
              "settings": Settings(flags=(), iterations=10, warmup=3, threads=1)}  # fmt: skip
    return Result(name=name, seconds=seconds, low=seconds, high=seconds, **values | changes)


@given(configurations(), configurations())
def test_names_are_unique_and_good_for_files(first, second):
    """Two configurations have the same name only if they are the same."""
    names = TrialEntry(configuration=first).name, TrialEntry(configuration=second).name
    assert (names[0] == names[1]) == (first == second)
    assert all(name.replace("-", "").replace(".", "").isalnum() for name in names)


def kept(configuration):
    """What a search writes of a configuration, but for the numbers; balance is part of the schedule's name there."""
    values = configuration_fields(configuration)
    del values["balance"]
    return {"status": "kept", **values}


def lines(*records):
    return "\n".join(json.dumps(record) for record in records) + "\n"


def test_a_search_is_read_in_its_order_without_what_it_rejected(tmp_path):
    path = tmp_path / "found.jsonl"
    fast, slow = configuration(pipeline=2), configuration(pipeline=4, schedule="2bw", balance=True)
    path.write_text(
        lines(
            {**kept(fast), "iteration_seconds": 1.5, "verdict": "fits", "mfu": 0.4},
            {"status": "rejected", "tensor": 4, "pipeline": None, "reason": "stage 0 misses 3.1 GiB"},
            {**kept(slow), "schedule": "2bw+balance", "iteration_seconds": 2.5, "verdict": "borderline"},
        )
    )
    entries = read_entries(path)
    assert [(entry.configuration, entry.predicted_seconds) for entry in entries] == [(fast, 1.5), (slow, 2.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "line 1: brackets are nested too deeply; write it with"),
        ("7", "line 1: it holds 7, no object; write it with"),
        (lines(kept(configuration()) | {"iteration_seconds": 1, "tensor": True}), "tensor is True, a whole number is"),
        (
            lines(kept(configuration()) | {"iteration_seconds": 1, "sequence_parallel": 1}),
            "sequence_parallel is 1, true",
        ),
        ('{"status": "kept"}\n', "line 1"),
        (
            '{"status": "kept", "schedule": "2bw", "iteration_seconds": 1, "micro_batch_size": 3, '
            '"global_batch_size": 8}\n',
            "line 1.*does not divide",
        ),
        ("no json\n", "line 1"),
        ("[1]\n", "line 1"),
        ('{"status": "rejected"}\n', "no configuration that was kept"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "found.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_entries(path)


def test_results_come_back_in_the_order_of_the_entries(tmp_path):
    """A later result of the same name replaces the one before."""
    file = ResultsFile(tmp_path / "results.jsonl")
    entries = [TrialEntry(configuration=configuration(pipeline=p)) for p in (1, 2, 4)]
    for entry in reversed(entries):
        file.add(result(entry.name))
    file.add(result(entries[1].name, seconds=3.0))
    again = ResultsFile(tmp_path / "results.jsonl")
    assert [(each.name, each.seconds) for each in again.of(entries)] == [
        (entry.name, seconds) for entry, seconds in zip(entries, (1.0, 3.0, 1.0), strict=True)
    ]


def test_a_result_is_added_in_whole_or_not_at_all(tmp_path, monkeypatch):
    """A write that fails leaves the results before it, and no torn file beside them."""
    path = tmp_path / "results.jsonl"
    file = ResultsFile(path)
    file.add(result("a"))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        file.add(result("b"))
    assert ResultsFile(path).get("a") == result("a") and ResultsFile(path).get("b") is None
    assert list(tmp_path.iterdir()) == [path]


def test_another_file_is_not_written_over(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"iteration": 1}\n')
    with pytest.raises(ValueError, match="line 1 is no result"):
        ResultsFile(path)


def test_the_error_is_that_of_the_prediction():
    assert result(seconds=2.0, predicted_seconds=2.1).error == pytest.approx(0.05)
    assert result(seconds=None, predicted_seconds=2.1).error is None and result(seconds=2.0).error is None
