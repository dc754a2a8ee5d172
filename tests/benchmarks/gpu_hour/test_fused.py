"""The part `fused` as far as a CPU goes."""

import pytest

from tests import workers

CASES = "tests.benchmarks.gpu_hour.part_cases"
REFUSED = "Weight gradients of small layers: no addmm here"


@pytest.fixture(scope="module")
def found() -> dict:
    [found] = workers.run(1, f"{CASES}:rehearse", part="fused")
    return found


@pytest.mark.parametrize("size", ["small", "large"])
def test_all_of_torchs_kernels_take_the_same_step(found, size):
    figures = found["figures"]
    for name in ("loop", "foreach", "fused"):
        assert len(figures[f"{size}_adam_{name}_seconds"]) == 2 and min(figures[f"{size}_adam_{name}_seconds"]) > 0
    assert figures[f"{size}_adam_largest_difference_of_fused"] < 1e-5
    assert len(figures[f"{size}_adam_ratio_of_foreach_over_fused"]) == 2


def test_a_product_that_a_cpu_lacks_is_said(found):
    assert any(line.startswith(REFUSED) for line in found["lines"])
    assert "small_accumulation_addmm_seconds" not in found["figures"]
    assert min(found["figures"]["small_accumulation_plain_seconds"]) > 0
    assert found["lines"][-1] == "Apex is not installed, so no GPT was trained with its fused accumulation"


def test_a_product_that_adds_has_the_sums_of_both_steps():
    """Where the product is there, it is called as torch's schema says, and its sums differ by BF16's rounding."""
    [found] = workers.run(1, f"{CASES}:fused_with_torchs_product")
    apart = found["figures"]["small_accumulation_largest_difference_of_addmm"]
    assert 0 < apart < 0.2
    assert len(found["figures"]["small_accumulation_ratio_of_plain_over_addmm"]) == 2


def test_with_apex_its_kernels_are_measured():
    """Its Adam, its accumulation, which in the stand-in has torch's bits, and a GPT that trains with it: one call for
    each linear layer of each backward."""
    [found] = workers.run(1, f"{CASES}:fused_with_apex")
    figures = found["figures"]
    assert figures["large_adam_largest_difference_of_apex"] == 0.0
    assert figures["large_accumulation_largest_difference_of_apex"] == 0.0
    assert len(figures["large_training_ratio_of_plain_over_fused"]) == 2
    assert figures["large_training_largest_difference"] == 0.0
    linears = (1 * 4 + 1) + (2 * 4 + 1)  # of the two sizes, output layers included
    assert found["num_calls"] == linears * 6 * 2 + 2 * 4 * 5  # microbatches; a layer five times
    assert not any("not installed" in line for line in found["lines"])


def test_without_memory_for_one_size_the_others_go_on():
    [found] = workers.run(1, f"{CASES}:rehearse", part="fused", exhausts=("measure_adam",))
    assert any(line.startswith("Adam on small layers: out of memory") for line in found["lines"])
    assert "small_adam_fused_seconds" not in found["figures"] and "large_adam_fused_seconds" in found["figures"]
    assert "small_accumulation_plain_seconds" in found["figures"]
