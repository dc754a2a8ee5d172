"""Hosts for tests: network namespaces where this machine can make them, else a skipped test that says why not."""

import contextlib
from collections.abc import Iterator

import pytest

from tools.hosts import Hosts, HostsUnavailable


@contextlib.contextmanager
def make_hosts(count: int, **options: float | None) -> Iterator[Hosts]:
    """`Hosts(count, **options)`, for the block."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(count, **options))
        except HostsUnavailable as error:
            pytest.skip(str(error))
        yield made
