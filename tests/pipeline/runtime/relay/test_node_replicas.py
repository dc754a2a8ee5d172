"""Replicas of one host map the same memory, wait for one another, and leave nothing behind."""

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.pipeline.runtime.relay import node_replicas
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from tests import workers

HERE = "tests.pipeline.runtime.relay.test_node_replicas"


def write_and_read(hosts):
    """Each rank writes its part of a buffer: who is with it, what it reads, what is open or in /dev/shm since."""
    rank, before = dist.get_rank(), (set(os.listdir("/dev/shm")), _anonymous_files())
    replicas = NodeReplicas(range(len(hosts)), host=hosts[rank])
    memory = replicas.buffer((len(hosts), 3), torch.bfloat16)
    assert not memory.any() and memory.shape == (len(hosts), 3)
    replicas.barrier()
    memory[rank] = rank + 1
    replicas.barrier()
    read = memory[:, 0].tolist()
    replicas.barrier()
    again = replicas.again()
    again.barrier()
    dist.barrier()  # before anyone's connections are gone
    left = set(os.listdir("/dev/shm")) - before[0], _anonymous_files() - before[1]
    return replicas.ranks, read, left


def _anonymous_files():
    targets = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return {target for target in targets if "memfd:replicas" in target}


def test_what_one_writes_all_read():
    """Those of one host; another host has memory of its own."""
    outcomes = workers.run(4, f"{HERE}:write_and_read", hosts=["one", "two", "one", "three"])
    nothing = (set(), set())
    assert outcomes == [
        ([0, 2], [1.0, 0.0, 3.0, 0.0], nothing),
        ([1], [0.0, 2.0, 0.0, 0.0], nothing),
        ([0, 2], [1.0, 0.0, 3.0, 0.0], nothing),
        ([3], [0.0, 0.0, 0.0, 4.0], nothing),
    ]


def cannot_open(reason):
    if dist.get_rank() == 1:
        if reason == "permission":
            node_replicas.os = _System(readlink=_refused)
        else:
            node_replicas.os = _System(readlink=lambda path: "/memfd:another (deleted)")
    try:
        replicas = NodeReplicas([0, 1], host="here")
        replicas.buffer((3,), torch.float32)
    except ValueError as error:
        return str(error)
    finally:
        node_replicas.os = os


class _System:
    def __init__(self, **replaced):
        self._replaced = replaced

    def __getattr__(self, name):
        return self._replaced.get(name) or getattr(os, name)


def _refused(*_):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("reason", "why"),
    [("permission", r"\[Errno 13\] Permission denied"), ("another", r"/proc/\d+/fd/\d+ is another file")],
)
def test_memory_that_cannot_be_opened_is_told_by_all(reason, why):
    """As between containers on one node, or on two hosts of one name: what to do, on every replica."""
    first, second = workers.run(2, f"{HERE}:cannot_open", reason=reason)
    assert "replicas on here cannot share its memory: it failed on rank 1; run them as one user in one" in first
    assert re.search(rf"memory of rank 0 cannot be opened \({why}\); run them", second), second


def wait_in_vain():
    replicas = NodeReplicas([0, 1], host="here", timeout=timedelta(seconds=1))
    replicas.barrier()
    try:
        if dist.get_rank() == 0:
            replicas.barrier()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()


def test_who_does_not_come_is_named():
    """After the timeout."""
    message, _ = workers.run(2, f"{HERE}:wait_in_vain")
    assert re.match("rank 1 did not join the replicas on here: .*[Tt]imed out", message), message
