"""A weight policy is a row: with delays of two and three batches, which no preset has, everything follows from it.

W(t+1) = W(t) - update(g(W(t - delay))): the same losses, norms, scales and weights as one process.
"""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.made_up_policies import DELAYS, registered
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training

FULL = pytest.mark.full


def run_module(name, **options):
    from tests.pipeline.runtime.stages.module.module_cases import run

    with registered():
        return run(name, **options)


def train_gpt(**options):
    with registered():
        return cases.train(**options)


def gpt_alone(**options):
    from tests.pipeline.runtime.stages.megatron.megatron_reference import reference

    with registered():
        return reference(**options)


def resume_gpt(**options):
    with registered():
        return cases.resume(**options)


def record_gpt(**options):
    from tests.pipeline.runtime.cuda.recorded_cases import train_gpt as record

    with registered():
        return record(**options)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", DELAYS)
@pytest.mark.parametrize(
    ("num_ranks", "batches", "drains"),
    [
        (1, (2,) * 7, ()),
        (2, (2, 2, 3, 3, 4, 1, 5, 2), ()),
        (2, (2, 2, 3, 3, 4, 1, 5, 2), (0, 3, 4)),
        pytest.param(4, (2, 3, 2, 5, 4, 4, 2, 2, 3), (), id="4, less than a pipeline's depth"),
        pytest.param(4, (2, 3, 2, 5, 4, 4, 2, 2, 3), (1, 6), marks=FULL),
    ],
)
def test_modules_train_as_one_process(name, num_ranks, batches, drains):
    """Ramp-ups, drains in the middle with evaluations, batches smaller than the pipeline is deep: bit-equal losses and
    parameters.
    """
    training = Training(batches=batches)
    outcomes = workers.run(num_ranks, f"{__name__}:run_module", name=name, training=training, drains=drains, evaluate=2)
    expected = reference.train(training, delay=DELAYS[name])
    for outcome in outcomes:
        assert [report.losses["loss"] for report in outcome.reports] == expected.losses
        assert len(outcome.evaluations) == len(drains)
        assert outcome.peak_versions == outcome.num_slots == DELAYS[name] + 1
        for parameter, tensor in outcome.parameters.items():
            assert torch.equal(tensor, expected.parameters[parameter])


def test_clipped_modules_with_an_overflow():
    """The exact norm clips, and a batch whose gradients are not finite steps nowhere."""
    training = Training(batches=(3,) * 7, clip_grad=0.05, poisoned_microbatch=7)
    outcomes = workers.run(2, f"{__name__}:run_module", name="3bw", training=training)
    expected = reference.train(training, delay=2)
    assert [report.overflow for report in outcomes[0].reports] == [False, False, True, False, False, False, False]
    for outcome in outcomes:
        for report, loss, norm in zip(outcome.reports, expected.losses, expected.grad_norms, strict=True):
            if not report.overflow:
                assert report.losses["loss"] == pytest.approx(loss, rel=1e-6)
                assert report.grad_norm == pytest.approx(norm, rel=1e-6)
        for parameter, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[parameter], rtol=0, atol=1e-6)


COMMON = {"p": 2, "layers": 2, "batches": (2, 2, 3, 3, 4, 4, 2), "warmup": 8}
GPT = {
    "3bw": COMMON | {"schedule": "3bw", "clip": 0.5, "tied": True, "drains": (1, 4)},
    "4bw": COMMON | {"schedule": "4bw"},
    "3bw fp16 with overflows": COMMON
    | {"schedule": "3bw", "dtype": "float16", "hidden": 16, "overflow_batches": (2, 3), "hysteresis": 1},
    "4bw balanced": COMMON | {"schedule": "4bw", "p": 4, "layers": 4, "batches": (4,) * 6, "balance": True},
    "3bw distributed optimizer": COMMON
    | {"schedule": "3bw", "d": 2, "distributed_optimizer": True, "batches": (4, 4, 6, 6, 8, 8)},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL) if "4bw" in name else name for name in GPT])
def test_a_gpt_trains_as_one_process(name):
    """megatron.core's update, too: losses and norms to 1e-5, loss scales and learning rates alike, the newest and the
    oldest live weights to the tolerances of 2bw.
    """
    options = GPT[name]
    case = cases.Case(**options)
    ranks = workers.run(case.num_ranks, f"{__name__}:train_gpt", timeout=100, **options)
    [expected] = workers.run(1, f"{__name__}:gpt_alone", timeout=100, **options)
    worst = cases.deviation(case, expected, ranks)
    half = case.dtype == "float16"
    assert worst.loss < (2e-3 if half else 1e-5) and worst.norm < (5e-2 if half else 1e-5)
    assert max(worst.newest, worst.older) < (2e-3 if half else 2e-6)
    for result in ranks:
        assert result["peak_versions"] == DELAYS[case.schedule] + 1
        assert result["num_gradient_slots"] == DELAYS[case.schedule] + 1


def test_one_gradient_buffer_is_refused():
    """With longer delays a drain would decide by which batch's norm gradients are clipped."""
    options = COMMON | {"schedule": "3bw", "p": 1, "single_gradient_buffer": True}
    with pytest.raises(workers.WorkerError, match="goes with a delay of one batch, and 3bw has one of 2"):
        workers.run(1, f"{__name__}:train_gpt", **options)


RESUMED = {
    "4bw": COMMON | {"schedule": "4bw", "clip": 0.5, "tied": True, "dropout": 0.1},
    "3bw fp16, overflow around": COMMON
    | {"schedule": "3bw", "dtype": "float16", "hidden": 16, "overflow_batches": (2, 3), "hysteresis": 1},
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["4bw", pytest.param("3bw fp16, overflow around", marks=pytest.mark.full)])
def test_a_resumed_run_has_the_same_numbers(name):
    """All live versions, and the loss scales that batches in flight would have used, are state: bit-equal."""
    whole_ranks = workers.run(2, f"{__name__}:train_gpt", timeout=100, **RESUMED[name])
    for border in (1, 4):
        resumed_ranks = workers.run(2, f"{__name__}:resume_gpt", timeout=100, border=border, **RESUMED[name])
        for whole, resumed in zip(whole_ranks, resumed_ranks, strict=True):
            assert repr(whole["batches"]) == repr(resumed["batches"])
            for version in ("newest", "older"):
                for key, tensor in whole[version].items():
                    assert torch.equal(tensor, resumed[version][key]), key


@pytest.mark.full
def test_they_are_in_order_on_streams():
    """The stand-in for CUDA finds nothing: three gradient buffers and weight slots, replicas, shards, overflows."""
    options = {"schedule": "3bw", "p": 2, "d": 2, "distributed_optimizer": True, "dtype": "float16", "drains": (2,)}
    options |= {"layers": 2}
    accounts = workers.run(
        4, f"{__name__}:record_gpt", timeout=100, batches=(4,) * 5, overflow_batches=(1, 2), **options
    )
    for rank, account in enumerate(accounts):
        assert not account.findings, f"rank {rank}: {account.findings}"


def test_the_order_of_the_reports():
    """Reports come as late as the weights are old, each once, in order; a drain brings the rest."""
    training = Training(batches=(2,) * 6)
    outcomes = workers.run(2, f"{__name__}:run_module", name="4bw", training=training)
    for outcome in outcomes:
        assert [report.batch for report in outcome.reports] == list(range(6))
        assert Counter(report.batch for report in outcome.reports).most_common(1)[0][1] == 1
