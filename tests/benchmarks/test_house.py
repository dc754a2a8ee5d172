"""The house's sizes are counted right, and a freeze that changed is found."""

import json
from textwrap import dedent

import pytest

from benchmarks.house import freeze, programs
from benchmarks.house.command_lines import dry_run_of
from benchmarks.house.compare import differences
from benchmarks.house.count import count
from benchmarks.house.imports import Modules

FILES = {
    "megatron/pipeline/program/instruction.py": '''
        """Words."""

        class Kind:
            """What."""
            F = "F"
            HOLD = "HOLD"  # kept

            def row(self):
                text = """
                two lines

                """
                return text
        ''',
    "megatron/pipeline/program/weight_policies.py": """
        class WeightPolicy:
            delay: int
            predicts: bool = False

            @property
            def drains(self) -> bool:
                return self.delay == 0
        """,
    "megatron/pipeline/run.py": """
        from argparse import ArgumentParser
        import argparse
        from typing import TYPE_CHECKING

        from megatron.pipeline import lists
        from megatron.pipeline.program.instruction import Kind

        if TYPE_CHECKING:
            from megatron.pipeline.start import Start

        def run(options: argparse.Namespace, policy, start: "Start"):
            return Kind.HOLD if policy.predicts or policy.drains else Kind.F, policy.delay
        """,
    "megatron/pipeline/start.py": """
        from megatron.pipeline.run import run
        from megatron.pipeline.small import SMALL
        KEPT = codes_of("HOLD")
        """,
    "megatron/pipeline/small.py": "SMALL = 1\n",
    "megatron/pipeline/lists.py": """
        from megatron.pipeline import one, two, three
        TABLE = {"1": one, "2": two, "3": three}
        """,
    "megatron/pipeline/one.py": "",
    "megatron/pipeline/two.py": "",
    "megatron/pipeline/three.py": "",
    "megatron/pipeline/program/upward.py": "from megatron.planner.plan import PLAN\n",
    "megatron/planner/plan.py": """
        from megatron.pipeline.start import run
        from megatron.pipeline.small import SMALL
        PLAN = 1
        """,
    "tests/test_one.py": "# nothing\n\nassert True\n",
    "tools/long.py": "x = 1\n" * 501,
    "README.md": "a\nb\n",
    "docs/page.md": "a\n" * 7,
    "docs/flags.md": "a\n" * 70,
}


@pytest.fixture
def tree(tmp_path):
    """A tiny project."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return tmp_path


@pytest.fixture
def frozen(tmp_path):
    """Two folders, a number in a file of each."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        data = {"case": {"end": 1.5, "rows": ["0F0 0B0", "1F0"], "flag": True}, "other": 1}
        (tmp_path / name / "group.json").write_text(json.dumps(data))
    return tmp_path / "before", tmp_path / "after"


def change(folder, edit):
    """Let `edit` change what a frozen file holds."""
    data = json.loads((folder / "group.json").read_text())
    edit(data)
    (folder / "group.json").write_text(json.dumps(data))


def test_sizes_of_a_tiny_project(tree):
    """Prose, comments and blank lines are no code; blank lines within a string are none either."""
    found = {each.name: each.value for each in count(tree)}
    assert found == {
        "lines of code in megatron/": 8 + 6 + 9 + 3 + 1 + 2 + 1 + 3,
        "Python files in megatron/": 11,
        "lines of tests": 3,
        "lines of code outside tests": 33 + 501,
        "files over 400 lines, outside tests": 1,
        "files over 500 lines, outside tests": 1,
        "files with one importer": 7,
        "files under 80 lines with one importer, in their folder": 2,
        "files that name the word of most": 3,
        "files that name HOLD": 3,
        "files that name PREDICT": 0,
        "files that name EVICT": 0,
        "files that ask a policy's booleans": 1,
        "places that ask a policy's booleans": 2,
        "files that name argparse.Namespace": 1,
        "circles of modules, type-only imports too": 1,
        "arrows upward between folders": 1,
        "lines of README.md": 2,
        "lines of the longest docs page, but the generated one": 7,
    }


def test_what_was_counted_is_listed(tree):
    """Rows of a table are no closets; the arrow upward is the one that stands for fewer imports."""
    rows = {each.name: each.rows for each in count(tree)}
    assert rows["files under 80 lines with one importer, in their folder"] == (
        "megatron.pipeline.lists <- megatron.pipeline.run",
        "megatron.pipeline.run <- megatron.pipeline.start",
    )
    assert rows["circles of modules, type-only imports too"] == ("megatron.pipeline.run megatron.pipeline.start",)
    assert rows["arrows upward between folders"] == ("megatron/pipeline -> megatron/planner",)
    assert rows["files over 500 lines, outside tests"] == ("tools/long.py: 501",)
    assert not Modules(tree).circles()


def test_what_is_the_same(frozen):
    assert differences(*frozen) == []


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda data: data["case"].update(end=1.5000001), "1 values differ; first case / end:\n  1.5\n  1.5000001"),
        (lambda data: data["case"].pop("end"), "1 values differ; first case / end:\n  1.5\n  (missing)"),
        (lambda data: data.update(more=[2]), "1 values differ; first more:\n  (missing)\n  [2]"),
        (lambda data: data["case"]["rows"].pop(), '1 values differ; first case / rows / 1:\n  "1F0"\n  (missing)'),
        (lambda data: data["case"]["rows"].insert(0, "1F1"), "3 values differ; first case / rows / 0"),
        (lambda data: data["case"].update(flag=1), "1 values differ; first case / flag:\n  true\n  1"),
    ],
)
def test_what_changed_is_found(frozen, edit, said):
    """A number, a key that is gone or new, a row, and 1 for True, each with its key and both values."""
    change(frozen[1], edit)
    [line] = differences(*frozen)
    assert line.startswith("group.json: ") and said in line


def test_a_tolerance_is_for_numbers_with_a_point(frozen):
    """It forgives the last digits of a time, and no count."""
    change(frozen[1], lambda data: data["case"].update(end=1.5 * (1 + 1e-13)))
    assert differences(*frozen) and not differences(*frozen, tolerance=1e-12)
    change(frozen[1], lambda data: data.update(other=2))
    assert "other" in differences(*frozen, tolerance=10.0)[0]


def test_missing_files_are_found(frozen):
    """A group of one side is a difference; a folder without any is a mistake."""
    (frozen[0] / "more.json").write_text("{}")
    assert differences(*frozen) == [f"more.json: missing in {frozen[1]}"]
    (frozen[1] / "group.json").unlink()
    with pytest.raises(ValueError, match="holds no JSON file"):
        differences(*frozen)


def test_two_freezes_are_the_same(tmp_path, monkeypatch):
    """Of one group; and what is frozen holds rows, proofs and refusals."""
    monkeypatch.setattr(programs, "STAGES", (2,))
    monkeypatch.setattr(programs, "MICROBATCHES", (1, 2))
    for name in ("one", "two"):
        [(group, path)] = freeze.freeze(tmp_path / name, ["programs"], [])
        assert group == "programs" and path == tmp_path / name / "programs.json"
    assert (tmp_path / "one/programs.json").read_bytes() == (tmp_path / "two/programs.json").read_bytes()
    data = json.loads((tmp_path / "one/programs.json").read_text())
    assert data["flush p=2 m=2 v=1"]["rows"][1].startswith("1RECV_F0 1F0@0")
    assert data["flush p=2 m=2 v=1"]["proof"]["peak_saved_microbatches"] == [2, 1]
    assert "needs batches of at least 2" in data["2bw p=2 m=1 v=1"]["refused"][0]
    with pytest.raises(ValueError, match="programs of another freeze"):
        next(freeze.freeze(tmp_path / "one", ["flags"], []))


def test_dry_run_of_a_launcher():
    """As many ranks as the launcher would start; a line that is dry already stays as it is."""
    line = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4", "pretrain_gpt.py", "--lr", "1"]
    assert dry_run_of(line) == ["pretrain_gpt.py", "--lr", "1", "--dry-run", "8"]
    assert dry_run_of(["pretrain_bert.py", "--dry-run", "4"]) == ["pretrain_bert.py", "--dry-run", "4"]
    assert dry_run_of(["tools/partition.py"]) is None
