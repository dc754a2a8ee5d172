"""The thread that computes goes on while the device works."""

import pytest

from tests import workers

CASES = "tests.pipeline.runtime.cuda.host_cases"
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {"schedule": "flush", "clip": 1.0},
        {"schedule": "2bw", "clip": 1.0},
        {"schedule": "2bw", "dtype": "float16", "clip": 1.0},
        {"schedule": "2bw", "dtype": "bfloat16", "dropout": 0.1},
    ],
    ids=str,
)


@pytest.mark.gpu
@OPTIONS
def test_only_the_chain_waits_for_the_device(options):
    """None of torch's calls that wait for the device, as far as torch knows them, is made by the thread that computes;
    the chain's, which reads norms and losses, makes some.
    """
    [waits] = workers.run(1, f"{CASES}:waits_by_thread", device="cuda", **options)
    by_thread = {thread: sorted({place for name, place in waits if name == thread}) for thread, _ in waits}
    assert "pipeline chain" in by_thread, "torch's watch has seen nothing"
    assert "MainThread" not in by_thread, by_thread["MainThread"]


@pytest.mark.gpu
@OPTIONS
def test_the_host_is_ahead_of_a_device_that_sleeps(options):
    """While a kernel sleeps ahead of a batch, the host returns from all its forwards and backwards; under 2bw from the
    step before, too. A flush's step needs the batch's own norm, and so the end of the sleep.
    """
    [calls] = workers.run(1, f"{CASES}:calls_ahead_of_a_sleep", device="cuda", **options)
    computations = [is_ahead for name, is_ahead in calls if name != "step"]
    steps = [is_ahead for name, is_ahead in calls if name == "step"]
    assert len(computations) == 4 and all(computations), calls
    assert steps == [options["schedule"] == "2bw"], calls


@OPTIONS
def test_a_cpu_has_done_its_work_when_a_call_returns(options):
    """The same batch on a CPU: two forwards, two backwards and a step, none of them ahead."""
    [calls] = workers.run(1, f"{CASES}:calls_ahead_of_a_sleep", place="cpu", **options)
    assert sorted(name for name, _ in calls) == ["backward", "backward", "forward", "forward", "step"]
    assert not any(is_ahead for _, is_ahead in calls)
