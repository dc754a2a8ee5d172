"""What papers call their machines is understood, and what is not is refused."""

import pytest

from megatron.planner.job.devices import DEVICES
from megatron.planner.published.hardware import HardwareRecord, rate_of_node


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x200Gb/s HDR IB per node (800 Gb/s)", 100),
        ("8x200Gb/s HDR IB", 200),
        ("8 x 200 Gb/s", 200),
        ("800 Gb/s per node (vTrain config)", 100),
        ("400 Gb/s per GPU", 400),
        ("12.5 Gb/s", 1.5625),
        ("25 Gbps Ethernet", 3.125),
        ("100GbE", 12.5),
        ("100 GB/s", 100),
        ("3.2 Tbps", 400),
        ("Selene (DGX A100, HDR IB)", None),
    ],
)
def test_rates(text, expected):
    """A number with its unit, of a node or of each of its 8 GPUs."""
    assert rate_of_node(text, 8) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    "text", ["-5 Gb/s", "0 GB/s", "nan GB/s", "fast Gb/s", "NVLink 600 GB/s, 100 Gbit/s to the others", "1.5x200 Gb/s"]
)
def test_a_rate_is_a_number(text):
    """Nothing is picked from a sentence."""
    with pytest.raises(ValueError, match=f"the bandwidth between nodes is {text}; give a number above 0 and a unit"):
        rate_of_node(text, 8)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gpu": "V100-16GB", "interconnect": "AWS p3.16xlarge for V100 (sec. 5)"}, 3.125),
        ({"gpu": "A100", "system": "Selene (DGX A100, HDR IB)"}, 200),
        ({"gpu": "A100 (DGX-A100)"}, 200),
        ({"gpu": "H100", "system": "DGX H100"}, 400),
        ({"gpu": "A100", "system": "Selene", "internode": "100 Gb/s"}, 12.5),
    ],
)
def test_networks(fields, expected):
    """A rate comes before what a machine is known to have."""
    cluster = HardwareRecord(**fields).cluster(64, [].append)
    assert cluster.bandwidth.between_nodes == pytest.approx(expected)


PCIE = {"mem_GB": 80, "peak_tflops": 300, "memory_bandwidth": 1900}  # made up, as of a data sheet


def test_another_edition_is_what_its_entry_says():
    """Nothing of the SXM edition's rates is left."""
    device = HardwareRecord(gpu="V100-PCIE-80GB", **PCIE, intranode="30 GB/s").cluster(8, [].append).device
    assert (device.peak_teraflops, device.memory_bandwidth, device.link_bandwidth) == (300, 1900, 30)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"gpu": "A100-PCIE-80GB"}, "A100-PCIe-80"),
        ({"gpu": "A100", "mem_GB": 40, "desc": "4 PCI-E cards"}, "A100-PCIe-40"),
        ({"gpu": "NVIDIA H100 PCIe", "intranode": "PCIe 5.0 x16"}, "H100-PCIe"),
        ({"gpu": "H100 NVL (94 GB)"}, "H100-NVL"),
        ({"gpu": "L40S PCIe"}, "L40S"),
    ],
)
def test_a_card_is_itself(fields, name):
    """Of the module with the same chip it has neither the rates nor the links."""
    cluster = HardwareRecord(**fields).cluster(8, [].append)
    assert cluster.gpu == name and cluster.device == DEVICES[name]


@pytest.mark.parametrize(
    ("fields", "num_gpus", "nodes", "hosts"),
    [
        ({"gpu": "GB200 NVL72", "internode": "400 Gb/s per GPU"}, 144, (72, 72), 36),
        ({"gpu": "GB200 NVL4", "internode": "400 Gb/s per GPU"}, 16, (4, 4, 4, 4), 4),
        ({"gpu": "GB200", "gpus_per_node": 64, "internode": "400 Gb/s per GPU"}, 128, (64, 64), 32),
        ({"gpu": "GB200"}, 32, (32,), 8),
        ({"gpu": "B200", "system": "DGX B200"}, 16, (8, 8), 2),
    ],
)
def test_a_rack_is_a_node_of_many_hosts(fields, num_gpus, nodes, hosts):
    cluster = HardwareRecord(**fields).cluster(num_gpus, [].append)
    assert tuple(node.gpus for node in cluster.topology.nodes) == nodes and len(cluster.gpus_of_hosts) == hosts
    if "internode" in fields:
        assert cluster.bandwidth.between_nodes == 50 * nodes[0]


@pytest.mark.parametrize(
    ("text", "rate"), [(None, 300), ("NVLink", 300), ("NVSwitch (600 GB/s)", 300), ("50 GB/s", 50)]
)
def test_links_within_a_node(text, rate):
    assert HardwareRecord(gpu="A100-80", intranode=text).cluster(8, [].append).device.link_bandwidth == rate


def test_a_network_that_follows_from_the_machine_is_said():
    said = []
    HardwareRecord(gpu="A100", system="Selene (DGX A100, HDR IB)", gpus_per_node=8).cluster(64, said.append)
    assert "200 GB/s between nodes, as selene has" in said
    said.clear()
    HardwareRecord(gpu="A100-80", system="Selene", internode="100 Gb/s", gpus_per_node=8).cluster(64, said.append)
    assert said == []


def test_a_part_of_a_machines_node_has_that_part_of_its_network():
    """A rate that the entry gives is of its own nodes, and stays."""
    said = []
    part = HardwareRecord(gpu="A100-80", system="Selene", gpus_per_node=4)
    assert part.cluster(16, said.append).bandwidth.between_nodes == 100
    assert said == ["100 GB/s between nodes, as selene, 4 of whose 8 GPUs have"]
    given = part.model_copy(update={"internode": "200 GB/s"})
    assert given.cluster(16, said.append).bandwidth.between_nodes == 200


@pytest.mark.parametrize(
    ("fields", "num_nodes"),
    [
        ({"gpu": "V100-32GB (DGX-2)"}, 4),
        ({"gpu": "A100", "system": "Selene"}, 8),
        ({"gpu": "A100", "gpus_per_node": 4, "internode": "100 Gb/s"}, 16),
    ],
)
def test_nodes(fields, num_nodes):
    assert len(HardwareRecord(**fields).cluster(64, [].append).topology.nodes) == num_nodes


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gpu": "A100"}, "bandwidth between them is not given"),
        ({"gpu": "MI250X"}, "hardware.gpu 'MI250X' is no GPU that is known"),
        ({"gpu": "A100", "gpus_per_node": 6}, "64 GPUs do not fill nodes of 6"),
        ({"gpu": "H200 NVL"}, "is the NVL edition, and .* those of H200 .SXM.; give mem_GB, peak_tflops, "),
        ({"gpu": "A100X 80GB"}, "is the A100X edition"),
        ({"gpu": "GH200"}, "is the Grace Hopper edition"),
        ({"gpu": "V100-PCIE-16GB"}, "is the PCIe edition"),
        ({"gpu": "V100", "desc": "4 PCI-E cards"}, "is the PCIe edition"),
        ({"gpu": "V100 PCIe", **PCIE, "intranode": "PCIe"}, "give a rate in intranode of its data sheet"),
        ({"gpu": "A100 PCIe", "intranode": "NVLink bridges"}, "known of A100-PCIe-80 is with no NVLink; give"),
        ({"gpu": "A100-80", "intranode": "PCIe 4.0"}, "'PCIe 4.0', and what is known of A100-80 is with NVLink; give"),
        ({"gpu": "1080Ti", "intranode": "NVLink"}, "what is known of GTX1080Ti is with no NVLink; give"),
        ({"gpu": "A100-80", "intranode": "fast GB/s"}, "the bandwidth within a node is fast GB/s; give"),
    ],
)
def test_what_is_not_known_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        HardwareRecord(**fields).cluster(64, [].append)


def test_a_rack_that_is_not_full_is_told():
    record = HardwareRecord(gpu="GB200", internode="400 Gb/s per GPU")
    with pytest.raises(ValueError, match="128 GPUs do not fill nodes of 72; give another"):
        record.cluster(128, [].append)
