"""`--dry-run` of l2l: the memory of nodes, the largest model for it, and the lanes."""

import json

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args
from megatron.trainer.dry_run.dry_run import run_dry
from tests.trainer.arguments.command_line import argv

L2L = "--pipeline-schedule l2l --num-layers 12 --bf16 --dry-run-gpu V100-16"


@pytest.fixture
def dry(capsys, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(extra: str) -> tuple[int, str, str, dict]:
        file = tmp_path / "dry.json"
        args = parse_args([*argv(f"{L2L} {extra}"), "--dry-run-json", str(file)])
        status = run_dry(args, "pretrain_gpt.py")
        out, err = capsys.readouterr()
        return status, out, err, json.loads(file.read_text()).get("host", {})

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
