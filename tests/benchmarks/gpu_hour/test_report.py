"""The hour's report: measured figures only, and what is missing is said."""

import pytest

from benchmarks.gpu_hour import report
from tests.benchmarks.gpu_hour import fake_hour
from tests.benchmarks.gpu_hour.fake_hour import part, run

GOOD = part("good", "write('7 tokens/s | 8', 'and more', answer=7)")
FAILS = part("fails", "write('half'); sys.exit(3)")
LATE = part("late", "write('x')")


def test_table_has_what_was_measured_and_says_what_was_not(tmp_path):
    """A row for each part with figures, also of one that failed later, which is marked; failed parts and those that
    were not run stand below with their reasons.
    """
    run(tmp_path, [GOOD, FAILS])
    lines = report.report(tmp_path, [GOOD, FAILS, LATE])
    assert lines[0].startswith("Made-up card, 8 GiB, torch 2, Python 3")
    assert "| What does good do? | 7 tokens/s \\| 8<br>and more |" in lines
    assert "| What does fails do? (failed: not all of it) | half |" in lines
    assert [line for line in lines if line.startswith("- ")] == [
        "- `fails`: failed, exit status 3; last it said: it printed nothing", "- `late`: not run"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "program", ["write('x')", "file.write_text(json.dumps({'lines': [], 'figures': {}, 'rehearsal': True}))"]
)
def test_a_rehearsal_is_refused(tmp_path, capsys, program):
    """In one sentence, whether the runner or the part says that it is one; a folder without results is, too."""
    run(tmp_path, [part("good", program)], *(["--rehearse"] if "rehearsal" not in program else []))
    assert report.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{tmp_path} holds a rehearsal, whose figures say nothing of a GPU" in said
    assert report.main([str(tmp_path / "elsewhere")]) == 1
    assert "holds no results of an hour" in capsys.readouterr().err


def test_results_of_several_sources_are_told_apart(tmp_path, monkeypatch):
    """Rows that do not belong together are not passed off as one hour's."""
    run(tmp_path, [GOOD])
    monkeypatch.setattr(fake_hour, "SOURCES", "others")
    run(tmp_path, [LATE])
    assert any(line.startswith("The rows are of several sources: ") for line in report.report(tmp_path, [GOOD, LATE]))
