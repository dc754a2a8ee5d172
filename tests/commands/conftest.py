"""The command of a module's tests."""

import pytest

from tests.commands.in_process import runner


@pytest.fixture
def run(request, capsys):
    """Run the module's `tool` in this process, with its `SUBCOMMAND` if it has one."""
    command, first = runner(request.module.tool, capsys), getattr(request.module, "SUBCOMMAND", ())
    return lambda *arguments: command(*first, *arguments)
