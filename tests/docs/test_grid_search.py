"""docs/grid_search.md: its commands run, find what the page shows, and the options are all there are."""

import json
import re
import shlex

import pytest

from megatron.commands import grid_search as tool
from megatron.planner.job.cluster import CLUSTERS
from tests.commands.in_process import ROOT, runner

PAGE = (ROOT / "docs" / "grid_search.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", re.sub(r"^```yaml\n.*?^```", "", PAGE, flags=re.M | re.S), re.M | re.S)


@pytest.fixture
def run(capsys):
    return runner(tool, capsys)


def searches() -> list[tuple[list[str], list[str]]]:
    """The words of each search on the page, and the lines that it shows below."""
    found = []
    for block in BLOCKS:
        first, *lines = block.splitlines()
        if first.startswith("$ python tools/grid_search.py "):
            found.append((shlex.split(first.removeprefix("$ python tools/grid_search.py ")), lines))
    return found


@pytest.mark.parametrize(
    "argv, lines",
    [pytest.param(*each, marks=[pytest.mark.full] * ("--output" in each[0])) for each in searches()],
    ids=["first", "bpipe", "script"],
)
def test_commands_find_what_is_shown(run, argv, lines, monkeypatch, tmp_path):
    """The search succeeds; counts, the fastest and the paper's algorithm are those of the page."""
    monkeypatch.chdir(ROOT)
    argv = [str(tmp_path / word) if word == "plan" else word for word in argv]
    status, out, _ = run(*argv, "--json", *([] if "--top" in argv else ["--simulate", "1"]))
    assert status == 0
    content = json.loads(out)
    shown = [line.split() for line in lines if re.match(r" +\d+  ", line)]
    for row, best in zip([row for row in shown if len(row) > 10], content["best"], strict=False):
        assert row[:5] == [str(best[name]) for name in ("rank", "schedule", "tensor", "pipeline", "data")]
        assert best["recompute"] in row
    counts = next((line for line in lines if " configurations fit" in line), None)
    if counts is not None:
        assert counts.startswith(f"{content['num_kept']} configurations fit, {content['num_rejected']} choices")
    if "--paper-algorithm" in argv:
        assert lines[-len(content["paper_algorithm"]) :] == content["paper_algorithm"]


def test_all_options_are_named(capsys):
    """Each option of the command stands on the page, and each on the page is one."""
    with pytest.raises(SystemExit):
        tool.main(["search", "--help"])
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    table = PAGE[PAGE.index("## Options") : PAGE.index("## How long it takes")]
    assert set(re.findall(r"`(--[a-z-]+)`", table)) - {"--global-batch-size"} == options


def test_clusters_are_named():
    """The page names the files that come along."""
    for path in CLUSTERS.glob("*.yaml"):
        assert f"`{path.stem}`" in PAGE
