"""The prose: links lead somewhere, and the commands that it shows run."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.commands import schedule

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "papers").rglob("*.md"))]
GENERATED = "flags.md"
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^\$ python (tools/schedule\.py .*)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made for Markdown."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Every relative link names a file of the project, and its anchor a heading there."""
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != GENERATED], ids=lambda page: page.name)
def test_pages_are_short_and_wrapped(page):
    """At most 250 lines; prose, which tables, commands and pictures are not, has at most 132 characters a line."""
    text = page.read_text(encoding="utf-8")
    assert text.count("\n") <= 250
    prose = FENCED.sub("", text).splitlines()
    assert [line for line in prose if len(line) > 132 and not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/design.md"], ids=lambda page: page.name)
def test_schedule_commands_run(page, tmp_path, monkeypatch):
    """The commands of tools/schedule.py that these pages show succeed."""
    monkeypatch.chdir(tmp_path)
    for command in COMMAND.findall(page.read_text(encoding="utf-8")):
        argv = shlex.split(command, comments=True)
        assert argv[0] == "tools/schedule.py" and schedule.main(argv[1:]) == 0
