"""A setting of a configuration is a row of one table, and whatever lists settings follows from it."""

import csv
import json
import subprocess
import sys
import tokenize

import pytest

from megatron.commands.grid_search.trial_results import TrialEntry
from megatron.planner.job.configuration import CHOSEN, SETTINGS, Configuration
from tests.commands.in_process import ROOT


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """What settings_case.py finds of two more settings, a switch and a number with a variable of its own."""
    folder = tmp_path_factory.mktemp("settings")
    done = subprocess.run(
        [sys.executable, "-m", "tests.planner.job.settings_case", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_setting_is_a_flag_and_a_name(seen):
    assert seen["flags"] == ["--rinse", "--soap", "3"]
    assert seen["name"].endswith("-rinsed-soap3")


def test_a_new_setting_is_in_all_records(seen):
    """Kept ones have its value, rejected ones null for any; and it is read again."""
    first, *others = seen["records"]
    assert first == {"status": "kept", "rinses": True, "soap": 3}
    assert others and all(each == {"status": "rejected", "rinses": None, "soap": None} for each in others)
    head, row = csv.reader(seen["csv"])
    cells = dict(zip(head, row, strict=True))
    assert (cells["rinses"], cells["soap"]) == ("True", "3") and head.index("soap") == head.index("expert_tensor") - 1
    assert seen["read"] == [True, 3] and seen["given"] == [True, 4]
    assert (seen["written"]["rinses"], seen["written"]["soap"]) == (True, 3)


def test_a_new_setting_is_in_page_and_script(seen):
    """In words where it has some; a script sets its variable, or else has its flag."""
    assert "flush with rinsed weights, t=2, p=2" in seen["page"]
    assert "# flush with rinsed weights, t=2, p=2" in seen["script"]
    assert 'SOAP="${SOAP:-3}"' in seen["script"] and "--rinse" in seen["script"] and "--soap" not in seen["script"]


def test_a_planner_flag_is_named_in_three_files():
    """The last one that came: its row, where a search tries it, and where it is priced."""
    found = []
    for path in (ROOT / "megatron").rglob("*.py"):
        if path.is_relative_to(ROOT / "megatron" / "planner") or path.is_relative_to(ROOT / "megatron" / "commands"):
            with path.open("rb") as file:
                if any(token.string == "single_gradient_buffer" for token in tokenize.tokenize(file.readline)):
                    found.append(str(path.relative_to(ROOT / "megatron" / "planner")))
    assert sorted(found) == ["job/configuration.py", "planner.py", "search/explore.py"]


CHANGES = {
    "tensor": 2, "pipeline": 2, "data": 2, "virtual": 2, "micro_batch_size": 4, "global_batch_size": 16,
    "recompute": "layer", "schedule": "2bw", "balance": True, "sequence_parallel": True, "distributed_optimizer": True,
    "rank_mapping": "optimized", "provisional": "stage", "layers": (3, 1), "single_gradient_buffer": True,
    "resident_stages": 3, "host_update": "eager", "stash": "host", "gathers_fetch": True,
}  # fmt: skip
NEEDED = {
    "layers": {"pipeline": 2}, "provisional": {"schedule": "2bw"}, "single_gradient_buffer": {"schedule": "2bw"},
    **{name: {"schedule": "l2l"} for name in ("resident_stages", "host_update", "stash")},
    "gathers_fetch": {"schedule": "l2l", "data": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_runs_with_different_settings_have_different_names_and_flags(name):
    """So no run takes the place of another; the number of replicas is that of the processes, and no flag."""
    plain = {"micro_batch_size": 2, "global_batch_size": 8} | NEEDED.get(name, {})
    one, other = Configuration(**plain), Configuration(**plain | {name: CHANGES[name]})
    assert TrialEntry(configuration=one).name != TrialEntry(configuration=other).name
    assert (one.argv() == other.argv()) is (name == "data")


def test_what_a_search_chooses_are_settings():
    assert set(CHOSEN) < set(SETTINGS) and len(set(CHOSEN)) == len(CHOSEN)
