"""What labels say of memory and power, against data sheets."""

import pytest

from megatron.planner.published.label_rates import clock_of, memory_bandwidth_of


def test_memory_of_hopper_with_hbm2e():
    """Six stacks of 16 GB: 2.4 TB/s, as torchtitan's authors print for theirs; the PCIe edition of 80 GB has 2,039."""
    assert memory_bandwidth_of("H100-96GB (HBM2e, 500 W)", "H100", 96) == pytest.approx(2400, rel=0.03)
    assert memory_bandwidth_of("H100 HBM2E 80GB", "H100", 80) == pytest.approx(2039, rel=0.01)
    for label, name, size in (("H100-80GB", "H100", 80), ("A100 HBM2e", "A100-80", 80), ("H100 HBM2e", "H100", None)):
        assert memory_bandwidth_of(label, name, size) is None


def test_a_limit_of_power():
    """The NVL edition, limited to 400 W, has 835 of 989 TFLOP/s by its data sheet."""
    assert clock_of("H100 (400 W)", "H100") == pytest.approx(835 / 989, rel=0.02)
    assert 835 / 989 < clock_of("H100-96GB (HBM2e, 500 W)", "H100") == clock_of("H100 500W", "H100") < 1
    for label in ("H100 700 W", "H100", "H100 1000W", "500 Watt", "H100-500WX"):
        assert clock_of(label, "H100") is None
    assert clock_of("cpu 15W", "cpu") is None
