"""Slots of a job, whatever the launcher's counting."""

import socket

import pytest

from megatron.pipeline.placement.topology import HOST_NAME, Process, find_slots, this_process
from tests.pipeline.placement.examples import machine


def processes(*places):
    return [Process(*place) for place in places]


def test_hosts_in_blocks():
    """torchrun: physical ranks are slots."""
    found = find_slots(processes(("a", 0), ("a", 1), ("b", 0), ("b", 1)))
    assert found.process_of_slot == (0, 1, 2, 3)
    assert found.nodes == (("a", 2), ("b", 2)) and found.node_sizes == [2, 2]


def test_hosts_in_turn():
    """A launcher that counts over the hosts: slots are brought together by host name and LOCAL_RANK."""
    found = find_slots(processes(("a", 1), ("b", 0), ("a", 0), ("b", 1)))
    assert found.process_of_slot == (2, 0, 1, 3)
    assert found.logical_ranks((0, 3, 1, 2)) == (3, 1, 0, 2)


def test_topology_orders_the_hosts():
    """With a topology its order counts, so slot 0 may lie on the second host; nodes may be used in part."""
    found = find_slots(processes(("node1", 0), ("node1", 1), ("node0", 0)), machine(8, 8))
    assert found.process_of_slot == (2, 0, 1) and found.nodes == (("node0", 1), ("node1", 2))


def test_without_local_ranks():
    """A host's processes are then counted by physical rank."""
    assert find_slots(processes(("a", None), ("b", None), ("a", None))).process_of_slot == (0, 2, 1)


@pytest.mark.parametrize("second", [0, None])
def test_places_that_cannot_be_told_apart(second):
    """Two processes with one LOCAL_RANK on a host, or one without: said with the remedy."""
    with pytest.raises(
        ValueError, match=r"2 processes on host a have LOCAL_RANK 0, .*; give each its own \(under Slurm"
    ):
        find_slots(processes(("a", 0), ("a", second)))


def test_host_that_the_topology_lacks():
    """A stranger is named."""
    with pytest.raises(ValueError, match="host c of the job is not among the topology's nodes"):
        find_slots(processes(("node0", 0), ("c", 0)), machine(1, 1))


def test_this_process_tells_its_host_by_the_name_that_it_is_given(monkeypatch):
    """By the host's own name otherwise; without LOCAL_RANK it has no place there."""
    monkeypatch.setenv(HOST_NAME, "left")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert this_process() == Process("left", 3)
    monkeypatch.delenv(HOST_NAME)
    monkeypatch.delenv("LOCAL_RANK")
    assert this_process() == Process(socket.gethostname(), None)
