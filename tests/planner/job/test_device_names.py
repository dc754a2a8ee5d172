"""A label is the GPU that it means, with its edition; what could mean several, or says more, is told."""

import pytest

from megatron.planner.job.devices import DEVICES, device_of, known_device


@pytest.mark.parametrize(
    ("text", "memory", "expected"),
    [
        ("A100-SXM-80GB", 80, ("A100-80", None, False)),
        ("A100-SXM4-40GB", None, ("A100-40", None, False)),
        ("A100-40", None, ("A100-40", None, False)),
        ("A100 (40GB)", None, ("A100-40", None, False)),
        ("16x V100-32GB (DGX-2)", None, ("V100-32", None, False)),
        ("V100-16", None, ("V100-16", None, False)),
        ("NVIDIA A100 40 GiB", None, ("A100-40", None, False)),
        ("32x V100-16GB (4 servers)", None, ("V100-16", None, False)),
        ("A100 (DGX-A100)", None, ("A100-80", None, True)),
        ("16x 1080Ti (2 servers)", None, ("GTX1080Ti", None, False)),
        ("RTX 2080 Ti", None, ("RTX2080Ti", None, False)),
        ("H200-141GB", None, ("H200", None, False)),
        ("H100-96GB (HBM2e, 500 W)", None, ("H100", pytest.approx(95.0, abs=0.1), False)),
        ("cpu", None, ("cpu", None, False)),
        ("A100-PCIE-40GB", None, ("A100-PCIe-40", None, False)),
        ("A100-40 PCIe", None, ("A100-PCIe-40", None, False)),
        ("A100 PCIe", None, ("A100-PCIe-80", None, True)),
        ("8x H100 PCI-E", None, ("H100-PCIe", None, False)),
        ("H100-NVL-94GB", None, ("H100-NVL", None, False)),
        ("4x NVIDIA L40S", 48, ("L40S", None, False)),
        ("NVIDIA B200", 180, ("B200", None, False)),
        ("B200-192GB", None, ("B200", None, False)),
        ("B200", 96, ("B200", pytest.approx(95.0, abs=0.1), False)),
        ("GB200 NVL72", None, ("GB200", None, False)),
        ("GB200", 186, ("GB200", None, False)),
        ("V100-PCIE-16GB", None, ("V100-16", None, False)),
        ("GB200 NVL4", None, ("GB200", None, False)),
        ("L4", 24, ("L4", None, False)),
        ("GB300", 288, ("GB300", None, False)),
        ("MI300X", 192, ("MI300X", None, False)),
    ],
)
def test_processors(text, memory, expected):
    assert device_of(text, memory) == expected


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_name_means_itself(name):
    assert known_device(name) == known_device(name.lower()) == known_device(f"NVIDIA {name}") == name
    assert device_of(name, None)[0] == name


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-PCIe-80", "H100-PCIe"),
        ("GB200 NVL72", "GB200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H20 96GB", "H20"),
        ("A800-SXM4-80GB", "A800"),
        ("GB300 NVL72", "GB300"),
    ],
)
def test_labels_of_drivers_and_shops(label, name):
    assert known_device(label) == name


@pytest.mark.parametrize(
    "label",
    ["A100", "A100-PCIe", "8x H100", "H100-96GB", "H100-PCIe-96", "H200 NVL", "GH200", "A100X", "GB200 NVL4", "B300",
     "A1000", "L40", "H20-141GB", "", "cpu-like", "RTX 4090 D", "RTX 5090 D", "RTX 4090D", "RTX 3090 Ti",
     "RTX 4090 Laptop GPU", "A800 PCIe", "A800 40GB", "GH20", "MI300A", "RTX 6000 Ada"],
)  # fmt: skip
def test_what_means_several_or_more(label):
    assert known_device(label) is None
