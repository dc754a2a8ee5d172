"""The pages on searches: their commands run, find what the pages show, and the options are all there are."""

import json
import re
import shlex

import pytest

from megatron.commands import grid_search as tool
from megatron.planner.job.cluster import CLUSTERS
from tests.commands.in_process import ROOT, runner

PAGE, EXAMPLES, SWEEP = (
    (ROOT / "docs" / name).read_text() for name in ("grid_search.md", "search_examples.md", "sweep.md")
)
BLOCKS = [
    block
    for page in (PAGE, EXAMPLES, SWEEP)
    for block in re.findall(r"^```\n(.*?)^```", re.sub(r"^```yaml\n.*?^```", "", page, flags=re.M | re.S), re.M | re.S)
]


@pytest.fixture
def run(capsys):
    return runner(tool, capsys)


def commands(name: str) -> list[tuple[list[str], list[str]]]:
    """The words of each command of this name on the pages, and the lines that are shown below it."""
    found = []
    for block in BLOCKS:
        first, *lines = block.splitlines()
        if first.startswith(f"$ python tools/grid_search.py {name} "):
            found.append((shlex.split(first.removeprefix("$ python tools/grid_search.py ")), lines))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "argv, lines",
    [pytest.param(*each, marks=[pytest.mark.full] * ("--output" in each[0])) for each in commands("search")],
    ids=["first", "bpipe", "script"],
)
def test_commands_find_what_is_shown(run, argv, lines, monkeypatch, tmp_path):
    """The search succeeds; counts and the fastest are those of the page."""
    monkeypatch.chdir(ROOT)
    argv = [str(tmp_path / word) if word == "plan" else word for word in argv]
    status, out, _ = run(*argv, "--json", *([] if "--top" in argv else ["--simulate", "1"]))
    assert status == 0
    content = json.loads(out)
    shown = [re.sub(r"(local|TE), \w+", "", line).split() for line in lines if re.match(r" +\d+  ", line)]
    for row, best in zip([row for row in shown if len(row) > 10], content["best"], strict=False):
        assert row[:5] == [str(best[name]) for name in ("rank", "schedule", "tensor", "pipeline", "data")]
        assert best["recompute"] in row
    counts = next((line for line in lines if " configurations fit" in line), None)
    if counts is not None:
        assert counts.startswith(f"{content['num_kept']} configurations fit, {content['num_rejected']} choices")


@pytest.mark.full
def test_a_sweep_finds_what_is_shown(run, monkeypatch, tmp_path):
    """Headings, each row's configuration and remarks, its days and money to 2%, and where the knee is."""
    monkeypatch.chdir(ROOT)
    ((argv, lines),) = commands("sweep")
    status, out, _ = run(*(str(tmp_path) if word == "plan" else word for word in argv))
    assert status == 0
    shown, found = ([re.split(" {2,}", line.strip()) for line in text] for text in (lines, out.splitlines()))
    assert shown[2] == found[2]
    names = shown[2]
    for row, other in zip(shown[3:8], found[3:8], strict=True):
        assert (row[:4], row[len(names) - 2 :]) == (other[:4], other[len(names) - 2 :])
        for name in ("days", "USD"):
            values = [float(each[names.index(name)].replace(",", "")) for each in (row, other)]
            assert values[0] == pytest.approx(values[1], rel=0.02)
    assert shown[9][0].split(", with")[0] == found[9][0].split(", with")[0]


def options_of(command: str, capsys) -> set[str]:
    with pytest.raises(SystemExit):
        tool.main([command, "--help"])
    return set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}


def test_options_of_a_sweep_are_named(capsys):
    """The page says which of a search's it lacks, and which it has besides."""
    sweep, search = options_of("sweep", capsys), options_of("search", capsys)
    (line,) = [line for line in SWEEP.splitlines() if line.startswith("A sweep takes ")]
    assert set(re.findall(r"`(--[a-z-]+)`", line.split(". ")[0])) == sweep ^ search


def test_all_options_are_named(capsys):
    """Each option of the command stands on the page, and each on the page is one."""
    options = options_of("search", capsys)
    assert set(re.findall(r"`(--[a-z-]+)`", PAGE[PAGE.index("## Options") :])) == options


def test_clusters_are_named():
    """The page names the files that come along."""
    for path in CLUSTERS.glob("*.yaml"):
        assert f"`{path.stem}`" in PAGE
