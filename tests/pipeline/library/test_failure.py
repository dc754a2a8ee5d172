"""A rank that fails does not leave the others waiting."""

import time

import pytest

from tests import workers

CASES = "tests.pipeline.library.library_cases"


def test_a_failing_rank_ends_the_job_in_seconds():
    """A module that raises in the third batch ends both processes, though the other one's modules are well."""
    start = time.monotonic()
    with pytest.raises(workers.WorkerError) as failure:
        workers.run(2, f"{CASES}:with_a_failing_module", timeout=100)
    assert str(failure.value).count("died with exit code 1") == 2
    assert time.monotonic() - start < 60  # the patience of transfers is ten minutes
