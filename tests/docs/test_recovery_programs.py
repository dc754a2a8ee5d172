"""docs/recovery_programs.md shows what its commands print."""

import re
import shlex
from pathlib import Path

from megatron.commands import schedule

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recovery_programs.md").read_text()


def test_its_commands_print_what_it_shows(tmp_path, monkeypatch, capsys):
    """In the order of the page, in one folder."""
    monkeypatch.chdir(tmp_path)
    num_commands = 0
    for block in re.findall(r"```\n(\$.*?)```", PAGE, re.DOTALL):
        for command, shown in re.findall(r"\$ python tools/schedule\.py (.*)\n((?:[^$].*\n|\n)*)", block):
            assert schedule.main(shlex.split(command)) == 0
            assert capsys.readouterr().out == shown
            num_commands += 1
    assert num_commands == 3


def test_bpipe_pays_with_time(capsys):
    """Without a rank its activations do not move: 57.6% slower without rank 0, and flush 30.3%."""
    for name, slower in (("bpipe", "57.6%"), ("flush", "30.3%")):
        job = f"without --schedule {name} --stages 4 --microbatches 8 --replicas 4 --lost 0.0"
        assert schedule.main(job.split()) == 0
        assert slower in capsys.readouterr().out and slower in PAGE
