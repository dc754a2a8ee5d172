"""`--dry-run` of l2l: the memory of nodes, the largest model for it, and the lanes."""

import pytest

from megatron import backend

backend.install()

from tests.trainer.arguments.command_line import argv

L2L = "--pipeline-schedule l2l --num-layers 12 --bf16 --dry-run-gpu V100-16"


@pytest.fixture
def dry(run_words):
    """Run l2l dry; returns what is said of the host in the place of the JSON."""

    def run(extra: str) -> tuple[int, str, str, dict]:
        *said, found = run_words(argv(f"{L2L} {extra}"))
        return *said, found.get("host", {})

    return run


def test_host_and_largest_model(dry):
    """A node has what its ranks have, once for its replicas; the largest model fits, and is what it is said to be."""
    status, out, err, host = dry("--dry-run 4 --pipeline-model-parallel-size 2 --dry-run-host-memory 1")
    assert (status, err) == (0, "") and "host: fits; node 0 leaves" in out and "checked as a run there" in out
    assert host["node_bytes"] == [sum(rank["total"] for rank in host["rank_bytes"])], "two replicas, one store"
    layers = host["largest_model"]["num_layers"]
    assert f"the largest model of this shape for it: {layers} layers" in out and layers > 12
    assert layers % 2 == 0 and host["verdict"]["spare_gib"] > 0
    lanes = host["lane_seconds"]
    assert set(lanes) == {"device", "to device", "from device", "host optimizer"}
    assert 0 < max(lanes.values()) <= host["iteration_seconds"]


def test_too_little_host_memory_is_refused(dry):
    status, _, err, host = dry("--dry-run 1 --dry-run-host-memory 0.001")
    assert status == 1 and host["verdict"]["fits"] is False and host["largest_model"] is None
    assert "node 0 misses" in err and "of the 0.001 GiB of --dry-run-host-memory; use fewer layers" in err
    assert err.count("\n") == 1


def test_without_the_hosts_memory_it_says_what_is_needed(dry):
    status, out, _, host = dry("--dry-run 1")
    assert status == 0 and host["verdict"] is host["largest_model"] is None
    assert "--dry-run-host-memory says whether nodes have it" in out
