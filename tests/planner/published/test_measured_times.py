"""Rates that were published in place of times are converted, and that is said."""

import pytest

from megatron.planner.published.entries import Unpredictable, read_entry
from tests.planner.published.measured import BPIPE_TABLE_7, KORTHIKANTI, changed

RUN = BPIPE_TABLE_7[0]
MODEL_OPERATIONS = read_entry(RUN).model.operations(128)


def measured(values: dict, **config):
    return read_entry(changed(RUN | {"measured": values}, config=config))


def test_operations_per_second_become_seconds():
    """With the model's operations, or with those of the layers' forward run again (Narayanan et al., equation 3)."""
    found = measured({"model_tflops_per_gpu": 120.0})
    assert found.seconds == pytest.approx(MODEL_OPERATIONS / (32 * 120e12)) and not found.published_mfu
    assert found.assumed == (f"{found.seconds:.4g} s an iteration, of 120 TFLOP/s a GPU",)
    again = measured({"tflops_per_gpu_incl_recompute": 150.0})
    B, s, layers, h, V = 128, 2048, 80, 9984, 51200
    formula = 96 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    assert again.seconds == pytest.approx(formula / (32 * 150e12))


def test_operations_that_may_be_two_things_are_not_read():
    """With layers recomputed tables print either; without, both are the same."""
    vague = measured({"tflops_per_gpu": 120.0})
    assert vague.seconds is None and "does not say whether what is recomputed counts" in vague.unread[0]
    plain = measured({"tflops_per_gpu": 120.0}, recompute="none")
    both = measured({"tflops_per_gpu_incl_recompute": 120.0}, recompute="none")
    assert plain.seconds == both.seconds == pytest.approx(MODEL_OPERATIONS / (32 * 120e12))
    assert measured({"tflops_per_gpu": 120.0, "iteration_s": 9.0}).unread == ()


def test_tokens_per_second_become_seconds():
    found = measured({"tokens_per_s_per_gpu": 256.0})
    assert found.seconds == 128 * 2048 / (32 * 256) and "256 tokens/s a GPU" in found.assumed[0]


def test_a_time_comes_before_a_rate():
    found = measured({"iteration_ms": 30000, "tokens_per_s_per_gpu": 1, "mfu": 0.2})
    assert found.seconds == 30 and not found.assumed


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"iteration_s": 30, "iteration_ms": 60000}, "which are two times; leave one out"),
        ({"model_tflops_per_gpu": 9600}, "above the GPU's peak of 312; give TFLOP/s of one GPU"),
        ({"mfu": 38.08}, "measured.mfu is 38.08; give a part of 1"),
    ],
)
def test_what_cannot_be_a_time_is_refused(values, reason):
    found = measured(values)
    assert isinstance(found, Unpredictable) and reason in found.reason


def test_published_tables_agree_with_themselves():
    """Korthikanti et al. print 13.75 s, and 51.4% of 312 TFLOP/s, for the 175B model."""
    by_rate = read_entry(KORTHIKANTI[3] | {"measured": {"model_tflops_per_gpu": 0.514 * 312}})
    assert by_rate.seconds == pytest.approx(13.75, rel=0.005)
