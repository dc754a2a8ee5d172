"""What papers call their machines is understood, and what is not is refused."""

import pytest

from megatron.planner.published.hardware import device_of, node_bandwidth, usual_gpus_per_node


@pytest.mark.parametrize(
    ("text", "memory", "expected"),
    [
        ("A100-SXM-80GB", 80, ("A100-80", None, False)),
        ("A100-SXM4-40GB", None, ("A100-40", None, False)),
        ("A100-40", None, ("A100-40", None, False)),
        ("V100-16", None, ("V100-16", None, False)),
        ("NVIDIA A100 40 GiB", None, ("A100-40", None, False)),
        ("32x V100-16GB (4 servers)", None, ("V100-16", None, False)),
        ("A100 (DGX-A100)", None, ("A100-80", None, True)),
        ("16x 1080Ti (2 servers)", None, ("GTX1080Ti", None, False)),
        ("RTX 2080 Ti", None, ("RTX2080Ti", None, False)),
        ("H200-141GB", None, ("H200", None, False)),
        ("H100-96GB (HBM2e, 500 W)", None, ("H100", pytest.approx(95.0, abs=0.1), False)),
        ("cpu", None, ("cpu", None, False)),
    ],
)
def test_processors(text, memory, expected):
    assert device_of(text, memory) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x200Gb/s HDR IB per node (800 Gb/s)", 100),
        ("8x200Gb/s HDR IB", 200),
        ("8 x HDR InfiniBand", 200),
        ("400 Gb/s per GPU", 400),
        ("12.5 Gb/s", 1.5625),
        ("25 Gbps Ethernet", 3.125),
        ("100GbE", 12.5),
        ("100 GB/s", 100),
        ("3.2 Tbps", 400),
        ("NVLink 600 GB/s, 100 Gbit/s to the others", 12.5),
        ("AWS p3.16xlarge for V100 (sec. 5)", 3.125),
        ("Selene (DGX A100, HDR IB)", 200),
        ("DGX H100", 400),
        ("A100 -80GB, 100 Gb/s", 12.5),
    ],
)
def test_networks(text, expected):
    assert node_bandwidth((None, text), 8) == pytest.approx(expected)


def test_nodes():
    assert usual_gpus_per_node((None, "V100-32GB (DGX-2)"), 8) == 16
    assert usual_gpus_per_node(("Selene",), 8) == 8
    with pytest.raises(ValueError, match="is not given"):
        node_bandwidth(("NVLink 600 GB/s",), 8)
    with pytest.raises(ValueError, match="'B200' is no GPU that is known"):
        device_of("B200", 192)
