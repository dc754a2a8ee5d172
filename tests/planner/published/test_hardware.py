"""What papers call their machines is understood, and what is not is refused."""

import pytest

from megatron.planner.job.devices import DEVICES
from megatron.planner.published.entry_parts import HardwareRecord, rate_of_node


def cluster(num_gpus: int = 64, **fields: object):
    """The cluster, and what was filled in."""
    said = []
    return HardwareRecord(**fields).cluster(num_gpus, said.append), said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x200Gb/s HDR IB per node (800 Gb/s)", 100), ("8 x 200 Gb/s", 200),
        ("800 Gb/s per node (vTrain config)", 100), ("400 Gb/s per GPU", 400),
        ("12.5 Gb/s", 1.5625), ("100 GB/s", 100), ("Selene (DGX A100, HDR IB)", None),
    ],
)  # fmt: skip
def test_rates(text, expected):
    """A number with its unit, of a node or of each of its 8 GPUs."""
    assert rate_of_node(text, 8) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("text", ["-5 Gb/s", "0 GB/s", "nan GB/s", "NVLink 600 GB/s", "1.5x200 Gb/s", "1.2.3 GB/s"])
def test_a_rate_is_a_number(text):
    """Nothing is picked from a sentence."""
    with pytest.raises(ValueError, match=f"the bandwidth in hardware is '{text}'; give a number above 0 and a unit"):
        rate_of_node(text, 8)


@pytest.mark.parametrize(
    ("fields", "network", "num_nodes"),
    [
        ({"gpu": "V100-16GB", "interconnect": "AWS p3.16xlarge for V100 (sec. 5)"}, 3.125, 8),
        ({"gpu": "A100", "system": "Selene (DGX A100, HDR IB)"}, 200, 8),
        ({"gpu": "A100 (DGX-A100)"}, 200, 8),
        ({"gpu": "V100-32GB (DGX-2)"}, 100, 4),
        ({"gpu": "A100", "system": "Selene", "internode": "100 Gb/s"}, 12.5, 8),
        ({"gpu": "GB200 NVL4", "internode": "400 Gb/s per GPU"}, 200, 16),
        ({"gpu": "A100-80", "system": "Selene", "gpus_per_node": 4}, 100, 16),
    ],
)
def test_networks_and_nodes(fields, network, num_nodes):
    """A rate comes before what a machine is known to have, which is said; a part of a node has that part of it."""
    found, said = cluster(**fields)
    assert found.bandwidth.between_nodes == pytest.approx(network) and len(found.topology.nodes) == num_nodes
    assert any("GB/s between nodes, as " in text for text in said) is ("internode" not in fields)


def test_what_a_label_says_of_rates():
    """Six stacks of HBM2e: 2.4 TB/s, as torchtitan's authors print for theirs. Limited to 400 W, as the NVL edition, an
    H100 has nearly its 835 TFLOP/s."""
    found, said = cluster(8, gpu="H100-96GB (HBM2e, 500 W)")
    assert found.memory_bandwidth == pytest.approx(2400, rel=0.03) and 835 < found.peak_teraflops < 989
    assert len(said) == 2 and "at the clock" in said[0] and "as HBM2e of that size has" in said[1]
    assert cluster(8, gpu="H100 (400 W)")[0].peak_teraflops == pytest.approx(835, rel=0.02)
    for label in ("H100 700 W", "H100-80GB", "A100-80 HBM2e", "500 Watt H100"):
        found, said = cluster(8, gpu=label)
        assert (found.peak_teraflops, found.memory_bandwidth, said) == (None, None, [])
    given, said = cluster(8, gpu="H100-96GB (HBM2e, 500 W)", peak_tflops=900, memory_bandwidth=2000)
    assert (given.peak_teraflops, given.memory_bandwidth, said) == (900, 2000, [])


PCIE = {"mem_GB": 80, "peak_tflops": 300, "memory_bandwidth": 1900}  # made up, as of a data sheet


def test_another_edition_is_what_its_entry_says():
    """Nothing of the SXM edition's rates is left; a card that is known is itself."""
    device = cluster(8, gpu="V100-PCIE-80GB", **PCIE, intranode="30 GB/s")[0].device
    assert (device.peak_teraflops, device.memory_bandwidth, device.link_bandwidth) == (300, 1900, 30)
    known = cluster(8, gpu="A100", mem_GB=40, desc="4 PCI-E cards")[0]
    assert known.gpu == "A100-PCIe-40" and known.device == DEVICES["A100-PCIe-40"]
    for text, rate in ((None, 300), ("NVLink", 300), ("50 GB/s", 50)):
        assert cluster(8, gpu="A100-80", intranode=text)[0].device.link_bandwidth == rate


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gpu": "A100"}, "bandwidth between them is not given"),
        ({"gpu": "MI250X"}, "hardware.gpu 'MI250X' is no GPU that is known"),
        ({"gpu": "A100", "gpus_per_node": 6}, "64 GPUs do not fill nodes of 6"),
        ({"gpu": "H200 NVL"}, "is the NVL edition, and .* those of H200 .SXM.; give mem_GB, peak_tflops, "),
        ({"gpu": "GH200"}, "is the Grace Hopper edition"),
        ({"gpu": "V100 PCIe", **PCIE, "intranode": "PCIe"}, "give a rate in intranode of its data sheet"),
        ({"gpu": "A100 PCIe", "intranode": "NVLink bridges"}, "known of A100-PCIe-80 is with no NVLink; give"),
        ({"gpu": "A100-80", "intranode": "PCIe 4.0"}, "'PCIe 4.0', and what is known of A100-80 is with NVLink; give"),
    ],
)
def test_what_is_not_known_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        cluster(**fields)
