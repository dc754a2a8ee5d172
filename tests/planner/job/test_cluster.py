"""A cluster file with any unknown key or wrong value is told in one sentence that names the file."""

import json
import re

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from megatron.planner.job.cluster import Cluster, load_cluster
from megatron.planner.job.devices import DEVICES
from tests.draws import draws

WHOLE = {"gpu": "A100-80", "nodes": 2, "gpus_per_node": 8, "bandwidth": {"between_nodes": 100, "within_node": 300}}
VALUES = st.booleans() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.integers(max_value=0)
QUIET = draws(100, suppress=(HealthCheck.function_scoped_fixture,))


def refusal(tmp_path, document) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError) as found:
        load_cluster(path)
    told = str(found.value)
    assert told.startswith(f"{path}: ") and "\n" not in told and "; " in told and "pydantic" not in told
    return told


@QUIET
@given(st.text(max_size=12), VALUES, st.booleans())
def test_any_unknown_key(tmp_path, key, value, is_within):
    if key not in Cluster.model_fields and key not in WHOLE["bandwidth"]:
        inner = WHOLE["bandwidth"]
        refusal(tmp_path, WHOLE | ({"bandwidth": inner | {key: value}} if is_within else {key: value}))


@QUIET
@given(st.sampled_from(sorted(Cluster.model_fields)), VALUES)
def test_any_wrong_value(tmp_path, key, value):
    assume(key != "currency" or not (isinstance(value, str) and re.fullmatch("[A-Z]{3}", value)))
    assert key in refusal(tmp_path, WHOLE | {key: value}) or key == "gpu"


@pytest.mark.parametrize("nodes", [[], [{"name": "", "gpus": 8}]])
def test_what_is_empty_is_told_in_our_words(tmp_path, nodes):
    told = refusal(tmp_path, WHOLE | {"nodes": nodes})
    assert f"nodes{'.0.name' * bool(nodes)} is empty; see docs/grid_search.md" in told


def test_a_price_and_its_currency():
    """Neither is there unless it is said; the currency is then that of the United States."""
    assert Cluster(**WHOLE).price_per_gpu_hour is None
    assert Cluster(**WHOLE, price_per_gpu_hour=2.5).currency == "USD"
    assert Cluster(**WHOLE, price_per_gpu_hour=2, currency="CHF").currency == "CHF"


@pytest.mark.parametrize(("gpus", "network"), [(1, 12.5), (4, 50), (8, 100), (16, 100)])
def test_a_part_of_a_node_has_that_part_of_its_network(gpus, network):
    assert Cluster(**WHOLE).network_of(gpus) == network


def test_no_part_of_a_network_that_is_not_known():
    assert Cluster(gpu="A100-80", nodes=1).network_of(4) is None


def test_a_name_of_several_lines_is_shown_on_one(tmp_path):
    assert "'A100\\n80' is no GPU that is known; choose from" in refusal(tmp_path, WHOLE | {"gpu": "A100\n80"})


@pytest.mark.parametrize(
    ("key", "near"), [("bandwith", "bandwidth"), ("gpu_per_node", "gpus_per_node"), ("memory-gib", "memory_gib")]
)
def test_the_nearest_key_is_named(tmp_path, key, near):
    assert refusal(tmp_path, WHOLE | {key: 3}).endswith(f"; the nearest that is known is {near}")


def test_an_edition_is_described_by_its_data_sheet(tmp_path):
    """As the sentence on its name asks for; nothing of the SXM edition's rates is left."""
    assert "with memory_gib, peak_teraflops, memory_bandwidth and bandwidth.within_node" in refusal(
        tmp_path, WHOLE | {"gpu": "V100-PCIe"}
    )
    said = {"memory_gib": 79, "peak_teraflops": 300, "memory_bandwidth": 1900}
    device = Cluster(**WHOLE | said | {"bandwidth": {"between_nodes": 100, "within_node": 30}}).device
    rates = (device.memory_gib, device.peak_teraflops, device.memory_bandwidth, device.link_bandwidth)
    assert rates == (79, 300, 1900, 30)


def test_a_host_has_a_part_of_a_rack():
    """Links are of the 72 GPUs of a rack; memory and its optimizer are of the 4 GPUs of a tray."""
    cluster = Cluster(gpu="GB200", nodes=2, bandwidth={"between_nodes": 3600})
    assert cluster.num_gpus == 144 and cluster.gpus_of_hosts == (4,) * 36
    assert cluster.host_of_slot[70:75] == (17, 17, 18, 18, 18)
    assert cluster.topology.node_of_slot[70:75] == (0, 0, 1, 1, 1)
    alone = Cluster(gpu="GB200", nodes=1, gpus_per_host=1)
    assert cluster.optimizer_ns(30) == 4 * alone.optimizer_ns(30)
    assert Cluster(gpu="H100", nodes=3, bandwidth={"between_nodes": 400}).gpus_of_hosts == (8, 8, 8)


def test_peaks_of_another_clock_go_together():
    assert Cluster(gpu="H100", nodes=1, peak_teraflops=989 / 2).device.peak_teraflops_fp8 == 1979 / 2


DESCRIBED = {
    "gpu": "Gaudi 9", "nodes": 2, "gpus_per_node": 8, "bandwidth": {"between_nodes": 100, "within_node": 300},
    "memory_gib": 90, "peak_teraflops": 400, "memory_bandwidth": 2500,
}  # fmt: skip


def test_a_gpu_that_is_described_in_full_is_taken():
    """With its own rates, A100's part of its peak, and no FP8."""
    found = Cluster(**DESCRIBED)
    assert found.gpu == "Gaudi 9" and not found.is_known and not found.is_cpu
    device = found.device
    assert (device.memory_gib, device.peak(2), device.peak(4)) == (90, 400e12, 400e12)
    assert (device.memory_bandwidth, device.link_bandwidth, device.peak_teraflops_fp8) == (2500, 300, None)
    assert device.product_part == DEVICES["A100-80"].product_part
    alone = {name: value for name, value in DESCRIBED.items() if name != "bandwidth"}
    assert Cluster(**alone | {"nodes": 1, "gpus_per_node": 1}).num_gpus == 1


@pytest.mark.parametrize(
    ("without", "more"),
    [("memory_gib", {}), ("peak_teraflops", {}), ("memory_bandwidth", {}), ("bandwidth.within_node", {}),
     ("host_bandwidth", {"host_memory_gib": 1000})],
)  # fmt: skip
def test_what_is_missing_of_a_description_is_named(tmp_path, without, more):
    said = DESCRIBED | more
    if "within_node" in without:
        said["bandwidth"] = {"between_nodes": 100}
    said.pop(without, None)
    told = refusal(tmp_path, said)
    assert "'Gaudi 9' is no GPU that is known; choose from A100-80, " in told
    assert told.endswith(f"or describe it in full: give {without} of its data sheet")


def test_a_name_that_would_leave_a_comment_is_none(tmp_path):
    """It stands in the head of scripts."""
    assert "is no GPU that is known" in refusal(tmp_path, DESCRIBED | {"gpu": "x\nrm -r ."})
