"""The benchmark of transitions runs; memory and checkpoint fill the run alike, which it asserts itself."""

import json

import pytest

from benchmarks import transition

TURN = {"groups": 0.5, "build": 0.5}
FOUND = {
    "parameters": 2_000_000,
    "state_bytes": 24_000_000,
    "bare": [{"wire": 0.25, "copies": 0.1, "checksums": 0.1}],
    "turns": [
        {"memory": True, "sent": 20_000_000, "seconds": {"describe": 0.1, **TURN, "hand over": 0.9}},
        {"memory": False, "sent": 0, "seconds": {"save": 2.0, **TURN, "load": 2.0}},
        {"memory": True, "sent": 20_000_000, "seconds": {"describe": 0.1, **TURN, "hand over": 1.1}},
        {"memory": False, "sent": 0, "seconds": {"save": 2.0, **TURN, "load": 2.0}},
    ],
}


def test_ratios_are_of_the_state_within_a_repeat():
    """Groups and building, which both have, count in the transition and not in the ratio."""
    lines = []
    assert transition.report("plain", FOUND, lines.append) == pytest.approx((1.0 / 4.0 + 1.2 / 4.0) / 2)
    text = "\n".join(lines)
    assert "state 1.10 (1.00-1.20) s, transition 2.10" in text and "ratio       0.28 (0.25-0.30)" in text
    assert "50.00 (45.00-55.00) s for each GB sent" in text


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_a_small_run(tmp_path, capsys, optimizer):
    path = tmp_path / "found.json"
    argv = ["--hidden-size", "64", "--layers", "2", "--ranks", "2", "--stages", "2", "1", "--repeats", "1"]
    argv += ["--schedule", "2bw", "--precision=--bf16"]
    where = ["--optimizers", optimizer, "--directory", str(tmp_path / "saved"), "--json", str(path)]
    assert transition.main([*argv, *where]) == 0
    found = json.loads(path.read_text())[optimizer]
    assert {each["memory"] for each in found["turns"]} == {True, False} and found["state_bytes"] > 0
    assert "of state held" in capsys.readouterr().out
