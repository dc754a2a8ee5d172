"""What the usual selection takes of a test's cases, who runs which files, and how faults are put into the code."""

import ast
import itertools
from types import SimpleNamespace

import pytest

from tests import mutants
from tests.conftest import TOGETHER, in_turn, sample, unit_of


class Case:
    """As much of a pytest item as `sample` asks."""

    def __init__(self, number: int, count: int, *ids: str, **params: int) -> None:
        self.nodeid, self.callspec = f"test_file.py::test[{number}]", SimpleNamespace(params=params)
        self.marks = {"sample": pytest.mark.sample(count, *ids).mark}

    def get_closest_marker(self, name: str) -> object:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark


def test_a_sample_shows_every_pair_of_values_if_it_can():
    cases = [Case(n, 9, a=a, b=b, c=c) for n, (a, b, c) in enumerate(itertools.product(range(3), repeat=3))]
    sample(cases)
    taken = [case.callspec.params for case in cases if "full" not in case.marks]
    assert len(taken) == 9
    for one, other in ("ab", "ac", "bc"):
        assert len({(each[one], each[other]) for each in taken}) >= 8


def test_a_sample_of_more_than_there_are_takes_all():
    cases = [Case(number, 5, a=number) for number in range(3)]
    sample(cases)
    assert not any("full" in case.marks for case in cases)


def test_a_sample_has_the_cases_that_it_names():
    cases = [Case(number, 3, "7", "4", a=number) for number in range(9)]
    sample(cases)
    assert [number for number, case in enumerate(cases) if "full" not in case.marks] == [0, 4, 7]


def test_files_that_make_the_same_things_stay_together():
    """Wherever they are; any other file is a unit of its own. What is named is there."""
    assert all((mutants.ROOT / place).exists() for place in TOGETHER)
    ours = "tests/finetuning/test_runs.py::test_a[b::c]", "tests/finetuning/data/test_tasks.py::test_d"
    assert len({unit_of(test) for test in ours}) == 1
    others = "tests/test_turns.py::test_a[b::c]", "tests/test_turns.py::test_d", "tests/test_docs.py::test_d"
    assert [unit_of(test) for test in others] == ["tests/test_turns.py"] * 2 + ["tests/test_docs.py"]


def test_processes_that_share_the_suite_begin_with_different_files():
    """Each has all files in the end, and each file is the first share of one process."""
    files = list("abcdefg")
    orders = [in_turn(files, worker, 3) for worker in range(3)]
    assert orders == [list("abcdefg"), list("cdefgab"), list("efgabcd")]


def test_the_list_of_mutants_is_that_of_this_code():
    """Those of code that has gone are drawn anew when they are many."""
    found = [mutants.mutated(mutant) for mutant in mutants.read()]
    assert len(found) == mutants.OF_EACH * len(mutants.SUBJECTS)
    assert sum(text is None for text in found) <= 0.1 * len(found)
    for mutant, text in zip(mutants.read(), found, strict=True):
        if text is not None:
            ast.parse(text)
            assert text != (mutants.ROOT / mutant.path).read_text()
