"""docs/schedules.md shows the pictures that docs/make_images.py draws, and its commands run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from megatron.commands import schedule

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text()


def load(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["schedules.md", "adding_a_schedule.md"])
def test_links_lead_somewhere(page):
    """Every page, picture and heading that is linked is there."""
    for target in re.findall(r"\]\((?!http)([^)]+)\)", (DOCS / page).read_text()):
        path, _, heading = target.partition("#")
        assert (DOCS / path).is_file(), target
        headings = re.findall(r"^#+ (.*)$", (DOCS / path).read_text(), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]  # as GitHub makes them
        assert not heading or heading in anchors, target


def test_every_picture_is_made_by_the_command(monkeypatch):
    """The committed pictures, those on the page, and those that the command draws, are the same."""
    images = load(DOCS / "make_images.py")
    drawn = []
    monkeypatch.setattr(images, "draw_placement", lambda *_: None)
    monkeypatch.setattr(images, "draw_timeline", lambda timelines, path, **options: drawn.append(path.name))
    images.main([])
    assert sorted(drawn) == sorted(path.name for path in (DOCS / "images").iterdir() if path.name in drawn)
    assert set(drawn) == set(re.findall(r"\(images/([^)]+)\)", PAGE))


def test_its_commands_run(tmp_path, monkeypatch, capsys):
    """Each command of the page ends with status 0; what is shown below one is what it prints."""
    monkeypatch.chdir(tmp_path)
    num_commands = 0
    for block in re.findall(r"```\n(\$.*?)```", PAGE, re.DOTALL):
        for command, shown in re.findall(r"\$ python tools/schedule\.py (.*)\n((?:[^$].*\n)*)", block):
            assert schedule.main(shlex.split(command)) == 0
            printed = capsys.readouterr().out
            assert shown in ("", printed)
            num_commands += 1
    assert num_commands == 27
