"""The pages on schedules show the pictures that docs/make_images.py draws, and their commands run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from megatron.commands import schedule

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {path.name: path.read_text() for path in [*sorted(DOCS.glob("schedules*.md")), DOCS / "zero_bubble.md"]}

NUM_COMMANDS = {
    "schedules.md": 12,
    "schedules_2bw.md": 2,
    "schedules_bpipe.md": 5,
    "schedules_interleaved.md": 1,
    "schedules_l2l.md": 6,
    "zero_bubble.md": 6,
}
"""Page -> how many commands of tools/schedule.py it shows; no page on schedules is without any."""


def load(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_the_command(monkeypatch):
    """The committed pictures, those on the pages, and those that the command draws, are the same."""
    images = load(DOCS / "make_images.py")
    drawn = []
    monkeypatch.setattr(images, "draw_placement", lambda *_: None)
    monkeypatch.setattr(images, "draw_timeline", lambda timelines, path, **options: drawn.append(path.name))
    images.main([])
    assert sorted(drawn) == sorted(path.name for path in (DOCS / "images").iterdir() if path.name in drawn)
    assert set(drawn) == {name for page in PAGES.values() for name in re.findall(r"\(images/([^)]+)\)", page)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", PAGES)
def test_its_commands_run(page, tmp_path, monkeypatch, capsys):
    """Each command of a page ends with status 0; what is shown below one is what it prints."""
    monkeypatch.chdir(tmp_path)
    num_commands = 0
    for block in re.findall(r"```\n(\$.*?)```", PAGES[page], re.DOTALL):
        for command, shown in re.findall(r"\$ python tools/schedule\.py (.*)\n((?:[^$].*\n)*)", block):
            assert schedule.main(shlex.split(command)) == 0
            printed = capsys.readouterr().out
            assert shown in ("", printed)
            num_commands += 1
    assert num_commands == NUM_COMMANDS[page]
