"""The rates of GPUs."""

from dataclasses import replace

import pytest

from megatron.planner.job.cluster import Cluster
from megatron.planner.job.devices import DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_products_reach_a_part_of_the_peak(name):
    """In every precision that it multiplies in, and less of the peak in FP8 than in 16 bits. MI300X has the least."""
    device = DEVICES[name]
    assert (0.5 if name == "MI300X" else 0.7) < device.product_part < 0.9
    assert device.product_rate(2) == device.product_part * device.peak(2)
    assert device.product_rate(4) == device.product_part * device.peak(4) < device.product_rate(2) + 1
    assert (device.product_part_fp8 is None) is (device.peak_teraflops_fp8 is None)
    if device.product_part_fp8 is not None:
        assert device.product_part_fp8 < device.product_part
        assert 1.5 < device.product_rate(1) / device.product_rate(2) < 2


def test_parts_that_were_measured():
    """TFLOP/s of the fastest products; H200 is H100 in 16 bits."""
    rates = {name: round(DEVICES[name].product_rate(2) / 1e12, 1) for name in ("A100-80", "H100", "H200", "B200")}
    assert rates == {"A100-80": 271.2, "H100": 794.5, "H200": 794.5, "B200": 1745.0}
    assert DEVICES["GB200"].product_rate(1) == pytest.approx(3615.6e12)


def test_a_lower_clock_lowers_both_and_a_cpu_has_all_of_its_peak():
    half = Cluster(gpu="H100", nodes=1, peak_teraflops=989 / 2).device
    assert half.product_rate(2) == pytest.approx(DEVICES["H100"].product_rate(2) / 2)
    assert half.product_rate(1) == pytest.approx(DEVICES["H100"].product_rate(1) / 2)
    cpu = Cluster(gpu="cpu", nodes=1).device
    assert cpu.product_rate(4) == cpu.peak(4)


@pytest.mark.parametrize(
    ("name", "like", "otherwise"),
    [
        ("A800", "A100-80", {"link_bandwidth": 200}),
        ("H800", "H100", {"link_bandwidth": 200}),
        ("GB300", "GB200", {"memory_gib": 275.5}),
    ],
)
def test_editions_differ_in_what_their_sheets_say(name, like, otherwise):
    """400 GB/s of NVLink in both directions, in place of 600 and 900; more memory on the same chip's rates."""
    assert DEVICES[name] == replace(DEVICES[like], **otherwise)


def test_links():
    """Of one direction: an MI300X has seven of 64 GB/s; cards have PCIe's, and none of these is taken for NVLink."""
    assert DEVICES["MI300X"].link_bandwidth == 448 and DEVICES["H20"].link_bandwidth == 450
    cards = [DEVICES[name] for name in ("L4", "A6000", "RTX4090", "RTX3090")]
    assert all(31 < each.link_bandwidth < 32 and not each.has_nvlink for each in cards)
    assert 63 <= DEVICES["RTX5090"].link_bandwidth < 64 and not DEVICES["RTX5090"].has_nvlink
