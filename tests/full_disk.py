"""A disk that is full, for a test: files of this process can grow no further."""

import contextlib
import resource
import sys
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process gets larger in the block. Python would write a module that is imported there cut short,
    and later processes would read it: it writes none."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
