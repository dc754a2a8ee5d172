"""What benchmarks/dropin.py reads in a log, and the command that it starts. No times."""

import argparse
from types import SimpleNamespace

import pytest

from benchmarks import dropin


@pytest.fixture
def started(monkeypatch):
    """Commands that were started; each answers with a log of its iterations and of what was saved."""
    commands = []

    def run(command, **options):
        commands.append(command)
        log = "elapsed time per iteration (ms): 900.0 |\n" + "elapsed time per iteration (ms): 200.0 |\n" * 3
        if "--pipeline-log-saved-activations" in command:
            count = 2 if "bpipe" in command else 4
            log += f"megatron.pipeline.dropin: pipeline rank 0 saved at most {count}.50 MiB of activations, "
            log += f"{count} microbatches at stage 0\n"
        return SimpleNamespace(returncode=0, stdout=log)

    monkeypatch.setattr(dropin.subprocess, "run", run)
    return commands


def arguments(words: str) -> argparse.Namespace:
    return dropin.parse([*words.split(), "--checkout", "somewhere"])


def test_speed_takes_turns_and_leaves_the_first_line_out(started):
    """Each round begins with another contender; native names no schedule."""
    rows = dropin.measure_speed(arguments("speed --rounds 3"))
    assert {row["contender"]: row["tokens_per_second"] for row in rows} == {
        name: [pytest.approx(2 * 8 * 256 / 0.2)] * 3 for name in dropin.CONTENDERS
    }
    asked = [
        command[command.index("--pipeline-schedule") + 1] if "--pipeline-schedule" in command else None
        for command in started
    ]
    assert asked == [None, "flush", "2bw", "flush", "2bw", None, "2bw", None, "flush"]


def test_memory_is_what_the_log_says(started):
    rows = dropin.measure_memory(arguments("memory"))
    assert [(row["schedule"], row["rank"], row["mebibytes"], row["microbatches"]) for row in rows] == [
        ("flush", 0, 4.5, 4), ("bpipe", 0, 2.5, 2),
    ]  # fmt: skip


def test_a_run_that_fails_ends_the_benchmark(monkeypatch):
    """With what it wrote."""
    failed = SimpleNamespace(returncode=1, stdout="why it failed")
    monkeypatch.setattr(dropin.subprocess, "run", lambda *command, **options: failed)
    with pytest.raises(SystemExit, match="why it failed"):
        dropin.measure_speed(arguments("speed"))
