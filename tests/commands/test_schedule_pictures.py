"""Pictures that no image holds: tools/schedule.py refuses the number in one sentence."""

import pytest

from megatron.commands import schedule
from tests.commands.in_process import runner

PICTURE = ["draw", "--schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--output", "x.png"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--width", "1e9"], "a picture 1e+09 inches wide cannot be drawn; give 2.15 to 400"),
        (["--width", "1e308"], "cannot be drawn; give 2.15 to 400 inches"),
        (["--width", "1e-320"], "cannot be drawn; give 2.15 to 400 inches"),
        (["--time-scale", "1e308"], "multiplied by 1e+308 are more than a number can hold"),
        (["--stages", "1024", "--microbatches", "1", "--batches", "1"], "rows of 1024 ranks are"),
    ],
)
def test_numbers_beyond_an_image(capsys, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    status, out, err = runner(schedule, capsys)(*PICTURE, *arguments)
    assert (status, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1
    assert reason in err and not list(tmp_path.iterdir())
