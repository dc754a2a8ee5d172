"""Errors of a command: one line each, and the exit status."""

import argparse

import pytest

from megatron.documents.command_line import run


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.json"), "error: a.json: No such file or directory"),
        (OSError(9, "Bad file descriptor", 99), "error: 99: Bad file descriptor"),
        (TimeoutError("other processes have held a lock for 2 s"), "error: other processes have held a lock for 2 s"),
    ],
    ids=["file", "descriptor", "no number"],
)
def test_an_error_of_the_system_is_a_line(capsys, error, line):
    """With the file's name where it has one, and with its own sentence where no number of the system says it."""

    def command(options):
        raise error

    assert run(command, argparse.Namespace()) == 2
    assert capsys.readouterr().err == f"{line}\n"
