"""Before what imports megatron.core; and what this process captures, it captures once."""

import pytest

from megatron import backend

backend.install()

from tests.finetuning.captures import remembered


@pytest.fixture(autouse=True, scope="session")
def captures():
    with remembered():
        yield
