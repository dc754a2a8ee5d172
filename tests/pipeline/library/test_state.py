"""A run that stops and goes on elsewhere is the run that did not stop."""

import pytest
import torch

from tests import workers
from tests.pipeline.brought_programs import RHYTHM, written
from tests.pipeline.library.library_cases import Run

CASES = "tests.pipeline.library.library_cases"


def assert_equal(ranks, others):
    for one, other in zip(ranks, others, strict=True):
        assert one.losses == other.losses and one.rates == other.rates
        for name, value in one.values.items():
            assert torch.equal(value, other.values[name]), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
@pytest.mark.parametrize("reads_first", [False, True])
def test_a_resumed_run_is_the_run_without_interruption(schedule, reads_first):
    """Bit-equal with dropout, running means, a learning-rate schedule and, under 2bw, both versions; reports that
    nobody had read come behind the restart.
    """
    settings = Run(num_stages=3, dropout=0.3, scheduled=True)
    expected = workers.run(3, f"{CASES}:run", run=settings, schedule=schedule)
    found = workers.run(
        3, f"{CASES}:resumed", run=settings, schedule=schedule, at=3, reads_first=reads_first, timeout=20
    )
    assert_equal(expected, found)
    if not reads_first:
        assert found[0].returned == expected[0].returned


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("pipedream", {}), ("2bw", {"provisional": True}), ("2bw", {"error_feedback": True})],
    ids=["pipedream", "provisional", "error feedback"],
)
def test_weights_that_a_drain_changes_go_on_behind_it(schedule, options):
    """PipeDream's versions and predictions depend on where a run drains: a resumed run is one that drained there."""
    settings = Run(num_stages=2, dropout=0.3, num_microbatches=1 if schedule == "pipedream" else 4, sums=True)
    drained, resumed = (
        workers.run(2, f"{CASES}:resumed", run=settings, schedule=schedule, at=3, reads_first=True, stops=stops,
                    **options)
        for stops in (False, True)
    )  # fmt: skip
    assert_equal(drained, resumed)


def test_a_file_resumes_wherever_it_stands(tmp_path):
    """A program whose rows repeat after two batches, stopped between them."""
    path, settings = str(written(tmp_path, RHYTHM)), Run(num_stages=2, plain=True, dropout=0.3)
    expected = workers.run(2, f"{CASES}:run", run=settings, schedule=path)
    assert_equal(expected, workers.run(2, f"{CASES}:resumed", run=settings, schedule=path, at=2, reads_first=False))


def test_a_state_is_a_copy():
    """A pipeline that trains on and then loads its own state does the same again."""
    for first, second in workers.run(2, f"{CASES}:went_back", run=Run(num_stages=2, dropout=0.3), schedule="2bw", at=3):
        assert_equal([first], [second])
