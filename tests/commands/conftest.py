"""The command of a module's tests."""

import pytest

from tests.commands.in_process import runner


@pytest.fixture
def run(request, capsys):
    """Run the module's `tool` in this process."""
    return runner(request.module.tool, capsys)
